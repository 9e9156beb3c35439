package orchestrator

import (
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// TestPublishedTenant: the node whose gateway publishes a container receives the tenant and may list its mappings,
// though it hosts none of its containers, until the publication is deleted.
func TestPublishedTenant(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "fd12:3456::/48", NodeBits: 80})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n2, "green", "web")
	allocate(t, n2, "green", "")
	gateway := connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Gateway: true})
	if _, err := n1.Register(t.Context(), gateway); err != nil {
		t.Fatal(err)
	}
	f := follow(t, n1, hosting())
	if r := f.next(t).GetSnapshot(); r == nil || len(r.Tenants) != 0 || len(r.Node.Carries) != 0 {
		t.Fatalf("before the publication: n1 received %v, want no tenants", r)
	}
	_, err := list(t, n1, "green")
	wantCode(t, err, connect.CodePermissionDenied)

	if _, err := op.CreateUnderlayService(t.Context(), connect.NewRequest(&pilasterv1.CreateUnderlayServiceRequest{
		Service: &pilasterv1.UnderlayService{Tenant: "green", Name: "storage", Virtual: "fd09::7", Real: "2001:db8::9"},
	})); err != nil {
		t.Fatal(err)
	}
	created, err := op.CreatePublication(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.CreatePublicationRequest{
				Publication: &pilasterv1.Publication{
					Tenant:    "green",
					Name:      "web",
					Container: "fd12:3456::5",
					Node:      "n1",
				},
			},
		),
	)
	if err != nil || created.Msg.Publication.Tenant != "green" {
		t.Fatalf("CreatePublication returned %v, %v; want tenant green", created, err)
	}
	d := f.next(t).GetDelta()
	if got := d.GetNode().GetCarries(); len(got) != 1 || got[0] != "green" || len(d.Tenants) != 1 || len(d.Apps) != 1 ||
		len(d.WholeTenants) != 1 {
		t.Fatalf("after the publication: n1 received %v, want tenant green with its app", d)
	}
	if is := d.Tenants[0]; len(is.UnderlayServices) != 1 || is.UnderlayServices[0].Real != "2001:db8::9" ||
		len(is.Publications) != 1 ||
		is.Publications[0].Underlay != created.Msg.Publication.Underlay ||
		is.Publications[0].Tenant != "" {
		t.Errorf("got tenant %v, want one underlay service and one publication", is)
	}
	if page, err := list(t, n1, "green"); err != nil || len(page.Mappings) != 1 {
		t.Errorf("ListMappings returned %v, %v; want one mapping", page, err)
	}
	got, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "green"}))
	if err != nil || len(got.Msg.Hosting) != 1 || got.Msg.Hosting[0].Node != "n2" {
		t.Errorf("GetTenant returned %v, %v; want n2 only as a hosting node", got, err)
	}
	_, err = op.CreateUnderlayService(t.Context(), connect.NewRequest(&pilasterv1.CreateUnderlayServiceRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = op.CreatePublication(t.Context(), connect.NewRequest(&pilasterv1.CreatePublicationRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)

	if _, err := op.DeletePublication(t.Context(), connect.NewRequest(&pilasterv1.DeletePublicationRequest{
		Tenant: "green", Name: "web",
	})); err != nil {
		t.Fatal(err)
	}
	if d := f.next(t).GetDelta(); d.GetNode() == nil || len(d.Node.Carries) != 0 {
		t.Errorf("after the end of the publication: n1 received %v, want no transit tenants", d)
	}
	_, err = list(t, n1, "green")
	wantCode(t, err, connect.CodePermissionDenied)
}
