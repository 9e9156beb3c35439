package orchestrator

import (
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/tenant"
)

func TestFollow(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	blue := createTenant(t, s, "blue")
	createTenant(t, s, "red")
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "blue", "web")
	resolve(t, n2, "red", "secret")

	f1 := follow(t, n1, hosting("blue"))
	r := f1.next(t)
	snap := r.GetSnapshot()
	if snap.GetNode().GetName() != "n1" || len(snap.Tenants) != 1 || snap.Tenants[0].Name != "blue" ||
		len(snap.Tenants[0].Ids[0].Key) != 16 ||
		len(snap.Apps) != 1 ||
		snap.Apps[0].Labels["app"] != "web" {
		t.Fatalf("n1 received %v, want a snapshot with tenant blue, its key and app web", r)
	}

	// n1 does not receive changes of tenants that it does not host; its next message is about blue.
	f2 := follow(t, n2, hosting("red"))
	f2.next(t)
	createTenant(t, s, "green")
	resolve(t, n2, "red", "more")
	registered(t, s, testNode(3))
	db := resolve(t, n2, "blue", "db")
	r = f1.next(t)
	if d := r.GetDelta(); d == nil || d.Node != nil || len(d.Tenants) != 0 || len(d.Apps) != 1 ||
		d.Apps[0].Id != db.Id ||
		d.Apps[0].Tenant != "blue" {
		t.Fatalf("n1 received %v, want app db only", r)
	}
	resumeAt := r.Revision
	if d := f2.next(t).GetDelta(); len(d.GetApps()) != 1 || d.Apps[0].Labels["app"] != "more" {
		t.Fatalf("n2 received %v, want app more", d)
	}

	// A node receives changes of its own record.
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", UplinkAddresses: []string{"2001:db8::2"},
	})); err != nil {
		t.Fatal(err)
	}
	if d := f1.next(t).GetDelta(); d.GetNode().GetUplinkAddresses()[0] != "2001:db8::2" {
		t.Fatalf("n1 received %v, want uplink address 2001:db8::2", d)
	}

	// A node receives all apps of a tenant that it starts to host.
	f1.send(t, hosting("blue", "red"))
	if d := f1.next(t).GetDelta(); len(d.GetTenants()) != 1 || d.Tenants[0].Name != "red" || len(d.Apps) != 2 {
		t.Fatalf("n1 received %v, want tenant red with two apps", d)
	}
	awaitHosting := func(tenant string, want int) {
		t.Helper()
		if err := s.cache.Await(t.Context(), func() bool { return len(s.cache.Hosting[tenant]) == want }); err != nil {
			t.Fatalf("waiting for %d nodes that host %s: %v", want, tenant, err)
		}
	}
	awaitHosting("red", 2)
	_, err := op.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "red"}))
	wantCode(t, err, connect.CodeFailedPrecondition)

	// A resumed stream has the changes after its revision, and tenants that the node reports as incomplete in full.
	again := follow(
		t,
		n1,
		&pilasterv1.FollowRequest{
			HostedTenants:     []string{"blue", "red"},
			IncompleteTenants: []string{"red"},
			ResumeRevision:    resumeAt,
		},
	)
	f1.ended(t, connect.CodeAborted)
	r = again.next(t)
	if d := r.GetDelta(); d.GetNode() == nil || len(d.GetTenants()) != 1 || d.Tenants[0].Name != "red" ||
		len(d.Apps) != 2 {
		t.Fatalf("n1 received %v on the resumed stream, want its node, and tenant red with two apps", r)
	}

	// A tenant may be deleted when no node hosts it. Nodes that do not host it receive nothing.
	again.send(t, hosting("blue"))
	awaitHosting("red", 1)
	f2.send(t, hosting())
	awaitHosting("red", 0)
	_, err = op.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "red"}))
	if err != nil {
		t.Fatal(err)
	}
	resolve(t, n2, "blue", "last")
	if d := again.next(t).GetDelta(); len(d.GetApps()) != 1 || d.Apps[0].Labels["app"] != "last" ||
		len(d.DeletedTenants) != 0 {
		t.Fatalf("n1 received %v, want app last only", d)
	}

	// A node may be deleted only while it is disconnected. That revokes its certificate.
	_, err = op.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	got, err := op.GetNode(t.Context(), connect.NewRequest(&pilasterv1.GetNodeRequest{Name: "n1"}))
	if err != nil || !got.Msg.Node.Connected || len(got.Msg.Tenants) != 1 {
		t.Errorf("GetNode returned %v, %v; want a connected node with one tenant", got, err)
	}
	// The session ends, as if the orchestrator could not reach the store until its sessions expired.
	if err := s.store.Disconnect(t.Context(), "n1", s.cache.Subscribers["n1"].Session); err != nil {
		t.Fatal(err)
	}
	again.ended(t, connect.CodeAborted)
	if err := s.store.DeleteNode(t.Context(), "n1", false); err != nil {
		t.Fatal(err)
	}
	_, err = n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	_, err = n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantCode(t, n1.RenewCertificate(t.Context()), connect.CodeFailedPrecondition)
	if blue.Ids[0].Key != nil {
		t.Error("CreateTenant returned the key, want none")
	}
}

func TestHeartbeatHasRevision(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	f := follow(t, n1, hosting())
	first := f.next(t)
	createTenant(t, s, "blue") // a new revision without a change for n1
	r, err := f.Receive()
	if err != nil || r.GetHeartbeat() == nil || r.Revision <= first.Revision {
		t.Errorf("got %v, %v; want a heartbeat after revision %d", r, err, first.Revision)
	}
}

func TestStopEndsStreams(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	f := follow(t, registered(t, s, testNode(1)), hosting())
	f.next(t)
	closed := make(chan struct{})
	go func() { s.Close(); close(closed) }()
	f.ended(t, connect.CodeUnavailable)
	<-closed
}

func TestRegisterRefuses(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := dial(t, s, testNode(1))
	var many []*pilasterv1.TenantId
	for id := range uint32(tenant.MaxIDs + 1) {
		many = append(many, &pilasterv1.TenantId{Id: id + 1})
	}
	const invalid = connect.CodeInvalidArgument
	for name, c := range map[string]struct {
		req  *pilasterv1.RegisterRequest
		want connect.Code
	}{
		"another cluster": {&pilasterv1.RegisterRequest{ClusterUuid: "x"}, connect.CodeFailedPrecondition},
		"invalid prefix":  {&pilasterv1.RegisterRequest{WantedPrefix: "x"}, invalid},
		"foreign prefix":  {&pilasterv1.RegisterRequest{WantedPrefix: "2001:db8::/64"}, invalid},
		"long version": {&pilasterv1.RegisterRequest{
			Version: strings.Repeat("x", rpc.MaxVersion+1)}, invalid},
		"many addresses": {&pilasterv1.RegisterRequest{
			UplinkAddresses: slices.Repeat([]string{"2001:db8::2"}, rpc.MaxUplinks+1)}, invalid},
		"invalid address": {&pilasterv1.RegisterRequest{UplinkAddresses: []string{"x"}}, invalid},
		"many tenants": {&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{
			Tenants: slices.Repeat([]*pilasterv1.Tenant{{Name: "blue"}}, rpc.MaxTenants+1)}}, invalid},
		"many apps": {&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{
			Apps: slices.Repeat([]*pilasterv1.App{{Tenant: "blue", Id: 1}}, rpc.MaxApps+1)}}, invalid},
		"many ids": {&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{
			Tenants: []*pilasterv1.Tenant{{Name: "blue", Ids: many}}}}, invalid},
		"tenant id 0": {&pilasterv1.RegisterRequest{Held: &pilasterv1.Held{
			Tenants: []*pilasterv1.Tenant{{Name: "blue", Ids: []*pilasterv1.TenantId{{}}}}}}, invalid},
	} {
		_, err := n1.Register(t.Context(), connect.NewRequest(c.req))
		t.Run(name, func(t *testing.T) { wantCode(t, err, c.want) })
	}
	f := n1.Follow(t.Context())
	f.Send(&pilasterv1.FollowRequest{})
	_, err := f.Receive()
	wantCode(t, err, connect.CodeFailedPrecondition) // not registered
	resp, err := n1.Register(
		t.Context(),
		connect.NewRequest(&pilasterv1.RegisterRequest{ClusterUuid: s.store.Cluster().UUID}),
	)
	if err != nil || resp.Msg.Plan.BasePrefix != "fd70:696c:6100::/40" ||
		resp.Msg.ClusterUuid != s.store.Cluster().UUID {
		t.Errorf("Register returned %v, %v; want the plan and the UUID of the cluster", resp, err)
	}
}

func TestFollowRefuses(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	createTenant(t, s, "blue")
	for name, first := range map[string]*pilasterv1.FollowRequest{
		"long name": hosting(strings.Repeat("x", 60<<10)),
		"many accepted ids": {HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{
			{Tenant: "blue", Accepts: make([]uint32, tenant.MaxIDs+1)}}},
		"many held ids": {HostedTenants: []string{"blue"}, Hosting: []*pilasterv1.Hosting{
			{Tenant: "blue", Holds: make([]uint32, tenant.MaxIDs+1)}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := n1.Follow(t.Context())
			f.Send(first)
			_, err := f.Receive()
			wantCode(t, err, connect.CodeInvalidArgument)
			if err != nil && len(err.Error()) > 1000 {
				t.Errorf("the error has %d bytes, want at most 1000", len(err.Error()))
			}
		})
	}
}
