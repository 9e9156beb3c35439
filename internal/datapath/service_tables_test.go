package datapath

import (
	"maps"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// TestServicesSurviveRestart: a new Datapath on the same pins has the services of the one before. Numbers of services
// that were deleted are not used again.
func TestServicesSurviveRestart(t *testing.T) {
	w := newLink(t)
	n := w.nodes[0]
	n.open(t, joined)
	backend := dpapi.Backend{
		Plain: netip.MustParseAddr("fd70:696c:6100:1::1"), Seen: netip.MustParseAddr("fd70:696c:6200::1"), Port: 8080,
	}
	at := func(index uint8) dpapi.FrontendKey {
		return dpapi.FrontendKey{
			Address: netip.AddrPortFrom(serviceAddress(t, serving(blue, 7), index), 80), Protocol: 6,
		}
	}
	put := func(index uint8) {
		t.Helper()
		must(t, n.datapath.PutServices([]dpapi.Frontend{{FrontendKey: at(index), Backends: []dpapi.Backend{backend}}}))
	}
	read := func() (all map[bpfobj.PilasterSvcKey]bpfobj.PilasterSvc, highest uint32) {
		t.Helper()
		all = map[bpfobj.PilasterSvcKey]bpfobj.PilasterSvc{}
		must(t, bpfobj.ForEachEntry(n.datapath.Objects.PilSvcV1, func(k bpfobj.PilasterSvcKey, v bpfobj.PilasterSvc) {
			all[k], highest = v, max(highest, v.Frontend, v.Set)
		}))
		return all, highest
	}
	put(1)
	want, _ := read()
	put(2)
	_, highest := read()
	must(t, n.datapath.DeleteServices([]dpapi.FrontendKey{at(2)}))

	n.reopen(t, n.datapath.config)
	put(1)
	if got, _ := read(); len(got) != 1 || !maps.Equal(got, want) {
		t.Errorf("services %v after a restart, were %v", got, want)
	}
	put(3)
	got, _ := read()
	for k, v := range got {
		if _, old := want[k]; !old && (v.Frontend <= highest || v.Set <= highest) {
			t.Errorf("a new service has numbers %+v, and %d was in use", v, highest)
		}
	}
	if len(got) != 2 {
		t.Errorf("services %v, want one more than %v", got, want)
	}
}

// TestServiceClientsOfOneNamespace: the end of an endpoint leaves the namespace's entry to the other endpoint in it.
func TestServiceClientsOfOneNamespace(t *testing.T) {
	w := newLink(t)
	n := w.nodes[0]
	n.cgroup = cgroup(t)
	n.open(t, joined)
	c := n.add(t, serving(blue, 7), 1)
	second := c.record
	second.ID++
	m := netpilaMaps{n.datapath}
	must(t, m.writeClient(second))
	cookie, err := device.CookieOf(c.record.Netns)
	must(t, err)
	expect := func(id endpoint.ID, when string) {
		t.Helper()
		v, found, err := bpfobj.Lookup[bpfobj.PilasterSvcNetns](n.datapath.Objects.PilSvcnetnsV1, cookie)
		must(t, err)
		if found != (id != 0) || v.Endpoint != uint32(id) {
			t.Errorf("%s: the namespace has entry %+v (%v), want that of endpoint %d", when, v, found, id)
		}
	}
	expect(second.ID, "two endpoints")
	must(t, m.Deactivate(t.Context(), c.record))
	expect(second.ID, "without the first")
	must(t, m.clients.Delete(second.ID))
	expect(0, "without both")
}
