package evpnroutes

import (
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/evpn/speaker"
	"pilaster.io/pilaster/internal/orchestrator/cache"
)

// flags are complete ones; change changes them.
func flags(change func(*Flags)) Flags {
	f := Flags{
		ASN: 65001, Peers: []string{"10.9.0.2=65002", "[fd00::2]:1790"}, Pool: "10.1.0.0/24", RouterID: "10.9.0.1",
		VTEPs: []string{"10.2.0.0/24"}, Allow: []string{"shop=172.20.0.0/16", "shop=fd00:20::/32"},
		Stale: time.Minute, Limits: speaker.Limits{Routes: 10, Restart: time.Minute},
	}
	change(&f)
	return f
}

func TestFlags(t *testing.T) {
	c, err := flags(func(*Flags) {}).Config()
	if err != nil {
		t.Fatal(err)
	}
	want := []bgp.Peer{
		{Addr: netip.MustParseAddr("10.9.0.2"), ASN: 65002},
		{Addr: netip.MustParseAddr("fd00::2"), ASN: 65001, Port: 1790},
	}
	if !reflect.DeepEqual(c.Peers, want) || len(c.Allow["shop"]) != 2 ||
		!reflect.DeepEqual(c.asns(), []uint32{65001, 65002}) {
		t.Errorf("config: %+v", c)
	}
	if c, err := (Flags{}).Config(); err != nil || len(c.Peers) != 0 {
		t.Errorf("without flags: %+v, %v", c, err)
	}
	for words, change := range map[string]func(*Flags){
		"is not ADDRESS":                  func(f *Flags) { f.Peers[0] = "router" },
		"is not the number of an AS":      func(f *Flags) { f.Peers[0] = "10.9.0.2=AS1" },
		"is there twice":                  func(f *Flags) { f.Peers[0] = "fd00::2" },
		"need --evpn-peer":                func(f *Flags) { f.Peers = nil },
		"needs --evpn-asn":                func(f *Flags) { f.ASN = 0 },
		"needs --evpn-vtep-pool":          func(f *Flags) { f.Pool = "" },
		"no room for nodes":               func(f *Flags) { f.Pool = "10.1.0.0/31" },
		"is not an IPv4 prefix":           func(f *Flags) { f.Pool = "fd00::/64" },
		"has host bits":                   func(f *Flags) { f.VTEPs[0] = "10.2.0.1/24" },
		"overlaps --evpn-vtep-pool":       func(f *Flags) { f.VTEPs[0] = "10.0.0.0/8" },
		"is not TENANT=PREFIX":            func(f *Flags) { f.Allow[0] = "172.20.0.0/16" },
		"is not a prefix such as":         func(f *Flags) { f.Allow[0] = "shop=172.20.0.0" },
		"is not an IPv4 address":          func(f *Flags) { f.RouterID = "fd00::1" },
		"--evpn-stale":                    func(f *Flags) { f.Stale = -1 },
		"--evpn-max-routes must be":       func(f *Flags) { f.Limits.Routes = 0 },
		"--evpn-restart must be at least": func(f *Flags) { f.Limits.Restart = 0 },
	} {
		if _, err := flags(change).Config(); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("error %v, want %q", err, words)
		}
	}
}

// placements are a tenant with addresses given one by one, one with subnets, and one with a high id.
func placements() []cache.Placement {
	n1 := &pilasterv1.Node{Name: "n1", Prefix: "fd70:696c:6100:1::/64"}
	n2 := &pilasterv1.Node{Name: "n2", Prefix: "fd70:696c:6100:2::/64"}
	far := &pilasterv1.Node{Name: "far", Prefix: "fd70:696c:6100:ffff::/64"}
	mapping := func(node, to, key string) *pilasterv1.Mapping {
		return &pilasterv1.Mapping{Name: node, To: to, Key: key, Tenant: "shop"}
	}
	moved := mapping("n2", "10.0.0.8/32", "c3")
	moved.Sequence, moved.Mac = 5, "02:00:00:00:01:08"
	foreign := mapping("n1", "10.0.0.9/32", "")
	foreign.Origin = "bgp"
	return []cache.Placement{{
		Tenant: &pilasterv1.Tenant{
			Name: "bank", Ids: []*pilasterv1.TenantId{{Id: 8}},
			Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: 24}},
		},
		Nodes: []*pilasterv1.Node{n1}, Mappings: []*pilasterv1.Mapping{mapping("n1", "10.0.3.0/24", "")},
	}, {
		Tenant: &pilasterv1.Tenant{
			Name: "shop", Ids: []*pilasterv1.TenantId{{Id: 7}},
			Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}, {Cidr: "fd00:a::/64"}},
		},
		Nodes: []*pilasterv1.Node{n2, n1, far},
		Mappings: []*pilasterv1.Mapping{
			mapping("n1", "fd00:a::7/128", "c1"), mapping("n1", "10.0.0.6/32", "c1"),
			mapping("n2", "10.0.0.7/32", "c1"), moved, foreign, mapping("far", "10.0.0.10/32", "c4"),
		},
	}, {
		Tenant: &pilasterv1.Tenant{Name: "wide", Ids: []*pilasterv1.TenantId{{Id: 70_000}}},
	}}
}

func TestDerive(t *testing.T) {
	c, err := flags(func(*Flags) {}).Config()
	if err != nil {
		t.Fatal(err)
	}
	plan := address.DefaultPlan()
	d := derive(plan, c, placements())
	routes := evpn.Routes(c.ASN, d.own)
	kinds := map[evpn.Kind]int{}
	for _, r := range routes {
		kinds[r.Kind]++
	}
	// Of shop: two nodes; a container with two addresses, and two with one; of bank: a node and its subnet.
	if kinds[evpn.KindMulticast] != 3 || kinds[evpn.KindMACIP] != 4 || kinds[evpn.KindPrefix] != 1 {
		t.Errorf("routes: %v", kinds)
	}
	if len(d.skipped) != 2 || d.skipped["tenant wide"] == "" || d.skipped["node far"] == "" {
		t.Errorf("skipped: %v", d.skipped)
	}
	shop := d.own[1]
	if shop.Tenant.Number != 7 || shop.Tenant.L3VNI != 7 || shop.Tenant.VNI != 7|1<<23 || len(shop.Tenant.Allow) != 2 {
		t.Errorf("tenant: %+v", shop.Tenant)
	}
	first := shop.Containers[0]
	if first.MAC != evpn.ContainerMAC(netip.MustParseAddr("10.0.0.6")) || len(first.Addrs) != 2 ||
		first.Node.VTEP.String() != "10.1.0.1" {
		t.Errorf("container with two addresses: %+v", first)
	}
	if last := shop.Containers[2]; last.MAC.String() != "02:00:00:00:01:08" || last.Sequence != 5 {
		t.Errorf("moved container: %+v", last)
	}
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		shuffled := placements()
		for _, p := range shuffled {
			random.Shuffle(len(p.Nodes), func(i, j int) { p.Nodes[i], p.Nodes[j] = p.Nodes[j], p.Nodes[i] })
			random.Shuffle(len(p.Mappings), func(i, j int) {
				p.Mappings[i], p.Mappings[j] = p.Mappings[j], p.Mappings[i]
			})
		}
		if got := derive(plan, c, shuffled); !reflect.DeepEqual(got.own, d.own) {
			t.Fatalf("seed %d: %+v, not %+v", seed, got.own, d.own)
		}
	}
}

// A container whose sequence was raised just now is left out, and no other is.
func TestWithoutRaised(t *testing.T) {
	c, err := flags(func(*Flags) {}).Config()
	if err != nil {
		t.Fatal(err)
	}
	d := derive(address.DefaultPlan(), c, placements())
	before := evpn.Routes(c.ASN, d.own)
	d.without(map[string]bool{"shop 10.0.0.8/32": true, "bank 10.0.0.6/32": true})
	after := evpn.Routes(c.ASN, d.own)
	gone := slices.DeleteFunc(before, func(r evpn.Route) bool { return slices.ContainsFunc(after, r.Equal) })
	if len(gone) != 1 || gone[0].Prefix.String() != "10.0.0.8/32" || d.names()["shop 10.0.0.8/32"] {
		t.Errorf("left out: %+v; names %v", gone, d.names())
	}
}

func TestVTEPsAreDistinct(t *testing.T) {
	pool := netip.MustParsePrefix("10.1.0.0/28")
	seen := map[netip.Addr]bool{}
	for n := range uint64(20) {
		a, ok := evpn.VTEP(pool, n)
		if ok != (n >= 1 && n <= 14) || ok && (seen[a] || !pool.Contains(a)) {
			t.Errorf("node %d: %v, %v", n, a, ok)
		}
		seen[a] = true
	}
}

// The CLI reads what the orchestrator writes.
func TestStatusAsJSON(t *testing.T) {
	s := Status{Pool: netip.MustParsePrefix("10.1.0.0/24"), Skipped: map[string]string{"node far": "why"}}
	s.Status = speaker.Status{
		ASN: 65001, RouterID: netip.MustParseAddr("10.9.0.1"), Announced: map[evpn.Kind]int{evpn.KindMACIP: 2},
		Records:   map[evpn.RecordKind]int{evpn.RecordHost: 3},
		Contested: []evpn.RecordKey{{Kind: evpn.RecordMAC, VNI: 7, MAC: evpn.MAC{2, 1}}},
		Peers: []speaker.PeerStatus{{
			Peer:  bgp.Peer{Addr: netip.MustParseAddr("10.9.0.2"), ASN: 65002},
			Since: time.Unix(1_800_000_000, 0).UTC(), Reason: "lost", Flaps: 2,
			PeerCount: evpn.PeerCount{
				Routes: 9, Size: 900, Accepted: map[evpn.Kind]int{evpn.KindPrefix: 1},
				Refused: map[evpn.Reason]int{evpn.UnknownTarget: 8},
			},
		}},
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var got Status
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, s) {
		t.Errorf("%s\nread as %+v", text, got)
	}
	if !strings.Contains(string(text), `"refused":{"target":8}`) {
		t.Errorf("JSON %s", text)
	}
}

func TestMapping(t *testing.T) {
	r := evpn.Record{
		RecordKey: evpn.RecordKey{Kind: evpn.RecordHost, VNI: 7, Prefix: netip.MustParsePrefix("10.0.2.7/32")},
		Tenant:    "shop", VTEP: netip.MustParseAddr("10.2.0.7"), HostMAC: evpn.MAC{2, 1},
		RouterMAC: evpn.MAC{2, 2}, Sequence: 4,
	}
	own := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	m := Mapping(r, own)
	if m.Tenant != "shop" || m.To != "10.0.2.7/32" || m.NextHops[0] != "10.2.0.7" || m.Mac != "02:01:00:00:00:00" ||
		m.Sequence != 4 || m.Origin != Origin {
		t.Errorf("host: %v", m)
	}
	if m := Mapping(r, nil); m != nil {
		t.Errorf("host of another subnet without an L3 VNI: %v", m)
	}
	r.L3VNI = 8
	if m := Mapping(r, nil); m.Mac != "02:02:00:00:00:00" {
		t.Errorf("host of another subnet: %v", m)
	}
	r.Kind = evpn.RecordPrefix
	if m := Mapping(r, own); m.Mac != "02:02:00:00:00:00" {
		t.Errorf("prefix: %v", m)
	}
	r.Kind = evpn.RecordMAC
	if m := Mapping(r, own); m != nil {
		t.Errorf("MAC: %v", m)
	}
}

// The VTEPs of a tenant's segment are the next hops of one mapping.
func TestMappingOfMembers(t *testing.T) {
	member := func(name, vtep string) evpn.Record {
		a := netip.MustParseAddr(vtep)
		key := evpn.RecordKey{Kind: evpn.RecordMember, VNI: 7, Prefix: evpn.HostPrefix(a)}
		return evpn.Record{RecordKey: key, Tenant: name, VTEP: a}
	}
	tenants := []cache.Placement{{Tenant: &pilasterv1.Tenant{Name: "shop"}}}
	records := []evpn.Record{member("shop", "10.2.0.7"), member("shop", "10.2.0.8"), member("gone", "10.2.0.9")}
	all := wantedImports(records, tenants)
	m := all[mappingName{"shop", "255.255.255.255/32"}]
	if len(all) != 1 || m == nil || !slices.Equal(m.NextHops, []string{"10.2.0.7", "10.2.0.8"}) || m.Origin != Origin {
		t.Errorf("mappings %v", all)
	}
}

// The store gets what is new or different, and loses what is gone; allocations of the cluster stay.
func TestImportChanges(t *testing.T) {
	mapping := func(to, hop, origin string) *pilasterv1.Mapping {
		return &pilasterv1.Mapping{Tenant: "shop", To: to, NextHops: []string{hop}, Origin: origin}
	}
	is := []cache.Placement{{
		Tenant: &pilasterv1.Tenant{Name: "shop"},
		Mappings: []*pilasterv1.Mapping{
			mapping("10.0.0.2/32", "", ""), mapping("10.0.0.3/32", "10.2.0.7", Origin),
			mapping("10.0.0.4/32", "10.2.0.7", Origin), mapping("10.0.0.5/32", "10.2.0.7", Origin),
		},
	}}
	wanted := map[mappingName]*pilasterv1.Mapping{}
	for _, m := range []*pilasterv1.Mapping{
		mapping("10.0.0.2/32", "10.2.0.7", Origin), mapping("10.0.0.3/32", "10.2.0.7", Origin),
		mapping("10.0.0.4/32", "10.2.0.8", Origin), mapping("10.0.0.6/32", "10.2.0.7", Origin),
	} {
		wanted[nameOf(m)] = m
	}
	put, remove := importChanges(is, wanted)
	if len(put) != 2 || put[0].To != "10.0.0.4/32" || put[0].NextHops[0] != "10.2.0.8" || put[1].To != "10.0.0.6/32" {
		t.Errorf("put %v", put)
	}
	if len(remove) != 1 || remove[0].To != "10.0.0.5/32" {
		t.Errorf("removed %v", remove)
	}
}
