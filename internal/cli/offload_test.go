package cli

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/tenant"
)

// joinOffloader joins node n, which can take part in offloads. It has a container of tenant green if n is 1, and a
// stream on which it confirms each change that it receives, except if n is 4; following is closed when the stream has
// begun.
func joinOffloader(t *testing.T, s *orchestrator.Server, n int) (following <-chan struct{}) {
	t.Helper()
	client, err := join.Dial(t.Context(), join.Config{
		URL: "https://" + s.Addr().String(), Token: s.Token(), StateDir: t.TempDir(), NodeName: fmt.Sprint("n", n),
		NodeUUID: fmt.Sprintf("00000000-0000-4000-8000-%012d", n), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	if _, err := client.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Enforces: []string{tenant.Nimitz}, Offloads: true, MtuReserve: tenant.OffloadOverhead,
	})); err != nil {
		t.Fatal(err)
	}
	report := &pilasterv1.FollowRequest{Sequence: 10}
	if n == 1 {
		resolve := &pilasterv1.ResolveRequest{Tenant: "green"}
		if _, err := client.Resolve(t.Context(), connect.NewRequest(resolve)); err != nil {
			t.Fatal(err)
		}
		allocate := &pilasterv1.AllocateRequest{Tenant: "green"}
		if _, err := client.Allocate(t.Context(), connect.NewRequest(allocate)); err != nil {
			t.Fatal(err)
		}
		report.HostedTenants = []string{"green"}
		report.Hosting = []*pilasterv1.Hosting{{Tenant: "green", Holds: []uint32{1}}}
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	begun := make(chan struct{})
	go func() {
		stream := client.Follow(ctx)
		stream.Send(report)
		for first := true; ; first = false {
			r, err := stream.Receive()
			if err != nil {
				return
			}
			if first {
				close(begun)
			}
			if n == 4 {
				continue
			}
			for _, of := range append(r.GetSnapshot().GetTenants(), r.GetDelta().GetTenants()...) {
				h := &pilasterv1.Hosting{Tenant: of.Name, AppliedChanges: of.Changes, PoliciesRevision: r.Revision}
				if n == 1 {
					for _, o := range of.Offloads {
						for _, f := range o.Frontends {
							h.AnsweringFrontends = append(h.AnsweringFrontends, f.Node)
						}
					}
					h.Holds = []uint32{1}
					h.Offloaded = []*pilasterv1.OffloadedEndpoint{{Addresses: [][]byte{{10, 0, 1, 2}}, App: 1}}
				}
				report.Sequence++
				report.HostedTenants, report.Hosting = []string{of.Name}, []*pilasterv1.Hosting{h}
				if stream.Send(report) != nil {
					return
				}
			}
		}
	}()
	return begun
}

func TestOffloadCommands(t *testing.T) {
	s := startOrchestrator(t)
	command(t, "tenant", "create", "green", "--network", "nimitz", "--cidr", "10.0.0.0/16")
	command(t, "tenant", "create", "blue")
	for n := range 3 {
		<-joinOffloader(t, s, n+1)
	}
	two := strings.Fields("offload start green --node n1 --frontends 2")
	refused(t, ExitFailed, "tenant green has no policies", two...)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	policy := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\n" +
		"spec: {podSelector: {}, ingress: [{}]}\n"
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := command(t, "policy", "apply", "-f", file, "--tenant", "green"); r.code != ExitDone {
		t.Fatal(r)
	}
	for _, c := range []struct {
		code       int
		says, args string
	}{
		{ExitUsage, "required flag", "start green"},
		{ExitUsage, "1, 2, 4 or 8 frontends, not 3", "start green --node n1 --frontends 3"},
		{ExitUsage, "1, 2, 4 or 8 frontends, not 0", "start green --node n1 --frontends 0"},
		{ExitUsage, "--frontend is empty", "start green --node n1 --frontend="},
		{ExitUsage, "use --frontend or --frontends, not both", "start green --node n1 --frontend n2 --frontends 1"},
		{ExitUsage, "its own frontend", "start green --node n1 --frontend n1"},
		{ExitUsage, "use a duration", "start green --node n1 --wait x"},
		{ExitUsage, "tenant name", "start Green --node n1"},
		{ExitUsage, "wrong number of arguments", "stop"},
		{ExitFailed, `no tenant "red"`, "start red --node n1"},
		{ExitFailed, `no tenant "red"`, "list --tenant red"},
		{ExitFailed, "only tenants on network nimitz", "start blue --node n1 --frontends 1"},
		{ExitFailed, "node n1 cannot have 4 frontends: 2 nodes fit, 4 are needed; nothing was changed: use " +
			"--frontends 2, or", "start green --node n1"},
		{ExitFailed, `there is no node "n9"`, "start green --node n9 --frontends 1"},
		{ExitFailed, `there is no node "n9"`, "stop green --node n9"},
		{ExitFailed, `there is no node "n9"`, "get green --node n9"},
		{ExitFailed, `there is no node "n9"`, "list --node n9"},
		{ExitFailed, "no containers of tenant green", "start green --node n2 --frontends 1"},
		{ExitFailed, `no node "n9"`, "start green --node n1 --frontend n9"},
		{ExitFailed, "are not offloaded", "get green --node n1"},
		{ExitFailed, "are not offloaded", "stop green --node n1"},
	} {
		refused(t, c.code, c.says, append([]string{"offload"}, strings.Fields(c.args)...)...)
	}
	model := offload.Modelled(0)
	gain, estimate := model.Gain(2), model.Text(2)
	counted := strings.ReplaceAll(estimate, "\n", "\n            ")
	prints(t, "nothing was changed; the offload of tenant green on node n1 would have:\n"+
		"frontends   n2, n3\nprefixes    10.0.1.0/24\nestimate    "+counted+
		"\n            not counted: packets between containers of n1, and by the gateway\n",
		append(two, "--dry-run")...)
	if v := ask[offloadView](t, append(two, "--dry-run")...); v.Gain != gain {
		t.Errorf("dry run: gain %v, want %v", v.Gain, gain)
	}
	if v := ask[offloadsView](t, "offload", "list"); len(v.Offloads) != 0 || v.Automatic || len(v.Problems) != 0 {
		t.Errorf("offload list after a dry run: %+v, want none", v)
	}

	start := strings.Fields("offload start green --node n1 --frontend n3 --frontend n2 --force")
	prints(t, "tenant green on node n1 is offloaded: its rules are looked up on the frontends\n"+
		"frontends    n3, n2\ncontainers   10.0.1.2\n", start...)
	refused(t, ExitFailed, "offloaded already", start...)
	prints(t, "TENANT   NODE   PHASE    STARTED       CONTAINERS   FRONTENDS   PROBLEMS\n"+
		"green    n1     active   by operator   1            n3, n2      none\n", "offload", "list")
	v := ask[offloadView](t, "offload", "get", "green", "--node", "n1")
	if v.ID == 0 || v.Phase != "active" || v.Wanted != 2 || v.LastChange == "" || v.Since.IsZero() ||
		len(v.Containers) != 1 || v.Containers[0].App != 1 ||
		!slices.Equal(v.Frontends, []frontendView{{"n3", true, false}, {"n2", true, false}}) {
		t.Errorf("offload get: %+v, want an active offload with one container and two frontends", v)
	}
	r := command(t, "offload", "get", "green", "--node", "n1")
	for _, line := range []string{
		"phase        active\n", "wanted       2 active\n", "Z advance: all nodes send to the frontends\n",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("offload get: %s, want %q", r.stdout, line)
		}
	}
	for node, want := range map[string]string{"n1": "backend of tenant green\n",
		"n2": "frontend of n1 for tenant green\n"} {
		if r := command(t, "node", "get", node); !strings.Contains(r.stdout, "offloads     "+want) {
			t.Errorf("node get %s: %s, want %s", node, r.stdout, want)
		}
	}
	refused(t, ExitFailed, "on n1 are offloaded", "tenant", "delete", "green")
	const required = "--node\tnode of the containers\n"
	for line, says := range map[string]string{
		"offload start": required + "blue\ngreen\n", "offload stop": required + "green\n:",
		"offload get":                required + "green\n:",
		"offload start green --node": "n1\nn2\nn3\n", "offload start green --frontend": "n1\nn2\nn3\n",
		"offload start green --node n1 --frontend n2 --frontend": "n3\n:4",
		"offload start green --wait":                             ":4",
		"offload get green --node":                               "n1\n:4", "offload stop green --node": "n1\n:4",
		"offload get blue --node":         ":4",
		"offload start green --frontends": "1\n2\n4\n8\n", "offload list --tenant": "blue\ngreen\n",
		"offload auto": "on\noff\n",
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout, says) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}
	if v := ask[offloadView](t, "offload", "stop", "green", "--node", "n1", "--wait", "0"); v.Phase != "returning" {
		t.Errorf("offload stop without waiting: %+v, want phase returning", v)
	}
	if r := command(t, "offload", "stop", "green", "--node", "n1"); r.code != ExitDone &&
		!strings.Contains(r.stderr, "are not offloaded") { // it ended before the command
		t.Errorf("offload stop: %+v", r)
	}

	refused(t, ExitUsage, `on or off, not "yes"`, "offload", "auto", "yes")
	prints(t, "offloads start and end by the nodes' loads; nodes report within a minute\n", "offload", "auto", "on")
	if v := ask[offloadsView](t, "offload", "list"); !v.Automatic {
		t.Errorf("offload list after auto on: %+v", v)
	}
	prints(t, "on: offloads start and end by the nodes' loads\n", "offload", "auto")
	prints(t, "offloads start and end by command only\n", "offload", "auto", "off")
	prints(t, "off: offloads start and end by command only\n", "offload", "auto")

	// A frontend that does not load the rules.
	<-joinOffloader(t, s, 4)
	waits := command(t, strings.Fields("offload start green --node n1 --frontend n4 --wait 300ms --force")...)
	const for4 = "n4 (does not have the tenant yet)"
	if waits.code != ExitFailed || !strings.Contains(waits.stderr, "preparing: waiting for "+for4+"\n") ||
		!strings.Contains(waits.stderr, "is in phase preparing after 300ms, and waits for "+for4+
			"\n  packets go to n1 as before; if n4 does not load the rules within 8s, the start is undone") ||
		!strings.Contains(waits.stderr, "warning: a single frontend that fails is not replaced") {
		t.Errorf("offload start: %+v, want the node that it waits for", waits)
	}
	if r := command(t, "offload", "get", "green", "--node", "n1"); !strings.Contains(r.stdout, "waits for    "+for4) {
		t.Errorf("offload get: %s, want the node that it waits for", r.stdout)
	}
	stopped := ask[offloadView](t, "offload", "stop", "green", "--node", "n1")
	if stopped.Phase != phaseEnded || !slices.Equal(stopped.Frontends, []frontendView{{Node: "n4"}}) {
		t.Errorf("offload stop: %+v, want an ended offload without active frontends", stopped)
	}
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", "/nonexistent")
	refused(t, ExitUnreachable, "/nonexistent", "offload", "list")
}

// TestOffloadThatWaits: a command that waits in vain says for which nodes.
func TestOffloadThatWaits(t *testing.T) {
	v := viewOffload(&pilasterv1.OffloadStatus{
		Tenant: "green",
		Offload: &pilasterv1.Offload{
			Node: "n1", Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_PREPARING,
			Frontends: []*pilasterv1.Frontend{{Node: "n2", Draining: true}, {Node: "n3"}},
		},
		Awaited:       []*pilasterv1.AwaitedNode{{Node: "n3", Reason: "has not confirmed"}},
		LostFrontends: []string{"n2"},
	})
	if got, want := v.progress(), "preparing: waiting for n3 (has not confirmed)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := v.problems(), "no answer from n2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := v.frontends(), "n2 (not active, does not answer), n3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// offloadLister answers ListOffloads.
type offloadLister struct {
	pilasterv1connect.OperatorServiceClient
	answer *pilasterv1.ListOffloadsResponse
	err    error
}

func (l offloadLister) ListOffloads(
	context.Context,
	*connect.Request[pilasterv1.ListOffloadsRequest],
) (*connect.Response[pilasterv1.ListOffloadsResponse], error) {
	return connect.NewResponse(l.answer), l.err
}

// TestOffloadInVain: a command that does not reach its phase says why, what happens to packets, and what to do.
func TestOffloadInVain(t *testing.T) {
	is := func(phase pilasterv1.OffloadPhase, more func(*pilasterv1.OffloadStatus)) *pilasterv1.ListOffloadsResponse {
		s := &pilasterv1.OffloadStatus{Tenant: "green", Offload: &pilasterv1.Offload{Node: "n1", Id: 7, Phase: phase}}
		if more != nil {
			more(s)
		}
		return &pilasterv1.ListOffloadsResponse{Offloads: []*pilasterv1.OffloadStatus{s}}
	}
	const (
		dual      = pilasterv1.OffloadPhase_OFFLOAD_PHASE_DUAL
		returning = pilasterv1.OffloadPhase_OFFLOAD_PHASE_RETURNING
		ending    = pilasterv1.OffloadPhase_OFFLOAD_PHASE_ENDING
	)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx    context.Context
		until  awaiting
		answer *pilasterv1.ListOffloadsResponse
		says   string
	}{
		"undone": {t.Context(), awaiting{phase: "active"}, is(ending, func(s *pilasterv1.OffloadStatus) {
			s.LastChange = "stop: undone: n2"
		}), "has been stopped (phase ending): undone: n2"},
		"undone and gone": {t.Context(), awaiting{phase: "active"}, &pilasterv1.ListOffloadsResponse{
			Ended: []*pilasterv1.EndedOffload{{Id: 6, Reason: "other"}, {Id: 7, Reason: "undone: n2"}},
		}, "has been stopped (phase ended): undone: n2"},
		"stopped by a command": {t.Context(), awaiting{phase: "active"}, &pilasterv1.ListOffloadsResponse{},
			"has been stopped (phase ended): by another command"},
		"problem": {t.Context(), awaiting{phase: "active"}, is(dual, func(s *pilasterv1.OffloadStatus) {
			s.Problems = []string{"most frontends are in doubt"}
		}), "is in phase dual after 0s; problem: most frontends are in doubt\n  packets flow"},
		"stop": {t.Context(), awaiting{phase: "ended"}, is(returning, nil),
			"run `pilaster offload stop --now green --node n1`: packets go to n1 at once, and it " +
				"drops those that it cannot judge until it has its rules"},
		"stop now": {t.Context(), awaiting{phase: "ended", now: true}, is(ending, nil),
			"packets go to n1, which drops those that it cannot judge until its agent runs and has loaded the rules"},
		"interrupted": {cancelled, awaiting{phase: "active", wait: time.Hour}, is(dual, nil),
			"interrupted; the offload goes on: `pilaster offload get green --node n1` shows it, `pilaster offload " +
				"stop green --node n1` ends it"},
	} {
		var progress strings.Builder
		c.until.progress = &progress
		v := offloadView{Tenant: "green", Node: "n1", ID: 7}
		_, err := awaitOffload(c.ctx, offloadLister{answer: c.answer}, v, c.until)
		if err == nil || !strings.Contains(err.Error(), c.says) || exitCode(err) != ExitFailed {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
		if name == "problem" && progress.String() != "dual; problem: most frontends are in doubt\n" {
			t.Errorf("progress: got %q, want the problem", progress.String())
		}
	}
	_, err := awaitOffload(cancelled, offloadLister{err: connect.NewError(connect.CodeCanceled, context.Canceled)},
		offloadView{Tenant: "green", Node: "n1", ID: 7}, awaiting{phase: "active"})
	if err == nil || !strings.HasPrefix(err.Error(), "interrupted; ") || exitCode(err) != ExitFailed {
		t.Errorf("interrupted call: got %v", err)
	}
}

// TestSilentFrontends: a trace names frontends without an answer, of offloads on its way only.
func TestSilentFrontends(t *testing.T) {
	l := offloadLister{answer: &pilasterv1.ListOffloadsResponse{Offloads: []*pilasterv1.OffloadStatus{
		{Offload: &pilasterv1.Offload{Node: "n1"}, LostFrontends: []string{"n2", "n3"}},
		{Offload: &pilasterv1.Offload{Node: "n4"}},
		{Offload: &pilasterv1.Offload{Node: "n5"}, LostFrontends: []string{"n2"}},
	}}}
	const want = "\nn1 gets no answers to its probes from n2, n3, which may lose packets"
	if got := silentFrontends(t.Context(), l, "green", "n1", "n4"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestOffloadThatIsALoss: a dry run says that a start needs --force.
func TestOffloadThatIsALoss(t *testing.T) {
	for _, c := range []struct {
		gain float64
		loss bool
	}{{0, false}, {0.9, true}, {1.1, false}} {
		var b strings.Builder
		offloadView{Tenant: "green", Node: "n1", DryRun: true, Gain: c.gain, Estimate: "a model"}.printStarted(&b)
		if got := b.String(); strings.Contains(got, "this is a loss, so a start needs --force\n") != c.loss ||
			!strings.Contains(got, "estimate\ta model\n") {
			t.Errorf("gain %v: %s", c.gain, got)
		}
	}
}
