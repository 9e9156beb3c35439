package orchestrator

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/tenant"
)

// phaseOf formats an offload as "phase frontend, frontend-", where "-" marks a frontend that is not active.
func phaseOf(o *pilasterv1.Offload) string {
	if o == nil {
		return "removed"
	}
	var frontends []string
	for _, f := range o.Frontends {
		mark := ""
		if f.Draining {
			mark = "-"
		}
		frontends = append(frontends, f.Node+mark)
	}
	phase := strings.ToLower(strings.TrimPrefix(o.Phase.String(), "OFFLOAD_PHASE_"))
	return strings.TrimSpace(phase + " " + strings.Join(frontends, ", "))
}

func TestNextPhase(t *testing.T) {
	// Reports: node n1 is the backend, f1 and f2 are frontends, n9 has containers. "8" is the last acknowledged change;
	// "?" is a disconnected node, "!" one that does not enforce the policies.
	const since = 8
	for _, c := range []struct {
		is, reports string
		passed      time.Duration
		want        string
	}{
		{"preparing f1- f2-", "n1=7", time.Hour, ""},
		{"preparing f1- f2-", "n1=8", 0, "preparing f1, f2"},
		{"preparing f1- f2- f3-", "n1=8", 0, "preparing f1, f2, f3-"},
		{"preparing f1- f2-", "n1=8!", 0, "preparing f1, f2"}, // without room for its rules
		{"preparing f1- f2-", "n1=8?", time.Hour, ""},
		{"preparing f1 f2", "n1=8 f1=9 f2=7", time.Hour, ""},
		{"preparing f1 f2", "n1=8 f1=8", time.Hour, ""}, // f2 does not have the tenant
		{"preparing f1 f2", "n1=8 f1=8 f2=8!", time.Hour, ""},
		{"preparing f1 f2", "n1=8 f1=8 f2=8?", time.Hour, ""},
		{"preparing f1 f2-", "n1=8 f1=8 f2=7 n9=7", 0, "dual f1, f2-"},
		{"dual f1 f2", "n1=8 f1=8 f2=8 n9=8", 0, "active f1, f2"},
		{"dual f1 f2", "n1=8 f1=8 f2=8 n9=7?", 0, "active f1, f2"},
		{"dual f1 f2", "n1=8 f1=8 f2=8 n9=7", 199 * time.Millisecond, ""},
		{"dual f1 f2", "n1=8 f1=8 f2=8 n9=7", 200 * time.Millisecond, "active f1, f2"},
		{"dual f1 f2", "n1=8 f1=8 f2=7 n9=8", 1999 * time.Millisecond, ""},
		{"dual f1 f2", "n1=7 f1=8 f2=8 n9=8", 1999 * time.Millisecond, ""},
		{"dual f1 f2", "n1=7 f1=7 f2=7 n9=7", 2 * time.Second, "active f1, f2"},
		{"active f1 f2", "n1=8", time.Hour, ""},
		{"active f1 f2-", "n1=8", 1999 * time.Millisecond, ""},
		{"active f1 f2-", "n1=8", 2 * time.Second, "active f1"},
		{"returning f1 f2", "n1=7 f1=8 f2=8", time.Hour, ""},
		{"returning f1 f2", "n1=8! f1=8 f2=8", time.Hour, ""},
		{"returning f1 f2", "n1=7? f1=8 f2=8", time.Hour, ""},
		{"returning f1 f2", "n1=8 n9=7", 0, "ending f1, f2"},
		{"returning f1 f2", "f1=8 f2=8", 0, "ending f1, f2"}, // its last container is gone
		{"ending f1 f2", "n1=8 f1=8 f2=8 n9=7", 1999 * time.Millisecond, ""},
		{"ending f1 f2", "n1=8 f1=8 f2=8 n9=7", 2 * time.Second, "removed"},
		{"ending f1 f2", "n1=8 f1=8! f2=8 n9=7?", 0, ""},
		{"ending f1 f2", "n1=8 f1=8 f2=8 n9=7?", 0, "removed"},
		{"ending", "n1=8", 0, "removed"},
	} {
		words := strings.Fields(c.is)
		changed := time.Unix(1000, 0)
		o := &pilasterv1.Offload{Node: "n1", Since: since, Changed: timestamppb.New(changed)}
		o.Phase = pilasterv1.OffloadPhase(
			pilasterv1.OffloadPhase_value["OFFLOAD_PHASE_"+strings.ToUpper(words[0])])
		for _, name := range words[1:] {
			name, draining := strings.CutSuffix(name, "-")
			o.Frontends = append(o.Frontends, &pilasterv1.Frontend{Node: name, Draining: draining})
		}
		hosting, away := map[string]*pilasterv1.Hosting{}, map[string]bool{}
		for _, text := range strings.Fields(c.reports) {
			name, state, _ := strings.Cut(text, "=")
			h := &pilasterv1.Hosting{Node: name}
			away[name] = strings.Contains(state, "?")
			if strings.Contains(state, "!") {
				h.Unenforced = "no room"
			}
			fmt.Sscan(state, &h.AppliedChanges)
			hosting[name] = h
		}
		before := phaseOf(o)
		connected := func(node string) bool { return !away[node] }
		next, due := nextPhase(o, hosting, connected, changed.Add(c.passed))
		got := ""
		if due {
			got = phaseOf(next)
		}
		if got != c.want {
			t.Errorf("%s with %s after %v: got %q, want %q", c.is, c.reports, c.passed, got, c.want)
		}
		if is := phaseOf(o); is != before {
			t.Errorf("%s became %s: the record is shared with the cache", before, is)
		}
	}
}

// offloadAgent is a simulated agent: it applies each tenant that it receives, and reports that.
type offloadAgent struct {
	name     string
	backend  bool
	endpoint []byte
	seen     chan string // phases of the offload, as it applied them, with the number of containers
}

// run reads the stream until the test ends. A frontend hosts the tenants of whose offloads it is a frontend.
func (a *offloadAgent) run(ctx context.Context, c *join.Client, hosts map[string]bool) error {
	s := c.Follow(ctx)
	sequence, applied := uint64(10), map[string]uint64{}
	report := func() error {
		sequence++
		req := &pilasterv1.FollowRequest{HostedTenants: slices.Sorted(maps.Keys(hosts)), Sequence: sequence}
		for _, name := range req.HostedTenants {
			h := &pilasterv1.Hosting{Tenant: name, AppliedChanges: applied[name]}
			if a.endpoint != nil {
				h.Accepts, h.Holds = []uint32{1}, []uint32{1}
			}
			if a.backend && applied[name] > 0 {
				h.Offloaded = []*pilasterv1.OffloadedEndpoint{{Addresses: [][]byte{a.endpoint}, App: 1}}
			}
			req.Hosting = append(req.Hosting, h)
		}
		return s.Send(req)
	}
	if err := report(); err != nil {
		return err
	}
	for {
		r, err := s.Receive()
		if err != nil {
			return err
		}
		changed := false
		for _, of := range append(r.GetSnapshot().GetTenants(), r.GetDelta().GetTenants()...) {
			is := "none"
			hosts[of.Name] = a.endpoint != nil
			applied[of.Name] = 0
			for _, o := range of.Offloads {
				is = fmt.Sprintf("%s, containers: %d", phaseOf(o), len(o.Endpoints))
				applied[of.Name] = of.Changes
				hosts[of.Name] = true
			}
			if !hosts[of.Name] {
				delete(hosts, of.Name)
			}
			changed = true
			a.seen <- is
		}
		if changed {
			if err := report(); err != nil {
				return err
			}
		}
	}
}

// next waits until the agent has applied a state, and returns the states before it.
func (a *offloadAgent) next(t *testing.T, want string) (before []string) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case is := <-a.seen:
			if is == want {
				return before
			}
			before = append(before, is)
		case <-timeout:
			t.Fatalf("%s never applied %q, only %q", a.name, want, before)
		}
	}
}

// canOffload joins the cluster as a node that can take part in offloads.
func canOffload(t *testing.T, s *Server, n int, rack string) *join.Client {
	t.Helper()
	c := dial(t, s, testNode(n))
	if _, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", Enforces: []string{"netpila", "nimitz"}, Offloads: true, MtuReserve: tenant.OffloadOverhead,
		Rack: rack,
	})); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestOffload: an offload reaches phase active and ends, with agents that acknowledge. The frontends have the backend's
// containers before they are active, nodes without part in it receive nothing, and the chosen frontends are in its
// rack.
func TestOffload(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	agents := map[int]*offloadAgent{}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	for n, rack := range map[int]string{1: "a", 2: "b", 3: "a", 4: "a", 5: "b"} {
		c := canOffload(t, s, n, rack)
		a := &offloadAgent{name: testNode(n).Name, backend: n == 1, seen: make(chan string, 100)}
		hosts := map[string]bool{}
		if n <= 2 { // with a container
			resolve(t, c, "green", "web")
			address := allocate(t, c, "green", "c1/eth0")
			a.endpoint = []byte{10, 0, 0, address[len("10.0.0.")] - '0'}
			hosts["green"] = true
		}
		agents[n] = a
		go a.run(ctx, c, hosts)
	}
	apply(t, s, "green", netpol("a", "  ingress: [{}]\n"))
	wait, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	if err := s.cache.Await(wait, func() bool { return len(s.cache.Subscribers) == 5 }); err != nil {
		t.Fatal(err)
	}
	start := &pilasterv1.StartOffloadRequest{Tenant: "green", Node: "n1", Count: 2, DryRun: true, Force: true}
	tried, err := op.StartOffload(t.Context(), connect.NewRequest(start))
	if err != nil || len(tried.Msg.Prefixes) != 1 || phaseOf(tried.Msg.Offload.Offload) != "preparing n3-, n4-" {
		t.Fatalf("dry run: got %v, %v; want frontends n3 and n4 of the same rack, and one container", tried, err)
	}
	start.DryRun = false
	if _, err := op.StartOffload(t.Context(), connect.NewRequest(start)); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{3, 4} {
		before := agents[n].next(t, "active n3, n4, containers: 1")
		for _, is := range before {
			if strings.HasPrefix(is, "dual") && !strings.HasSuffix(is, "containers: 1") {
				t.Errorf("n%d: got %q, want the container before phase dual", n, before)
			}
		}
		if !slices.Contains(before, "preparing n3, n4, containers: 1") {
			t.Errorf("n%d: got %q, want the container in phase preparing", n, before)
		}
	}
	if before := agents[2].next(t, "active n3, n4, containers: 1"); !slices.Contains(
		before, "dual n3, n4, containers: 1") {
		t.Errorf("n2, which sends: got %q, want phase dual", before)
	}
	agents[1].next(t, "active n3, n4, containers: 1")
	if err := s.cache.Await(wait, func() bool { return len(s.cache.Offloading) == 0 }); err != nil {
		t.Errorf("an active offload keeps the loop running: %v", err)
	}
	list := func() []*pilasterv1.OffloadStatus {
		t.Helper()
		resp, err := op.ListOffloads(t.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{Node: "n1"}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg.Offloads
	}
	if all := list(); len(all) != 1 || all[0].Tenant != "green" || len(all[0].Awaited) != 0 ||
		len(all[0].Offload.Endpoints) != 1 {
		t.Errorf("ListOffloads returned %v, want an active offload with one container", all)
	}
	stopped, err := op.StopOffload(
		t.Context(), connect.NewRequest(&pilasterv1.StopOffloadRequest{Tenant: "green", Node: "n1"}))
	if err != nil || phaseOf(stopped.Msg.Offload.Offload) != "returning n3, n4" {
		t.Errorf("StopOffload returned %v, %v; want phase returning", stopped, err)
	}
	if before := agents[1].next(t, "none"); !slices.Contains(before, "ending n3, n4, containers: 1") {
		t.Errorf("n1: got %q, want phase ending", before)
	}
	agents[2].next(t, "none")
	if all := list(); len(all) != 0 {
		t.Errorf("ListOffloads returned %v, want none", all)
	}
	if err := s.cache.Await(wait, func() bool { return len(s.cache.Hosting["green"]) == 2 }); err != nil {
		t.Errorf("the frontends still host the tenant: %v", err)
	}
	select {
	case is := <-agents[5].seen:
		t.Errorf("n5, which has no part in it, received %q", is)
	default:
	}
}
