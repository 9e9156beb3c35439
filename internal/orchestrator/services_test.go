package orchestrator

import (
	"fmt"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

func ofSlice(of, name string, addresses ...string) *connect.Request[pilasterv1.PutEndpointsRequest] {
	is := &pilasterv1.EndpointSlice{Tenant: "blue", Service: of, Name: name}
	for _, a := range addresses {
		is.Endpoints = append(is.Endpoints, &pilasterv1.ServiceEndpoint{Address: a})
	}
	return connect.NewRequest(&pilasterv1.PutEndpointsRequest{Slices: []*pilasterv1.EndpointSlice{is}})
}

// TestServices: nodes that host a tenant receive its services and endpoints; operators see them; other nodes receive
// nothing.
func TestServices(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Advertise = []string{"2001:db8:7::1"}
	s := start(t, c)
	op, ctx := operator(s.config.RunDir), t.Context()
	createTenant(t, s, "blue")
	createTenant(t, s, "red")
	n1, n2, n3 := registered(t, s, testNode(1)), registered(t, s, testNode(2)), registered(t, s, testNode(3))
	resolve(t, n1, "blue", "web")
	resolve(t, n2, "blue", "web")
	resolve(t, n3, "red", "web")
	f1, f3 := follow(t, n1, hosting("blue")), follow(t, n3, hosting("red"))
	if whole := f1.next(t).GetSnapshot().GetWholeServices(); fmt.Sprint(whole) != "[blue]" {
		t.Errorf("the snapshot has all services of %v, want blue", whole)
	}
	f3.next(t)
	made, err := op.CreateService(ctx, connect.NewRequest(&pilasterv1.CreateServiceRequest{
		Service: &pilasterv1.Service{
			Tenant: "blue", Namespace: "shop", Name: "web", Ports: []*pilasterv1.ServicePort{{Port: 80, Target: 8080}},
			Selector: map[string]string{"app": "web"},
		},
	}))
	if err != nil {
		t.Fatal(err)
	}
	if is := made.Msg.Service; is.Address != "fd70:696c:7300:1::1" || is.Tenant != "blue" || is.Name != "web" ||
		is.Created == nil {
		t.Errorf("made %v", is)
	}
	first := f1.next(t).GetDelta()
	if len(first.Services) != 1 || len(first.Tenants) != 1 || first.Tenants[0].ServicesNumber != 1 ||
		first.Services[0].Address != made.Msg.Service.Address {
		t.Errorf("a new service is received as %v", first)
	}
	if _, err := n2.PutEndpoints(ctx, ofSlice("shop/web", "n2.0", "fd70:696c:6100:2:0:100:100:1")); err != nil {
		t.Fatal(err)
	}
	d := f1.next(t).GetDelta()
	if len(d.Slices) != 1 || d.Slices[0].Node != "n2" || d.Slices[0].Service != "shop/web" ||
		d.Slices[0].Tenant != "blue" {
		t.Errorf("new endpoints are received as %v", d)
	}
	_, err = n2.PutEndpoints(ctx, ofSlice("shop/web", "n1.0", "fd70:696c:6100:2:0:100:100:1"))
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = n2.PutEndpoints(ctx, ofSlice("shop/web", "n2.0", "x"))
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = n2.PutEndpoints(ctx, ofSlice("shop/web", "n2.0", "fd70:696c:6100:1:0:100:100:1"))
	wantCode(t, err, connect.CodeFailedPrecondition)
	many := &pilasterv1.PutEndpointsRequest{Slices: make([]*pilasterv1.EndpointSlice, 257)}
	_, err = n2.PutEndpoints(ctx, connect.NewRequest(many))
	wantCode(t, err, connect.CodeInvalidArgument)

	list, err := op.ListServices(ctx, connect.NewRequest(&pilasterv1.ListServicesRequest{}))
	if err != nil || len(list.Msg.Services) != 1 || list.Msg.Services[0].Ready != 1 ||
		list.Msg.Services[0].Endpoints != 1 {
		t.Errorf("the services are %v, %v", list, err)
	}
	get := func(tenant, name string) (*pilasterv1.GetServiceResponse, error) {
		resp, err := op.GetService(ctx, connect.NewRequest(&pilasterv1.GetServiceRequest{Tenant: tenant, Name: name}))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	}
	if is, err := get("blue", "shop/web"); err != nil || len(is.Slices) != 1 || fmt.Sprint(is.Nodes) != "[n1 n2]" {
		t.Errorf("the service is %v, %v", is, err)
	}
	for tenant, name := range map[string]string{"blue": "web", "red": "shop/web", "green": "shop/web"} {
		_, err := get(tenant, name)
		wantCode(t, err, connect.CodeNotFound)
	}
	apply := &pilasterv1.ApplyServicesRequest{
		Tenant: "blue",
		Services: []*pilasterv1.Service{{
			Namespace: "shop", Name: "web", Ports: []*pilasterv1.ServicePort{{Port: 81}}, AffinitySeconds: 60,
		}},
		DryRun: true,
	}
	for _, dryRun := range []bool{true, false} {
		apply.DryRun = dryRun
		resp, err := op.ApplyServices(ctx, connect.NewRequest(apply))
		if err != nil || resp.Msg.Services[0].Action != "configured" {
			t.Errorf("dry run %v: %v, %v", dryRun, resp, err)
		}
		if is, err := get("blue", "shop/web"); err != nil || (is.Service.AffinitySeconds == 60) == dryRun {
			t.Errorf("after a dry run %v: %v, %v", dryRun, is, err)
		}
	}
	f1.next(t)
	apply.DryRun = true
	apply.Services[0].ExternalIps = []string{"2001:db8:7::1"} // --advertise in s.config
	_, err = op.ApplyServices(ctx, connect.NewRequest(apply))
	wantCode(t, err, connect.CodeFailedPrecondition)
	_, err = op.ChangeServicePools(ctx, connect.NewRequest(&pilasterv1.ChangeServicePoolsRequest{
		Add: []string{"2001:db8:7::/64"},
	}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	apply.Services[0].ExternalIps = nil
	apply.Services[0].Ports[0].Port = 1 << 16
	_, err = op.ApplyServices(ctx, connect.NewRequest(apply))
	wantCode(t, err, connect.CodeInvalidArgument)
	del := connect.NewRequest(&pilasterv1.DeleteServiceRequest{Tenant: "blue", Name: "shop/web"})
	if _, err := op.DeleteService(ctx, del); err != nil {
		t.Fatal(err)
	}
	if d := f1.next(t).GetDelta(); len(d.EndedServices) != 1 || len(d.EndedSlices) != 1 {
		t.Errorf("the end is received as %v", d)
	}
	_, err = op.DeleteService(ctx, del)
	wantCode(t, err, connect.CodeNotFound)

	resolve(t, n3, "red", "db") // the next message of a node that does not host the tenant
	if d := f3.next(t).GetDelta(); len(d.GetApps()) != 1 || len(d.Services)+len(d.Slices)+len(d.EndedServices) != 0 {
		t.Errorf("a node without the tenant received %v", d)
	}
}
