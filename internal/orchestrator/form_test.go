package orchestrator

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/tenant"
)

// TestForms: a node whose packets on the fabric have another form than those of a connected one is refused.
func TestForms(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	register := func(n int, form string) error {
		_, err := dial(t, s, testNode(n)).Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
			Version: "test", Form: form,
		}))
		return err
	}
	c := dial(t, s, testNode(1))
	if _, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", Form: "--a on",
	})); err != nil {
		t.Fatal(err)
	}
	if err := register(2, "--a off"); err != nil {
		t.Errorf("no node is connected with another form: %v", err)
	}
	connected := follow(t, c, hosting())
	connected.next(t)
	wantCode(t, register(2, "--a off"), connect.CodeFailedPrecondition)
	for _, form := range []string{"", "--a on"} {
		if err := register(2, form); err != nil {
			t.Errorf("form %q: %v", form, err)
		}
	}
}

// TestReservedUplinks: the plan says that a prefix is reserved once a tenant has identifiers. Then no node may have an
// uplink's address in it.
func TestReservedUplinks(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	c := dial(t, s, testNode(1))
	register := func(uplink string) (*pilasterv1.Plan, error) {
		resp, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
			Version: "test", UplinkAddresses: []string{uplink},
		}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.Plan, nil
	}
	if p, err := register("2001:db8::1"); err != nil || p.Identifiers {
		t.Errorf("plan %v, %v; want no reservation", p, err)
	}
	_, err := operator(s.config.RunDir).CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{
		Name: "silver", Network: tenant.Networks(tenant.Identifiers)[0],
	}))
	if err != nil {
		t.Fatal(err)
	}
	if p, err := register("2001:db8::1"); err != nil || !p.Identifiers {
		t.Errorf("plan %v, %v; want a reservation", p, err)
	}
	_, err = register("fd70:696c:e1ff::1")
	wantCode(t, err, connect.CodeFailedPrecondition)
}

// TestReservationIsAnnounced: when the first tenant has identifiers, every node with a stream gets a message that says
// so, also one that hosts nothing; later streams begin with it.
func TestReservationIsAnnounced(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	n1 := registered(t, s, testNode(1))
	f := follow(t, n1, hosting())
	if first := f.next(t); first.Identifiers {
		t.Errorf("without such a tenant: %v", first)
	}
	_, err := operator(s.config.RunDir).CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{
		Name: "silver", Network: tenant.Networks(tenant.Identifiers)[0],
	}))
	if err != nil {
		t.Fatal(err)
	}
	if m := f.next(t); !m.Identifiers || m.Revision == 0 {
		t.Errorf("with the first tenant: %v", m)
	}
	if first := follow(t, registered(t, s, testNode(2)), hosting()).next(t); !first.Identifiers {
		t.Errorf("a later stream begins with %v", first)
	}
}

// TestOffloadersRegister: the cluster has what nodes say about offloads, also after a change.
func TestOffloadersRegister(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	c := dial(t, s, testNode(1))
	for _, rack := range []string{"a", "", "b"} {
		resp, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
			Version: "test", Offloads: rack != "", MtuReserve: uint32(len(rack)), Rack: rack,
		}))
		if err != nil {
			t.Fatal(err)
		}
		if n := resp.Msg.Node; n.Offloads != (rack != "") || n.MtuReserve != uint32(len(rack)) || n.Rack != rack {
			t.Errorf("rack %q: the node is registered as %v", rack, n)
		}
	}
	_, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Rack: strings.Repeat("x", rpc.MaxRack+1),
	}))
	wantCode(t, err, connect.CodeInvalidArgument)
}
