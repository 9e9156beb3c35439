package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/unixrpc"
)

func TestRegisterTriesUntilTheOrchestratorAnswers(t *testing.T) {
	b := newLinkBed(t)
	away := connect.NewError(connect.CodeUnavailable, errors.New("no leader"))
	b.cluster.refusals = []error{away, away}
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(b.waits) != 2 {
		t.Errorf("%d pauses, want 2", len(b.waits))
	}
	m, ok := b.node.Membership()
	if !ok || m.Prefix != agenttest.NodePrefix || m.ClusterUUID != "cluster" {
		t.Errorf("membership %+v, %v", m, ok)
	}
	first := b.cluster.registered[0]
	if first.WantedPrefix != agenttest.NodePrefix.String() || first.ClusterUuid != "" || first.Version != "v1" ||
		!slices.Equal(first.UplinkAddresses, []string{"2001:db8::2"}) {
		t.Errorf("asked with %v", first)
	}
}

func TestRegisterGivesUpWhereTryingDoesNotHelp(t *testing.T) {
	b := newLinkBed(t)
	b.cluster.refusals = []error{
		connect.NewError(connect.CodeAlreadyExists, errors.New("node n1 has another UUID; node delete n1")),
	}
	err := b.link.Register(t.Context())
	if err == nil || !strings.Contains(err.Error(), "another UUID") || len(b.waits) != 0 {
		t.Fatalf("%v after %d pauses", err, len(b.waits))
	}
}

// A node with more held addresses than fit into a page registers all of them.
func TestRegisterInPages(t *testing.T) {
	b := newLinkBed(t)
	var has []endpoint.Record
	for i := range 2*heldPage + 3 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		has = append(
			has,
			endpoint.Record{
				ContainerID: fmt.Sprint("c", i),
				Interface:   "eth0",
				Tenant:      "green",
				Attachments: []endpoint.Attachment{{Address: a}},
			},
		)
	}
	b.link.config.Endpoints = func() []endpoint.Record { return has }
	b.link.config.Edge = true
	b.link.config.Gateway = func() bool { return true }
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, req := range b.cluster.registered {
		for _, m := range req.Held.Mappings {
			said[m.To+" "+m.Key] = true
		}
		if len(req.Held.Mappings) > heldPage || req.Version != "v1" || !req.Edge || !req.Gateway ||
			len(req.UplinkAddresses) != 1 {
			t.Errorf(
				"a page with %d of version %q, uplinks %v",
				len(req.Held.Mappings),
				req.Version,
				req.UplinkAddresses,
			)
		}
	}
	if len(said) != len(has) || !said["10.0.16.2/32 c4098/eth0"] || len(b.cluster.registered) != 3 {
		t.Errorf("%d of %d said in %d requests", len(said), len(has), len(b.cluster.registered))
	}
}

// If a page is refused, the error says what was registered before it.
func TestRegisterRefusedAfterAPage(t *testing.T) {
	b := newLinkBed(t)
	var has []endpoint.Record
	for i := range heldPage + 3 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		has = append(
			has,
			endpoint.Record{
				ContainerID: fmt.Sprint("c", i),
				Interface:   "eth0",
				Tenant:      "green",
				Attachments: []endpoint.Attachment{{Address: a}},
			},
		)
	}
	b.link.config.Endpoints = func() []endpoint.Record { return has }
	b.cluster.during = func(*pilasterv1.RegisterRequest) {
		if len(b.cluster.registered) == 2 {
			b.cluster.refusals = []error{connect.NewError(connect.CodeFailedPrecondition, agenttest.ErrFake)}
		}
	}
	if err := b.link.Register(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "accepted 2048 of its addresses and subnets, but not the next 3: ") {
		t.Errorf("refused with %v", err)
	}
}

// Addresses that endpoints release during a registration are not registered afterwards; those registered before are
// released again.
func TestRegisterSaysWhatIsThen(t *testing.T) {
	b := newLinkBed(t)
	var has []endpoint.Record
	for i := range heldPage + 3 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		has = append(
			has,
			endpoint.Record{
				ContainerID: fmt.Sprint("c", i),
				Interface:   "eth0",
				Tenant:      "green",
				Attachments: []endpoint.Attachment{{Address: a}},
			},
		)
	}
	has[1].State = endpoint.Deleting
	b.link.config.Endpoints = func() []endpoint.Record { return slices.Clone(has) }
	b.cluster.during = func(*pilasterv1.RegisterRequest) {
		has[3].State = endpoint.Deleting
		has = has[:heldPage+2]
	}
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, req := range b.cluster.registered {
		for _, m := range req.Held.Mappings {
			said[m.Key] = true
		}
	}
	if len(said) != heldPage+1 || said["c1/eth0"] || said[fmt.Sprintf("c%d/eth0", heldPage+2)] || !said["c3/eth0"] {
		t.Errorf(
			"said %d: c1 %v, c3 %v, the last %v",
			len(said),
			said["c1/eth0"],
			said["c3/eth0"],
			said[fmt.Sprintf("c%d/eth0", heldPage+2)],
		)
	}
	if late := b.link.pendingNow(t.Context()); !slices.Equal(late, []allocation{{"green", "c3/eth0"}}) {
		t.Errorf("%v is released", late)
	}
}

// The first registration fixes prefix and cluster: later answers cannot change them.
func TestMembershipIsPinned(t *testing.T) {
	b := newLinkBed(t)
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, _ := b.node.Membership()
	for name, change := range map[string]func(r *pilasterv1.RegisterResponse){
		"prefix":  func(r *pilasterv1.RegisterResponse) { r.Node.Prefix = "fd70:696c:6100:2::/64" },
		"cluster": func(r *pilasterv1.RegisterResponse) { r.ClusterUuid = "another" },
		"plan":    func(r *pilasterv1.RegisterResponse) { r.Plan.PrivatePrefix = "fc80::/9" },
		"nothing": func(r *pilasterv1.RegisterResponse) { r.Node = nil },
	} {
		answer := &pilasterv1.RegisterResponse{
			ClusterUuid: "cluster",
			Node:        &pilasterv1.Node{Prefix: agenttest.NodePrefix.String()},
			Plan:        &pilasterv1.Plan{BasePrefix: "fd70:696c:6100::/40", PrivatePrefix: "fc00::/8"},
		}
		change(answer)
		b.cluster.answer = answer
		if err := b.link.Register(t.Context()); err == nil {
			t.Errorf("another %s was taken", name)
		}
		if after, _ := b.node.Membership(); after != before {
			t.Errorf("%s: membership became %+v", name, after)
		}
	}
	// A node accepts values once that its registration did not have.
	b.cluster.answer = &pilasterv1.RegisterResponse{
		ClusterUuid: "cluster",
		Node:        &pilasterv1.Node{Prefix: agenttest.NodePrefix.String()},
		Plan: &pilasterv1.Plan{
			BasePrefix:      "fd70:696c:6100::/40",
			PrivatePrefix:   "fc00::/8",
			GatewayPrefixes: []string{"100.64.0.0/10", "fd70:696c:6700::/48"},
		},
	}
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, _ = b.node.Membership()
	if before.Plan != address.DefaultPlan() {
		t.Errorf("plan %v", before.Plan)
	}
	b.cluster.answer.Plan.GatewayPrefixes[0] = "10.0.0.0/8"
	if err := b.link.Register(t.Context()); err == nil {
		t.Error("another gateway prefix was taken")
	}
	b.cluster.answer.Plan.GatewayPrefixes = nil // an older orchestrator
	if err := b.link.Register(t.Context()); err != nil {
		t.Error(err)
	}
	again, err := state.OpenNode(b.node.Dir(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	if kept, ok := again.Membership(); !ok || kept != before || again.UUID() != b.node.UUID() {
		t.Errorf("on disk: %+v, %v, UUID %s", kept, ok, again.UUID())
	}
	if last := b.cluster.registered[len(b.cluster.registered)-1]; last.ClusterUuid != "cluster" ||
		last.WantedPrefix != agenttest.NodePrefix.String() {
		t.Errorf("a known node asked with %v", last)
	}
}

func TestFollowAppliesWhatItHears(t *testing.T) {
	b := newLinkBed(t)
	core := agenttest.New(t)
	core.MustAdd("c1") // hosts blue
	defer b.run(core)()

	if req := <-b.cluster.hosted; !slices.Equal(req.HostedTenants, []string{"blue"}) || req.ResumeRevision != 0 {
		t.Fatalf("first message %v", req)
	}
	// The signal of the ADD above may come as a second, equal report.
	report := func() []string {
		for req := range b.cluster.hosted {
			if len(req.HostedTenants) != 1 {
				return req.HostedTenants
			}
		}
		return nil
	}
	blue := &pilasterv1.Tenant{
		Name: "blue",
		Ids:  []*pilasterv1.TenantId{{Id: 1, Key: agenttest.BlueKey[:]}, {Id: 8, Key: make([]byte, 16)}},
	}
	reported := make(chan []string)
	go func() { reported <- report() }()
	// An empty snapshot deletes nothing; a delta brings a new id and an app.
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4,
		Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{}}}
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 5,
		Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
			Tenants: []*pilasterv1.Tenant{blue, {Name: "green", Ids: blue.Ids}},
			Apps:    []*pilasterv1.App{{Tenant: "blue", Id: 40, Labels: map[string]string{"app": "db"}}},
		}}}
	core.Orchestrator.Err = agenttest.ErrFake
	q := core.Request("c2")
	q.Labels = map[string]string{"app": "db"}
	for len(core.Driver.IDs("blue")) != 2 {
		b.cluster.events <- &pilasterv1.FollowResponse{Revision: 6, Event: &pilasterv1.FollowResponse_Heartbeat{}}
	}
	r, err := core.Add(t.Context(), q)
	if err != nil || r.App != 40 || r.TenantID != 8 {
		t.Fatalf("with the state from the stream: app %d, tenant id %d, %v", r.App, r.TenantID, err)
	}
	if _, _, known := core.Tenants.Get("green"); known {
		t.Error("a tenant that does not live here was learnt")
	}
	if s := b.link.Status(); !s.Connected || s.Revision < 5 {
		t.Errorf("link %+v", s)
	}
	for _, c := range []string{"c1", "c2"} {
		if err := core.Delete(t.Context(), c, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	if hosted := <-reported; len(hosted) != 0 {
		t.Errorf("hosted after the last endpoint: %v", hosted)
	}
	// The stream breaks, and the next one resumes at the same revision.
	go func() { b.cluster.events <- nil }()
	for req := range b.cluster.hosted {
		if req.ResumeRevision == 0 {
			continue // of the stream before
		}
		if req.ResumeRevision < 5 || len(req.HostedTenants) != 0 {
			t.Errorf("resumed with %v", req)
		}
		break
	}
	if n := <-b.waits; n != 0 {
		t.Errorf("pause number %d after a stream that worked", n)
	}
}

// The node requests incomplete tenants, also a tenant that was removed and added again: the orchestrator may not have
// noticed this.
func TestReportsSayWhatIsIncomplete(t *testing.T) {
	b := newLinkBed(t)
	core := agenttest.New(t)
	core.MustAdd("c1") // hosts blue
	defer b.run(core)()
	report := func(hosted, incomplete string, resumed bool) {
		t.Helper()
		for req := range b.cluster.hosted {
			if strings.Join(req.HostedTenants, " ") != hosted || resumed != (req.ResumeRevision != 0) {
				continue // signals of one change may come as several reports
			}
			if strings.Join(req.IncompleteTenants, " ") != incomplete {
				t.Errorf("reported %v, want %q as incomplete", req, incomplete)
			}
			return
		}
	}
	report("blue", "blue", false)
	blue := &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1, Key: agenttest.BlueKey[:]}}}
	tell := func(r *pilasterv1.FollowResponse) {
		for {
			select {
			case b.cluster.events <- r:
				return
			case <-b.cluster.hosted:
			}
		}
	}
	tell(&pilasterv1.FollowResponse{Revision: 5, Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
		Tenants: []*pilasterv1.Tenant{blue}, WholeTenants: []string{"blue"}}}})
	for b.link.Status().Revision == 0 {
		tell(&pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}})
	}
	q := core.Request("c2")
	q.Tenant = "red"
	if _, err := core.Add(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	report("blue red", "red", false)
	if err := core.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	core.MustAdd("c1")
	tell(nil)
	report("blue red", "blue red", true)
}

func TestResolveSaysWhatIsMissing(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		kind error
	}{
		"away":      {connect.NewError(connect.CodeUnavailable, errors.New("x")), refusal.ErrUnavailable},
		"not known": {connect.NewError(connect.CodeNotFound, errors.New("x")), refusal.ErrNotFound},
		"full":      {connect.NewError(connect.CodeResourceExhausted, errors.New("x")), refusal.ErrExhausted},
		"bad":       {connect.NewError(connect.CodeInvalidArgument, errors.New("x")), refusal.ErrInvalid},
		"early": {
			connect.NewError(connect.CodeFailedPrecondition, errors.New("register first")), refusal.ErrUnavailable,
		},
	} {
		b := newLinkBed(t)
		b.cluster.resolve = func(*pilasterv1.ResolveRequest) (*pilasterv1.ResolveResponse, error) { return nil, c.err }
		_, err := b.link.Resolve(t.Context(), "blue", map[string]string{"app": "web"}, false)
		if !errors.Is(err, c.kind) {
			t.Errorf("%s: %v", name, err)
		}
		if c.kind == refusal.ErrUnavailable && !strings.Contains(err.Error(), "does not know tenant blue") {
			t.Errorf("%s: %q does not name what is missing", name, err)
		}
		if name == "early" &&
			(!strings.Contains(err.Error(), "register first") || strings.Contains(err.Error(), "not answer")) {
			t.Errorf("%q: it did answer", err)
		}
	}
	b := newLinkBed(t)
	if _, err := b.tenants.Merge(agent.TenantState{Tenant: agenttest.NewOrchestrator().Tenants["blue"]}); err != nil {
		t.Fatal(err)
	}
	b.server.Close()
	_, err := b.link.Resolve(t.Context(), "blue", map[string]string{"app": "web"}, false)
	if !errors.Is(err, refusal.ErrUnavailable) || !strings.Contains(err.Error(), `labels "app=web" in tenant blue`) {
		t.Errorf("known tenant, unknown labels: %v", err)
	}
}

func TestUnusableAnswersAreRefused(t *testing.T) {
	key := make([]byte, 16)
	app := &pilasterv1.App{Id: 1}
	for name, r := range map[string]*pilasterv1.ResolveResponse{
		"empty": {},
		"no id": {Tenant: &pilasterv1.Tenant{Name: "blue"}, App: app},
		"short key": {Tenant: &pilasterv1.Tenant{Name: "blue",
			Ids: []*pilasterv1.TenantId{{Id: 1, Key: key[:8]}}}, App: app},
		"tenant id 0": {Tenant: &pilasterv1.Tenant{Name: "blue",
			Ids: []*pilasterv1.TenantId{{Id: 0, Key: key}}}, App: app},
		"addressing of a later build": {Tenant: &pilasterv1.Tenant{Name: "blue", Addressing: 7,
			Ids: []*pilasterv1.TenantId{{Id: 1, Key: key}}}, App: app},
		"reserved app": {Tenant: &pilasterv1.Tenant{Name: "blue",
			Ids: []*pilasterv1.TenantId{{Id: 1, Key: key}}}, App: &pilasterv1.App{Id: 0xff00}},
	} {
		b := newLinkBed(t)
		b.cluster.resolve = func(*pilasterv1.ResolveRequest) (*pilasterv1.ResolveResponse, error) { return r, nil }
		if _, err := b.link.Resolve(t.Context(), "blue", nil, false); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

// A refusal blocks new endpoints. If its cause may be the stream of this machine's previous process, it does so only
// when it lasts.
func TestRefusals(t *testing.T) {
	deleted := connect.NewError(connect.CodeFailedPrecondition, errors.New("was deleted"))
	taken := connect.NewError(connect.CodeAlreadyExists, errors.New("is connected already"))
	away := connect.NewError(connect.CodeUnavailable, errors.New("away"))
	for _, c := range []struct {
		err     error
		n       int
		refused bool
	}{{deleted, 0, true}, {taken, 0, false}, {taken, 4, false}, {taken, 5, true}, {away, 9, false}, {
		agenttest.ErrFake, 9,
		false}} {
		b := newLinkBed(t)
		b.link.markDisconnected(fmt.Errorf("registering: %w", c.err), c.n)
		if why := b.link.Problem(); (why != nil) != c.refused ||
			why != nil && !strings.Contains(why.Error(), unixrpc.Words(c.err)) {
			t.Errorf("%v after %d failures: %v", c.err, c.n, why)
		}
	}
}

// TestTried: the wait for the first contact ends when the first event is applied, or when the orchestrator cannot be
// reached.
func TestTried(t *testing.T) {
	tried := func(b *linkBed) bool {
		select {
		case <-b.link.Tried():
			return true
		default:
			return false
		}
	}
	core := agenttest.New(t)
	core.MustAdd("c1")
	heard := newLinkBed(t)
	heard.link.config.FirstContact = time.Hour
	stop := heard.run(core)
	defer stop()
	<-heard.cluster.hosted
	go func() {
		for range heard.cluster.hosted { // the test ignores reports
		}
	}()
	if tried(heard) {
		t.Error("before the first event")
	}
	deny := &pilasterv1.Policy{
		Tenant:    "blue",
		Kind:      "NetworkPolicy",
		Namespace: "default",
		Name:      "deny",
		Document:  agenttest.DenyAll,
	}
	heard.cluster.events <- &pilasterv1.FollowResponse{Revision: 4,
		Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{Policies: []*pilasterv1.Policy{deny},
			WholePolicies: []string{"blue"}}}}
	<-heard.link.Tried()
	if core.Driver.Policies["blue"].Tables.Subjects == nil {
		t.Error("the received policies are not in force")
	}
	away := newLinkBed(t)
	const wait = 300 * time.Millisecond
	away.link.config.FirstContact = wait
	began := time.Now()
	away.cluster.during = func(*pilasterv1.RegisterRequest) {
		away.cluster.refusals = []error{connect.NewError(connect.CodeUnavailable, errors.New("no leader"))}
	}
	away.link.config.Wait = func(ctx context.Context, n int, _ time.Duration) error {
		if n == 0 && tried(away) && time.Since(began) < wait {
			t.Error("after one failed try")
		}
		time.Sleep(10 * time.Millisecond)
		return ctx.Err()
	}
	stop = away.run(agenttest.New(t))
	defer stop()
	<-away.link.Tried()
	if took := time.Since(began); took < wait {
		t.Errorf("after %v of failed tries, want %v", took, wait)
	}
}
