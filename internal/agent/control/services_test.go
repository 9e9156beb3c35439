package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
)

// web is a service of tenant blue.
func web() *pilasterv1.Service {
	return &pilasterv1.Service{
		Tenant: "blue", Namespace: "shop", Name: "web", Address: "fd70:696c:7300:5::1",
		Ports:    []*pilasterv1.ServicePort{{Protocol: "TCP", Port: 80, Target: 8080}},
		Selector: map[string]string{"app": "web"},
	}
}

// sliceOfWeb has endpoints of it on a node.
func sliceOfWeb(node string, addrs ...string) *pilasterv1.EndpointSlice {
	s := &pilasterv1.EndpointSlice{Tenant: "blue", Service: "shop/web", Name: node + ".0", Node: node}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, &pilasterv1.ServiceEndpoint{Address: a})
	}
	return s
}

// TestServicesFromProto: an update has what an event has of its tenant, also an event in several messages.
func TestServicesFromProto(t *testing.T) {
	is, err := service.FromProto(web())
	if err != nil {
		t.Fatal(err)
	}
	slice, err := service.SliceFromProto(sliceOfWeb("n2", "fd70:696c:6100:2:0:100:500:7"))
	if err != nil {
		t.Fatal(err)
	}
	other := is
	other.Tenant = "red"
	red := web()
	red.Tenant = "red"
	delta := &pilasterv1.Delta{
		WholeServices: []string{"blue"}, Services: []*pilasterv1.Service{web(), red},
		Slices:        []*pilasterv1.EndpointSlice{sliceOfWeb("n2", "fd70:696c:6100:2:0:100:500:7")},
		EndedServices: []*pilasterv1.Service{{Tenant: "red", Name: "old"}},
		EndedSlices:   []*pilasterv1.EndpointSlice{{Tenant: "red", Service: "shop/web", Name: "n3.1"}},
	}
	blue := services.Update{
		Tenant: "blue", Whole: true, Services: []service.Service{is}, Slices: []service.Slice{slice},
	}
	got, err := servicesFromProto(&pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Delta{Delta: delta}})
	want := []services.Update{blue, {
		Tenant: "red", Services: []service.Service{other}, Ended: []service.Name{{Name: "old"}},
		EndedSlices: []services.SliceName{{Service: is.Name, Name: "n3.1"}},
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}

	first := &pilasterv1.FollowResponse{
		More: true, Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{}},
	}
	_, begun := reassemble(nil, first)
	whole, _ := reassemble(begun, &pilasterv1.FollowResponse{
		Revision: 3, Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
			WholeServices: delta.WholeServices, Services: delta.Services[:1], Slices: delta.Slices,
		}},
	})
	if got, err := servicesFromProto(whole); err != nil || !reflect.DeepEqual(got, []services.Update{blue}) {
		t.Errorf("a snapshot in two messages: %+v, %v; want %+v", got, err, blue)
	}

	bad := web()
	bad.Address = "x"
	for name, d := range map[string]*pilasterv1.Delta{
		"service": {Services: []*pilasterv1.Service{bad}},
		"slice":   {Slices: []*pilasterv1.EndpointSlice{sliceOfWeb("n2", "x")}},
	} {
		e := &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Delta{Delta: d}}
		if got, err := servicesFromProto(e); err == nil {
			t.Errorf("an invalid %s became %+v", name, got)
		}
		if d.WholePolicies = []string{"blue"}; isPolicyOnly(e) {
			t.Errorf("an event with policies and a %s counts as one with policies only", name)
		}
	}
}

// TestPutEndpoints: only what would be refused again is a refusal, and says whether there is no room.
func TestPutEndpoints(t *testing.T) {
	b := newLinkBed(t)
	slice, err := service.SliceFromProto(sliceOfWeb("n1", "fd70:696c:6100:1:0:100:500:7"))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.link.PutEndpoints(t.Context(), []service.Slice{slice}); !errors.Is(err, errNoLink) {
		t.Errorf("before a connection: %v", err)
	}
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	for code, refused := range map[connect.Code]bool{
		0: false, connect.CodeUnavailable: false, connect.CodeUnimplemented: false,
		connect.CodeFailedPrecondition: true, connect.CodeInvalidArgument: true, connect.CodeResourceExhausted: true,
		connect.CodeNotFound: true, connect.CodePermissionDenied: true,
	} {
		b.cluster.endpoints = func(req *pilasterv1.PutEndpointsRequest) error {
			if len(req.Slices) != 1 || req.Slices[0].Name != "n1.0" || len(req.Slices[0].Endpoints) != 1 {
				t.Errorf("request %v", req)
			}
			if code == 0 {
				return nil
			}
			return connect.NewError(code, agenttest.ErrFake)
		}
		err := b.link.PutEndpoints(t.Context(), []service.Slice{slice})
		full := code == connect.CodeResourceExhausted
		if errors.Is(err, services.ErrRefused) != refused || errors.Is(err, services.ErrFull) != full ||
			(err == nil) != (code == 0) {
			t.Errorf("%v: %v", code, err)
		}
	}
}

// TestServicesOfTheStream: the stream's services get into the packet path, and the node's endpoints to the
// orchestrator. One of a build without services leaves what an earlier process wrote.
func TestServicesOfTheStream(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	puts := make(chan *pilasterv1.PutEndpointsRequest, 100)
	b.cluster.endpoints = func(req *pilasterv1.PutEndpointsRequest) error { puts <- req; return nil }
	core.Reporter = b.link
	core.Reopen()
	q := core.Request("c1")
	q.Labels = map[string]string{"app": "web", "io.kubernetes.pod.namespace": "shop"}
	r, err := core.Add(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	old := dpapi.FrontendKey{Address: netip.MustParseAddrPort("[fd70:696c:7300:5::9]:80"), Protocol: 6}
	if err := core.Driver.PutServices([]dpapi.Frontend{{FrontendKey: old}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); core.Core.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	defer b.run(core)()
	handles := func(revision int64, d *pilasterv1.Delta) {
		t.Helper()
		e := policyEvent(revision, d)
		for b.link.Status().Revision != revision {
			select {
			case b.cluster.events <- e:
				e = &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}}
			case <-b.cluster.hosted:
			}
		}
	}
	await := func(want map[netip.AddrPort][]netip.Addr) {
		t.Helper()
		agenttest.Eventually(t, func() error {
			is := map[netip.AddrPort][]netip.Addr{}
			for key, f := range core.Driver.Frontends.All() {
				is[key.Address] = nil
				for _, e := range f.Backends {
					is[key.Address] = append(is[key.Address], e.Seen)
				}
			}
			if !reflect.DeepEqual(is, want) {
				return fmt.Errorf("frontends %v, want %v", is, want)
			}
			return nil
		})
	}
	blue := &pilasterv1.Tenant{
		Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1, Key: agenttest.BlueKey[:]}}, ServicesNumber: 5,
	}
	handles(1, &pilasterv1.Delta{
		Tenants: []*pilasterv1.Tenant{blue}, WholeTenants: []string{"blue"}, WholePolicies: []string{"blue"},
	})
	await(map[netip.AddrPort][]netip.Addr{old.Address: nil})

	remote := address.Plain{Node: netip.MustParsePrefix("fd70:696c:6100:2::/64"), Tenant: 1, App: 5, Index: 7}.Addr()
	vip := netip.MustParseAddrPort("[fd70:696c:7300:5::1]:80")
	here, there := r.Attachments[0].Address, address.NewCipher(agenttest.BlueKey).Encrypt(remote)
	handles(2, &pilasterv1.Delta{
		WholeServices: []string{"blue"}, WholePolicies: []string{"blue"}, Services: []*pilasterv1.Service{web()},
		Slices: []*pilasterv1.EndpointSlice{sliceOfWeb("n2", remote.String())},
	})
	await(map[netip.AddrPort][]netip.Addr{vip: {here, there}})
	put := <-puts
	if len(put.Slices) != 1 || put.Slices[0].Name != "n1.0" || put.Slices[0].Service != "shop/web" ||
		put.Slices[0].Endpoints[0].Address != r.Attachments[0].Plaintext.String() {
		t.Errorf("reported %v", put)
	}
	handles(3, &pilasterv1.Delta{
		Slices:      []*pilasterv1.EndpointSlice{put.Slices[0]},
		EndedSlices: []*pilasterv1.EndpointSlice{{Tenant: "blue", Service: "shop/web", Name: "n2.0"}},
	})
	await(map[netip.AddrPort][]netip.Addr{vip: {here}})
	if err := core.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	await(map[netip.AddrPort][]netip.Addr{})
}
