package orchestrator

import (
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// TestPublishedTenantIsKnown: the node whose gateway publishes a container hears of its tenant and may ask where its
// containers are, though it has none; with the publication that ends.
func TestPublishedTenantIsKnown(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	if _, err := op.CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: "green", Network: "nimitz", Overlays: []*pilasterv1.Overlay{{Cidr: "fd12:3456::/48", NodeBits: 80}}})); err != nil {
		t.Fatal(err)
	}
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n2, "green", "web")
	if _, err := n2.Allocate(t.Context(), connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green"})); err != nil {
		t.Fatal(err)
	}
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Gateway: true})); err != nil {
		t.Fatal(err)
	}
	f := follow(t, n1, hosting())
	if r := f.next(t).GetSnapshot(); r == nil || len(r.Tenants) != 0 || len(r.Node.Carries) != 0 {
		t.Fatalf("first it heard %v", r)
	}
	ask := connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: "green"})
	_, err := n1.ListMappings(t.Context(), ask)
	wantCode(t, err, connect.CodePermissionDenied)

	if _, err := op.CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{Service: &pilasterv1.Service{Tenant: "green", Name: "storage", Virtual: "fd09::7", Real: "2001:db8::9"}})); err != nil {
		t.Fatal(err)
	}
	made, err := op.CreatePublication(
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
	if err != nil || made.Msg.Publication.Tenant != "green" {
		t.Fatalf("published %v, %v", made, err)
	}
	d := f.next(t).GetDelta()
	if got := d.GetNode().GetCarries(); len(got) != 1 || got[0] != "green" || len(d.Tenants) != 1 || len(d.Apps) != 1 ||
		len(d.WholeTenants) != 1 {
		t.Fatalf("then it heard %v", d)
	}
	if is := d.Tenants[0]; len(is.Services) != 1 || is.Services[0].Real != "2001:db8::9" || len(is.Publications) != 1 ||
		is.Publications[0].Underlay != made.Msg.Publication.Underlay ||
		is.Publications[0].Tenant != "" {
		t.Errorf("the tenant is %v", is)
	}
	if resp, err := n1.ListMappings(t.Context(), ask); err != nil || len(resp.Msg.Mappings) != 1 {
		t.Errorf("asked where its containers are: %v, %v", resp, err)
	}
	if got, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "green"})); err != nil ||
		len(got.Msg.Hosting) != 1 ||
		got.Msg.Hosting[0].Node != "n2" {
		t.Errorf("it counts as one that hosts: %v, %v", got, err)
	}
	_, err = op.CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = op.CreatePublication(t.Context(), connect.NewRequest(&pilasterv1.CreatePublicationRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)

	if _, err := op.DeletePublication(t.Context(), connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: "green", Name: "web"})); err != nil {
		t.Fatal(err)
	}
	if d := f.next(t).GetDelta(); d.GetNode() == nil || len(d.Node.Carries) != 0 {
		t.Errorf("at last it heard %v", d)
	}
	_, err = n1.ListMappings(t.Context(), ask)
	wantCode(t, err, connect.CodePermissionDenied)
}
