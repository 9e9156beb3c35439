package cache

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
)

func serviceEvent(tenant, name, address string) store.Event {
	return store.Event{Service: &pilasterv1.Service{Tenant: tenant, Name: name, Address: address}}
}

func endedService(tenant, name string) store.Event {
	return store.Event{EndedService: &pilasterv1.Service{Tenant: tenant, Name: name}}
}

// sliceEvent is a slice with some endpoints.
func sliceEvent(tenant, of, name string, endpoints int) store.Event {
	is := &pilasterv1.EndpointSlice{Tenant: tenant, Service: of, Name: name}
	for i := range endpoints {
		is.Endpoints = append(is.Endpoints, &pilasterv1.ServiceEndpoint{Address: fmt.Sprintf("fd70::%x", i+1)})
	}
	return store.Event{Slice: is}
}

func endedSlice(tenant, of, name string) store.Event {
	return store.Event{EndedSlice: &pilasterv1.EndpointSlice{Tenant: tenant, Service: of, Name: name}}
}

// serviceChanges lists the services and slices in a message, sorted: + before a new or changed one, - before an ended
// one, * before a tenant whose services are complete in the message.
func serviceChanges(r *pilasterv1.FollowResponse) string {
	d := r.GetDelta()
	if s := r.GetSnapshot(); s != nil {
		d = &pilasterv1.Delta{Services: s.Services, Slices: s.Slices, WholeServices: s.WholeServices}
	}
	var words []string
	for _, name := range d.GetWholeServices() {
		words = append(words, "*"+name)
	}
	for _, is := range d.GetServices() {
		words = append(words, "+"+is.Tenant+"/"+is.Name+"="+is.Address)
	}
	for _, is := range d.GetEndedServices() {
		words = append(words, "-"+is.Tenant+"/"+is.Name)
	}
	for _, is := range d.GetSlices() {
		word := fmt.Sprintf("+%s/%s/%s=%d", is.Tenant, is.Service, is.Name, len(is.Endpoints))
		if is.Unreachable {
			word += "?"
		}
		words = append(words, word)
	}
	for _, is := range d.GetEndedSlices() {
		words = append(words, "-"+is.Tenant+"/"+is.Service+"/"+is.Name)
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

func wantServiceChanges(t *testing.T, f *Subscriber, messages ...string) {
	t.Helper()
	for _, want := range messages {
		if f.Queue.Len() == 0 {
			t.Errorf("no message, want %q", want)
		} else if got := serviceChanges(f.Queue.Next()); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for f.Queue.Len() > 0 {
		t.Errorf("got %q, want no further message", serviceChanges(f.Queue.Next()))
	}
}

// A node receives the services and slices of the tenants that it hosts, and no message for those of other tenants.
func TestServicesOfHostedTenants(t *testing.T) {
	m, _ := newTestCache()
	m.applyNext(sliceEvent("blue", "web", "n2.0", 3), serviceEvent("blue", "web", "a"), serviceEvent("red", "web", "b"))
	f, _ := testFollow(m, 0, "blue")
	wantServiceChanges(t, f, "*blue, +blue/web/n2.0=3, +blue/web=a")
	m.applyNext(serviceEvent("red", "db", "c"), sliceEvent("red", "web", "n1.0", 1))
	wantServiceChanges(t, f)
	m.applyNext(serviceEvent("blue", "db", "d"), sliceEvent("blue", "db", "fixed", 1),
		sliceEvent("blue", "web", "n2.0", 2), serviceEvent("red", "db", "e"))
	wantServiceChanges(t, f, "+blue/db/fixed=1, +blue/db=d, +blue/web/n2.0=2")
	m.applyNext(endedService("blue", "web"), endedSlice("blue", "web", "n2.0"), endedSlice("red", "web", "n1.0"))
	wantServiceChanges(t, f, "-blue/web, -blue/web/n2.0")

	publish(m, m.Revision+1, "red", "n1") // the transit tenant red is sent without its services
	wantServiceChanges(t, f, "")
	m.applyNext(serviceEvent("red", "db", "f"))
	wantServiceChanges(t, f)
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantServiceChanges(t, f, "*red, +red/db=f, +red/web=b")
	m.applyNext(store.Event{DeletedTenant: "red"}, endedService("red", "web"), endedService("red", "db"))
	wantServiceChanges(t, f, "-red/db, -red/web")
	m.applyNext(store.Event{Tenant: &pilasterv1.Tenant{Name: "red"}})
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}})
	m.Rehost(f, &pilasterv1.FollowRequest{HostedTenants: []string{"blue", "red"}})
	wantServiceChanges(t, f, "", "*red")
}

// A stream that resumes receives the missed events of services, or all services.
func TestServicesResume(t *testing.T) {
	m, _ := newTestCache()
	m.applyNext(serviceEvent("blue", "web", "a"), sliceEvent("blue", "web", "n2.0", 3), serviceEvent("red", "db", "c"))
	m.applyNext(sliceEvent("blue", "web", "n2.0", 1))
	m.applyNext(endedService("blue", "web"), endedSlice("blue", "web", "n2.0"), serviceEvent("blue", "db", "d"))
	for _, c := range []struct {
		resume     int64
		hosted     string
		incomplete []string
		want       []string
	}{
		{0, "blue", nil, []string{"*blue, +blue/db=d"}},
		{11, "blue", nil, []string{"+blue/web/n2.0=1", "+blue/db=d, -blue/web, -blue/web/n2.0", ""}},
		{13, "blue", nil, []string{""}},
		{13, "blue red", []string{"red"}, []string{"*red, +red/db=c"}},
	} {
		f := m.Subscribe(testNode(1), store.Session{}, &pilasterv1.FollowRequest{
			ResumeRevision: c.resume, HostedTenants: strings.Fields(c.hosted), IncompleteTenants: c.incomplete,
		}, func(error) {})
		wantServiceChanges(t, f, c.want...)
	}
}

// The slices of a node that does not answer say so, those of the store do not. The node is a suspect before it is
// marked, and one that has returned afterwards.
func TestUnreachable(t *testing.T) {
	m, _ := newTestCache()
	of := func(node string, e store.Event) store.Event {
		e.Slice.Node = node
		return e
	}
	marked := func(node string, is bool) store.Event {
		return store.Event{Unreachable: &store.NodeUnreachable{Node: node, Unreachable: is}}
	}
	session := func(node string, is store.Session) store.Event {
		return store.Event{Session: &store.NodeSession{Node: node, Session: is}}
	}
	reached := func(want string) {
		t.Helper()
		r := m.Reachability()
		names := func(all []*pilasterv1.Node) (names []string) {
			for _, n := range all {
				names = append(names, n.Name)
			}
			return names
		}
		if n := m.Size().Unreachable; n != len(r.Marked) {
			t.Errorf("%d nodes are counted as unreachable, and %v are marked", n, r.Marked)
		}
		is := fmt.Sprint(r.Nodes, " suspects ", names(r.Suspects), " connected ", names(r.Connected), " marked ",
			r.Marked, " returned ", r.Returned)
		if is != want {
			t.Errorf("got  %s\nwant %s", is, want)
		}
	}
	m.applyNext(store.Event{Node: &pilasterv1.Node{Name: "n7"}}, store.Event{Node: &pilasterv1.Node{Name: "n8"}},
		session("n7", store.Session{Orchestrator: "o"}), session("n8", store.Session{Orchestrator: "o"}),
		serviceEvent("blue", "web", "a"), of("n7", sliceEvent("blue", "web", "n7.0", 1)),
		of("n8", sliceEvent("blue", "web", "n8.0", 1)), of("n7", sliceEvent("red", "web", "n7.0", 2)))
	f, _ := testFollow(m, 0, "blue")
	wantServiceChanges(t, f, "*blue, +blue/web/n7.0=1, +blue/web/n8.0=1, +blue/web=a")
	reached("2 suspects [] connected [] marked [] returned []")
	m.applyNext(session("n7", store.Session{}))
	reached("2 suspects [n7] connected [n8] marked [] returned []")
	before := m.Revision
	m.applyNext(marked("n7", true))
	wantServiceChanges(t, f, "+blue/web/n7.0=1?")
	reached("2 suspects [] connected [] marked [n7] returned []")
	m.applyNext(of("n7", sliceEvent("blue", "web", "n7.0", 3)))
	wantServiceChanges(t, f, "+blue/web/n7.0=3?")
	f, _ = testFollow(m, 0, "blue")
	wantServiceChanges(t, f, "*blue, +blue/web/n7.0=3?, +blue/web/n8.0=1, +blue/web=a")
	f = m.Subscribe(testNode(1), store.Session{}, &pilasterv1.FollowRequest{
		ResumeRevision: before, HostedTenants: []string{"blue"},
	}, func(error) {})
	wantServiceChanges(t, f, "+blue/web/n7.0=1?", "+blue/web/n7.0=3?", "")
	m.applyNext(session("n7", store.Session{Orchestrator: "o"}))
	reached("2 suspects [] connected [] marked [n7] returned [n7]")
	m.applyNext(marked("n7", false))
	wantServiceChanges(t, f, "+blue/web/n7.0=3")
	reached("2 suspects [] connected [] marked [] returned []")
	whole := store.Batch{Revision: m.Revision + 1, Whole: true, Events: []store.Event{
		marked("n8", true), of("n8", sliceEvent("blue", "web", "n8.0", 1)),
		of("n7", sliceEvent("blue", "web", "n7.0", 1)), marked("n7", true),
	}}
	m.Apply(whole)
	for name, all := range m.SlicesOf("blue") {
		for _, is := range all {
			if !is.Unreachable {
				t.Errorf("slice %s of %v is not marked after the whole state was read", is.Name, name)
			}
		}
	}
}

// The capacity counts services and endpoints of all tenants, and what calls add at the moment.
func TestReserveServices(t *testing.T) {
	m, _ := newTestCache()
	var events []store.Event
	for i := range service.MaxServices - 2 {
		events = append(events, serviceEvent("blue", fmt.Sprint("s", i), ""))
	}
	for i := range service.MaxEndpoints/service.MaxSliceEndpoints - 1 {
		events = append(events, sliceEvent("red", "web", fmt.Sprint("n", i, ".0"), service.MaxSliceEndpoints))
	}
	m.applyNext(events...)
	names := func(all ...string) (names []service.Name) {
		for _, n := range all {
			names = append(names, service.ParseName(n))
		}
		return names
	}
	of := func(tenant, name string, endpoints int) []service.Slice {
		return []service.Slice{{
			Tenant: tenant, Service: service.ParseName("web"), Name: name,
			Endpoints: slices.Repeat([]service.Endpoint{{Address: netip.IPv6LinkLocalAllNodes()}}, endpoints),
		}}
	}
	reserve := func(tenant string, names []service.Name, all []service.Slice, want string) func(int64) {
		t.Helper()
		release, err := m.ReserveServices(tenant, names, all)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v of %s: %v, want %q", names, tenant, err, want)
		}
		return release
	}
	const full = "has 9999 services, 2 more are new, and the maximum is 10000; nothing was changed"
	first := reserve("blue", names("s0", "a"), nil, "")
	reserve("red", names("s0", "b"), nil, full) // s0 is blue's
	first(0)                                    // it was refused
	reserve("red", names("s0", "b"), nil, "")(m.Revision + 1)
	reserve("blue", names("c"), nil, "has 10000 services")
	reserve("blue", names("s0", "s1"), nil, "")
	m.applyNext(serviceEvent("red", "s0", ""), endedService("blue", "s2"))
	reserve("blue", names("c"), nil, "")(0)
	reserve("blue", names("c", "d", "e"), nil, "3 more are new")

	reserve("red", nil, of("red", "n0.0", 1000), "")(0) // it replaces one
	last := reserve("blue", nil, of("blue", "n0.0", 900), "")
	reserve("red", nil, of("red", "n0.1", 101), "has 99900 endpoints of services, 101 more are new")
	last(m.Revision + 1)
	m.applyNext(sliceEvent("blue", "web", "n0.0", 900))
	reserve("red", nil, of("red", "n0.1", 101), "has 99900 endpoints of services, 101 more are new")
	moved := append(of("red", "n1.0", 500), of("red", "n1.1", 600)...)
	reserve("red", nil, moved, "")(0)
	m.applyNext(store.Event{DeletedTenant: "red"})
	reserve("blue", nil, of("blue", "n0.1", 1000), "")(0)
	if m.Services.count != service.MaxServices-3 || m.Services.endpoints != 900 {
		t.Errorf("%d services and %d endpoints", m.Services.count, m.Services.endpoints)
	}
}

// Services and slices of a large event come in several messages.
func TestPartsOfServices(t *testing.T) {
	d := &pilasterv1.Delta{WholeServices: []string{"blue"}}
	for i := range 100 {
		d.Services = append(d.Services, serviceEvent("blue", fmt.Sprint("s", i), strings.Repeat("a", 1<<16)).Service)
		d.Slices = append(d.Slices, sliceEvent("blue", "s0", fmt.Sprint("n", i, ".0"), 1000).Slice)
	}
	whole := response(7, d)
	all := Parts(whole)
	merged := new(pilasterv1.Delta)
	for i, part := range all {
		if proto.Size(part) > maxPart+1<<10 || part.More != (i < len(all)-1) || (part.Revision == 7) == part.More {
			t.Errorf("part %d has %d bytes, more %v, revision %d", i, proto.Size(part), part.More, part.Revision)
		}
		proto.Merge(merged, part.GetDelta())
	}
	if len(all) < 3 || len(all[0].GetDelta().Services)+len(all[0].GetDelta().Slices) != 0 || !proto.Equal(merged, d) {
		t.Errorf("%d parts, which together differ from the event: %v", len(all), !proto.Equal(merged, d))
	}
}
