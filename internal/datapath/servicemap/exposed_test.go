package servicemap

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
)

var (
	shop     = key("[2001:db8:7::9]:80")
	shopTLS  = key("[2001:db8:7::9]:443") // at the same address
	wiki     = key("[2001:db8:7::a]:80")  // of another tenant
	nodePort = key("[2001:db8:70::1]:30080")
)

// Numbers of the tenants of these frontends.
const (
	shops = uint32(7)
	wikis = uint32(8)
)

// newExposedBed is newBed for a node whose containers are those of backendsOf.
func newExposedBed(t testing.TB) *bed {
	t.Helper()
	b := newBed(t, 1000)
	b.host.NodePrefix = netip.MustParsePrefix("fd70:696c:6100:1::/64")
	return b
}

// elsewhere moves backends to another node.
func elsewhere(all []dpapi.Backend) []dpapi.Backend {
	for i := range all {
		plain := all[i].Plain.As16()
		plain[7]++
		all[i].Plain = netip.AddrFrom16(plain)
	}
	return all
}

func exposed(k dpapi.FrontendKey, tenant uint32, backends ...dpapi.Backend) dpapi.Frontend {
	return dpapi.Frontend{
		FrontendKey: k, Exposed: dpapi.Exposed{Services: tenant, Node: k == nodePort}, Backends: backends,
	}
}

// exposedContents is what the kernel has because of exposed frontends.
type exposedContents struct {
	Addresses map[string]uint32          // their kinds
	Targets   []string                   // sorted
	Tenants   []uint32                   // sorted
	Backends  map[string][]dpapi.Backend // of the table of Maglev of each frontend, sorted
	Parts     int
}

func (b *bed) exposedContents(t testing.TB) exposedContents {
	t.Helper()
	o := &b.host.Objects
	c := exposedContents{Addresses: map[string]uint32{}, Backends: map[string][]dpapi.Backend{}}
	for a, kind := range entries[bpfobj.PilasterAddr, uint32](t, o.PilExposedV1) {
		c.Addresses[a.Addr().String()] = kind
	}
	for k := range entries[bpfobj.PilasterSvcKey, uint32](t, o.PilExtargetsV1) {
		c.Targets = append(c.Targets, frontendKeyOf(k).Address.String())
	}
	slices.Sort(c.Targets)
	c.Tenants = slices.Sorted(maps.Keys(entries[uint32, uint32](t, o.PilExconnsV1)))
	parts := entries[bpfobj.PilasterSvcMember, bpfobj.PilasterMaglevPart](t, o.PilMaglevV1)
	c.Parts = len(parts)
	backs := entries[uint32, bpfobj.PilasterSvcBackend](t, o.PilSvcbacksV1)
	for k, v := range entries[bpfobj.PilasterSvcKey, bpfobj.PilasterSvc](t, o.PilSvcV1) {
		if v.Exposed == 0 {
			continue
		}
		seen := map[dpapi.Backend]bool{}
		for slot := range v.Count {
			part, found := parts[bpfobj.PilasterSvcMember{Set: v.Set, Index: slot / uint32(partSlots)}]
			number := part.Backends[slot%uint32(partSlots)]
			back, known := backs[number]
			if !found || !known || back.Frontend != v.Frontend {
				t.Fatalf("%v: slot %d has backend %d %+v of frontend %d", frontendKeyOf(k), slot, number, back,
					v.Frontend)
			}
			seen[backendOf(back)] = true
		}
		byAddress := func(a, b dpapi.Backend) int { return a.Plain.Compare(b.Plain) }
		c.Backends[frontendKeyOf(k).Address.String()] = slices.SortedFunc(maps.Keys(seen), byAddress)
	}
	return c
}

func (b *bed) expectExposed(t testing.TB, when string, want exposedContents) {
	t.Helper()
	if got := b.exposedContents(t); !reflect.DeepEqual(got, want) {
		t.Errorf("%s: the kernel has\n%+v\nwant\n%+v", when, got, want)
	}
}

// seenAt returns the ports of backends as the map of targets has them.
func seenAt(port uint16, indices ...byte) (all []string) {
	for _, b := range backendsOf(port, indices...) {
		all = append(all, netip.AddrPortFrom(b.Seen, port).String())
	}
	slices.Sort(all)
	return all
}

// TestExposed: frontends that come, change and go leave exactly what the others need.
func TestExposed(t *testing.T) {
	b := newExposedBed(t)
	here, there := backendsOf(8080, 1, 2), elsewhere(backendsOf(8080, 3))
	both := slices.Concat(here, there)
	must(t, b.PutServices([]dpapi.Frontend{exposed(shop, shops, both...)}))
	one := exposedContents{
		Addresses: map[string]uint32{"2001:db8:7::9": exposedAddress}, Targets: seenAt(8080, 1, 2),
		Tenants: []uint32{shops}, Parts: partsOf(service.MaglevSize(3)),
		Backends: map[string][]dpapi.Backend{shop.Address.String(): both},
	}
	b.expectExposed(t, "a frontend", one)

	// A second one shares its address, and the port of a container.
	must(t, b.PutServices([]dpapi.Frontend{
		exposed(shopTLS, shops, backendsOf(8080, 2)...), exposed(nodePort, shops, backendsOf(8081, 1)...),
		exposed(wiki, wikis, elsewhere(backendsOf(80, 9))...), frontendOf(web, 1),
	}))
	b.expectExposed(t, "more", exposedContents{
		Addresses: map[string]uint32{
			"2001:db8:7::9": exposedAddress, "2001:db8:7::a": exposedAddress, "2001:db8:70::1": exposedNode,
		},
		Targets: slices.Concat(seenAt(8080, 1), seenAt(8081, 1), seenAt(8080, 2)),
		Tenants: []uint32{shops, wikis}, Parts: one.Parts + 3*partsOf(service.MaglevSize(1)),
		Backends: map[string][]dpapi.Backend{
			shop.Address.String(): both, shopTLS.Address.String(): backendsOf(8080, 2),
			nodePort.Address.String(): backendsOf(8081, 1), wiki.Address.String(): elsewhere(backendsOf(80, 9)),
		},
	})

	// It keeps the address and the port.
	must(t, b.DeleteServices([]dpapi.FrontendKey{shop, nodePort, wiki}))
	two := exposedContents{
		Addresses: one.Addresses, Targets: seenAt(8080, 2), Tenants: one.Tenants,
		Parts:    partsOf(service.MaglevSize(1)),
		Backends: map[string][]dpapi.Backend{shopTLS.Address.String(): backendsOf(8080, 2)},
	}
	b.expectExposed(t, "a shared address and port", two)

	// A replaced one, with a larger table, has other ports. A backend that drains keeps its port.
	replaced := exposed(shopTLS, shops, backendsOf(8080, 3, 4, 5)...)
	replaced.Draining = backendsOf(8080, 2)
	must(t, b.PutServices([]dpapi.Frontend{replaced}))
	two.Targets, two.Parts = seenAt(8080, 2, 3, 4, 5), partsOf(service.MaglevSize(3))
	two.Backends[shopTLS.Address.String()] = backendsOf(8080, 3, 4, 5)
	b.expectExposed(t, "replaced", two)
	replaced.Draining, replaced.Backends = nil, backendsOf(8080, 3)
	must(t, b.PutServices([]dpapi.Frontend{replaced}))
	two.Targets, two.Parts = seenAt(8080, 3), partsOf(service.MaglevSize(1))
	two.Backends[shopTLS.Address.String()] = backendsOf(8080, 3)
	b.expectExposed(t, "replaced again", two)

	must(t, b.PutServices([]dpapi.Frontend{exposed(shopTLS, shops)}))
	b.expectExposed(t, "without backends", exposedContents{
		Addresses: one.Addresses, Tenants: one.Tenants,
		Backends: map[string][]dpapi.Backend{shopTLS.Address.String(): nil},
	})
	must(t, b.DeleteServices([]dpapi.FrontendKey{shopTLS}))
	b.expectExposed(t, "all are gone", exposedContents{
		Addresses: map[string]uint32{}, Backends: map[string][]dpapi.Backend{},
	})
	if !reflect.DeepEqual(b.exposed, newExposure()) {
		t.Errorf("the agent counts %+v without exposed frontends", b.exposed)
	}
}

// connectionsOf returns the table of connections of a tenant.
func (b *bed) connectionsOf(t testing.TB, tenant uint32) *ebpf.Map {
	t.Helper()
	var id uint32
	must(t, b.host.Objects.PilExconnsV1.Lookup(tenant, &id))
	m, err := ebpf.NewMapFromID(ebpf.MapID(id))
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// TestExposedRestart: the same frontends after a restart change nothing, connections stay, and what a crash has left is
// removed. The agent then counts as it did before.
func TestExposedRestart(t *testing.T) {
	b := newExposedBed(t)
	all := []dpapi.Frontend{
		exposed(shop, shops, backendsOf(8080, 1, 2)...), exposed(shopTLS, shops, backendsOf(8080, 2)...),
		exposed(nodePort, wikis, elsewhere(backendsOf(8081, 3))...),
	}
	must(t, b.PutServices(all))
	connection := bpfobj.PilasterNatKey{LocalPort: 80, Proto: 6}
	must(t, b.connectionsOf(t, shops).Put(connection, bpfobj.PilasterNatEntry{Port: 8080}))
	want, counts, rest := b.exposedContents(t), b.exposed, b.contents(t)
	maglev := func() map[bpfobj.PilasterSvcMember]bpfobj.PilasterMaglevPart {
		return entries[bpfobj.PilasterSvcMember, bpfobj.PilasterMaglevPart](t, b.host.Objects.PilMaglevV1)
	}
	slots := maglev()

	o, n := &b.host.Objects, rest.highest()
	must(t, o.PilExposedV1.Put(bpfobj.ToAddr(wiki.Address.Addr()), exposedAddress))
	must(t, o.PilExtargetsV1.Put(keyOf(wiki), uint32(1)))
	must(t, o.PilMaglevV1.Put(bpfobj.PilasterSvcMember{Set: n + 1}, bpfobj.PilasterMaglevPart{}))
	must(t, bpfobj.AddConnections(o.PilExconnsV1, uint32(99)))
	for _, when := range []string{"after a crash", "after a restart"} {
		b.restart()
		_, err := b.Services()
		must(t, err)
		b.expectExposed(t, when, want)
		must(t, b.PutServices(all))
		b.expectExposed(t, when+", with the same frontends", want)
		b.contents(t).expect(t, when, rest)
		if is := maglev(); !reflect.DeepEqual(is, slots) {
			t.Errorf("%s: slots have other backends", when)
		}
		if !reflect.DeepEqual(b.exposed, counts) {
			t.Errorf("%s: the agent counts %+v, before %+v", when, b.exposed, counts)
		}
		var has bpfobj.PilasterNatEntry
		if err := b.connectionsOf(t, shops).Lookup(connection, &has); err != nil || has.Port != 8080 {
			t.Errorf("%s: the connection is %+v, %v", when, has, err)
		}
	}
	b.restart()
	must(t, b.DeleteServices([]dpapi.FrontendKey{shop, shopTLS, nodePort}))
	b.expectExposed(t, "all are gone", exposedContents{
		Addresses: map[string]uint32{}, Backends: map[string][]dpapi.Backend{},
	})
}

// TestExposedKeep: KeepServices deletes the exposed frontends of a tenant that are not listed, and none of others.
func TestExposedKeep(t *testing.T) {
	b := newExposedBed(t)
	must(t, b.PutServices([]dpapi.Frontend{
		exposed(shop, shops, backendsOf(8080, 1)...), exposed(wiki, wikis, backendsOf(8080, 2)...), frontendOf(web, 1),
	}))
	want := b.exposedContents(t)
	must(t, b.PutServices([]dpapi.Frontend{
		exposed(shopTLS, shops, backendsOf(8443, 1)...), exposed(nodePort, shops, backendsOf(8080, 1)...),
	}))
	b.restart()
	must(t, b.KeepServices(netip.MustParsePrefix("fd70:696c:7300:7::/64"), []dpapi.FrontendKey{shop, web}))
	b.expectExposed(t, "kept", want)
	must(t, b.KeepServices(netip.MustParsePrefix("fd70:696c:7300:7::/64"), nil))
	all, err := b.Services()
	must(t, err)
	if !slices.Equal(all, []dpapi.FrontendKey{wiki}) {
		t.Errorf("services %v, want %v", all, wiki)
	}
}

// TestExposedKind: an address that becomes a node's own, or is so no longer, is written, also after a restart.
func TestExposedKind(t *testing.T) {
	b := newExposedBed(t)
	f := exposed(shop, shops, backendsOf(8080, 1)...)
	for i, node := range []bool{false, true, true, false, true} {
		f.Exposed.Node = node
		must(t, b.PutServices([]dpapi.Frontend{f}))
		want := map[bool]uint32{false: exposedAddress, true: exposedNode}[node]
		if got := b.exposedContents(t).Addresses["2001:db8:7::9"]; got != want {
			t.Errorf("%d: kind %d, want %d", i, got, want)
		}
		got, found, err := b.LookupService(shop)
		if err != nil || !found || !reflect.DeepEqual(got, f) {
			t.Errorf("%d: %+v, %v, %v; want %+v", i, got, found, err, f)
		}
		if i%2 == 0 {
			b.restart()
		}
	}
}

// TestExposedFits: frontends whose tables have no room are refused before anything changes; those that replace others
// need none.
func TestExposedFits(t *testing.T) {
	b := newExposedBed(t)
	must(t, b.PutServices([]dpapi.Frontend{exposed(shop, shops, backendsOf(8080, 1)...)}))
	want, rest := b.exposedContents(t), b.contents(t)
	var many []dpapi.Backend // with the largest table
	for i := range service.MaxMaglev / 400 {
		many = append(many, backendsOf(uint16(i), 2)...)
	}
	large := partsOf(service.MaglevSize(len(many)))
	var all []dpapi.Frontend
	for i := range usedParts / large {
		all = append(all, exposed(key(fmt.Sprintf("[2001:db8:7::b]:%d", i+1)), shops, many...))
	}
	if large < 2 || len(all)*large != usedParts {
		t.Fatalf("%d tables of %d parts, want all %d parts", len(all), large, usedParts)
	}
	if err := b.PutServices(all); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("too many slots: %v", err)
	}
	b.expectExposed(t, "too many slots", want)
	b.contents(t).expect(t, "too many slots", rest)
	all[0].FrontendKey = shop
	all = append(all, exposed(wiki, wikis)) // has no table
	if err := b.fits(all); err != nil {
		t.Errorf("in place of another: %v", err)
	}

	addresses := []dpapi.Frontend{exposed(shopTLS, shops)}
	for a := netip.MustParseAddr("2001:db8:8::"); len(addresses) < MaxAddresses; a = a.Next() {
		k := dpapi.FrontendKey{Address: netip.AddrPortFrom(a, 80), Protocol: 6}
		addresses = append(addresses, exposed(k, shops))
	}
	if err := b.fits(addresses); err != nil {
		t.Errorf("as many addresses as fit: %v", err)
	}
	if err := b.PutServices(append(addresses, exposed(wiki, wikis))); !errors.Is(err, endpoint.ErrExhausted) {
		t.Errorf("too many addresses: %v", err)
	}
	b.expectExposed(t, "too many addresses", want)
}

// TestExposedByAnother: an address and port that another tenant exposes next has nothing of the first one.
func TestExposedByAnother(t *testing.T) {
	b := newExposedBed(t)
	must(t, b.PutServices([]dpapi.Frontend{exposed(shop, shops, backendsOf(8080, 1)...)}))
	connection := bpfobj.PilasterNatKey{LocalPort: 80, Proto: 6}
	must(t, b.connectionsOf(t, shops).Put(connection, bpfobj.PilasterNatEntry{Port: 8080}))
	was := b.contents(t).Services[keyOf(shop)]
	// The same endpoints: only the tenant differs.
	must(t, b.PutServices([]dpapi.Frontend{exposed(shop, wikis, backendsOf(8080, 1)...)}))
	b.expectExposed(t, "another tenant", exposedContents{
		Addresses: map[string]uint32{"2001:db8:7::9": exposedAddress}, Targets: seenAt(8080, 1),
		Tenants: []uint32{wikis}, Parts: partsOf(service.MaglevSize(1)),
		Backends: map[string][]dpapi.Backend{shop.Address.String(): backendsOf(8080, 1)},
	})
	if is := b.contents(t).Services[keyOf(shop)]; is.Frontend == was.Frontend || is.Set == was.Set {
		t.Errorf("the other tenant's frontend %+v has numbers of %+v", is, was)
	}
	var has bpfobj.PilasterNatEntry
	if err := b.connectionsOf(t, wikis).Lookup(connection, &has); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("the other tenant has the connection %+v, %v", has, err)
	}
	must(t, b.DeleteServices([]dpapi.FrontendKey{shop}))
	b.expectExposed(t, "all are gone", exposedContents{
		Addresses: map[string]uint32{}, Backends: map[string][]dpapi.Backend{},
	})
}
