package announce

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/service"
)

func TestFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("secret\n")
	flags := func(change func(*Flags)) Flags {
		f := Flags{
			ASN: 65001, Peers: []string{"fd00::2=65002"}, RouterID: "192.0.2.1", NextHops: 16, Restart: time.Minute,
			PasswordFile: file,
		}
		change(&f)
		return f
	}
	c, err := flags(func(*Flags) {}).Config()
	if err != nil || len(c.Peers) != 1 || c.Peers[0].ASN != 65002 || c.Password != "secret" || c.NextHops != 16 {
		t.Errorf("config %+v, %v", c, err)
	}
	if c, err := (Flags{NextHops: 16, Restart: time.Minute}).Config(); err != nil || len(c.Peers) != 0 {
		t.Errorf("without peers: %+v, %v", c, err)
	}
	for words, change := range map[string]func(*Flags){
		"need --bgp-peer":                  func(f *Flags) { f.Peers = nil },
		"needs --bgp-asn":                  func(f *Flags) { f.ASN = 0 },
		"--bgp-next-hops must be 1 to 255": func(f *Flags) { f.NextHops = 256 },
		"must be 0s to 1h8m15s":            func(f *Flags) { f.Restart = 2 * time.Hour },
		`--bgp-peer "x" is not ADDRESS`:    func(f *Flags) { f.Peers = []string{"x"} },
		"is not an IPv4 address":           func(f *Flags) { f.RouterID = "fd00::1" },
		"no such file":                     func(f *Flags) { f.PasswordFile += "x" },
		"the password has 81 bytes":        func(f *Flags) { write(strings.Repeat("x", 81)) },
		"the password has 0 bytes":         func(f *Flags) { write("\n") },
	} {
		if _, err := flags(change).Config(); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("error %v, want %q", err, words)
		}
		write("secret\n")
	}
}

const external = "2001:db8:7::9"

// exposed is a tenant on n1, n2 and n3, with services at one address and their endpoints by node.
func exposed(services map[string]*pilasterv1.Service, endpoints map[string][]string) cache.Exposed {
	e := cache.Exposed{Tenant: "shop", Slices: map[service.Name][]*pilasterv1.EndpointSlice{}}
	for i, n := range []string{"n1", "n2", "n3"} {
		e.Nodes = append(e.Nodes, &pilasterv1.Node{Name: n, Prefix: fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)})
	}
	for name, s := range services {
		s.Name, s.Tenant = name, "shop"
		e.Services = append(e.Services, s)
		for _, node := range endpoints[name] {
			e.Slices[service.Name{Name: name}] = append(e.Slices[service.Name{Name: name}], &pilasterv1.EndpointSlice{
				Tenant: "shop", Service: name, Name: node + ".0", Node: node,
				Endpoints: []*pilasterv1.ServiceEndpoint{{Address: "fd70:696c:6100:1:0:100:500:7"}},
			})
		}
	}
	return e
}

func TestDerive(t *testing.T) {
	at := func(policy string) *pilasterv1.Service {
		return &pilasterv1.Service{ExternalIps: []string{external}, TrafficPolicy: policy}
	}
	for name, c := range map[string]struct {
		services  map[string]*pilasterv1.Service
		endpoints map[string][]string
		nodes     []string
		reason    string
	}{
		"cluster": {
			map[string]*pilasterv1.Service{"web": at("")}, map[string][]string{"web": {"n2"}},
			[]string{"n1", "n2", "n3"}, "",
		},
		"local": {
			map[string]*pilasterv1.Service{"web": at("Local")}, map[string][]string{"web": {"n2", "n3"}},
			[]string{"n2", "n3"}, "",
		},
		"a load-balancer address": {
			map[string]*pilasterv1.Service{"web": {LoadBalancer: true, LoadBalancerIp: external}},
			map[string][]string{"web": {"n1"}}, []string{"n1", "n2", "n3"}, "",
		},
		"no endpoint": {
			map[string]*pilasterv1.Service{"web": at("")}, nil, nil, whyNoEndpoint,
		},
		"one without an endpoint": {
			map[string]*pilasterv1.Service{"web": at("Local"), "dns": at("Local")}, map[string][]string{"web": {"n1"}},
			[]string{"n1"}, "",
		},
		"both": {
			map[string]*pilasterv1.Service{"web": at("Local"), "dns": at("Local")},
			map[string][]string{"web": {"n1", "n2"}, "dns": {"n2", "n3"}}, []string{"n2"}, "",
		},
		"none for both": {
			map[string]*pilasterv1.Service{"web": at("Local"), "dns": at("Local")},
			map[string][]string{"web": {"n1"}, "dns": {"n2"}}, nil, whyNoneForAll,
		},
	} {
		all := derive([]cache.Exposed{exposed(c.services, c.endpoints)})
		if len(all) != 1 || all[0].addr.String() != external {
			t.Errorf("%s: %+v", name, all)
			continue
		}
		var nodes []string
		for _, n := range all[0].candidates {
			nodes = append(nodes, n.Name)
		}
		slices.Sort(nodes)
		if !slices.Equal(nodes, c.nodes) || all[0].reason != c.reason {
			t.Errorf("%s: %v, %q, want %v, %q", name, nodes, all[0].reason, c.nodes, c.reason)
		}
	}
	is := exposed(map[string]*pilasterv1.Service{"web": at("")}, map[string][]string{"web": {"n1"}})
	if is.Nodes = nil; derive([]cache.Exposed{is})[0].reason != whyNoNode {
		t.Error("without nodes: another reason")
	}
}

// Addresses spread over nodes, and a node that goes changes the order of the others nowhere.
func TestRank(t *testing.T) {
	var nodes []candidate
	for i := range 20 {
		a := netip.MustParseAddr(fmt.Sprintf("fd70:696c:6100:%x::1", i+1))
		nodes = append(nodes, candidate{Node: Node{fmt.Sprint("n", i), a}})
	}
	const addresses = 2000
	first := map[string]int{}
	for i := range addresses {
		a := netip.MustParseAddr(fmt.Sprintf("2001:db8:7::%x", i))
		all := rank(a, nodes)
		first[all[0].Name]++
		without := slices.DeleteFunc(slices.Clone(all), func(n candidate) bool { return n == nodes[7] })
		if !slices.Equal(rank(a, without), without) {
			t.Fatalf("%v: without a node the order differs", a)
		}
	}
	for _, n := range nodes {
		if is, fair := first[n.Name], addresses/len(nodes); is < fair/2 || is > 2*fair {
			t.Errorf("%s is first for %d addresses, want about %d", n.Name, is, fair)
		}
	}
}

// A node that gets an address waits, and begins only while its agent has a session. One that was there at the start, or
// has begun, needs neither.
func TestNewNodesWait(t *testing.T) {
	c := &Control{config: Config{NextHops: 2}, speaker: &speaker{}}
	c.usable = func(netip.Addr) (usable, known bool) { return false, false }
	web := map[string]*pilasterv1.Service{"web": {ExternalIps: []string{external}}}
	e := exposed(web, map[string][]string{"web": {"n1"}})
	all := e.Nodes
	e.Live = map[string]bool{}
	begun := func() (names []string) {
		for _, n := range c.targets[0].candidates {
			if _, ok := c.since[route{c.targets[0].addr, n.Addr}]; ok {
				names = append(names, n.Name)
			}
		}
		slices.Sort(names)
		return names
	}
	now := time.Now()
	see := func(nodes []*pilasterv1.Node, want ...string) {
		t.Helper()
		e.Nodes = nodes
		c.targets = derive([]cache.Exposed{e})
		c.note(now)
		if is := begun(); !slices.Equal(is, want) {
			t.Errorf("%v have begun, want %v", is, want)
		}
	}
	see(all[:1], "n1")
	see(all[:2], "n1")
	e.Live["n2"] = true
	see(all[:2], "n1", "n2")
	e.Live["n2"] = false
	see(all[:2], "n1", "n2")
	if s := c.choose(c.targets[0], now); s.waits != settling || len(s.probed) != 1 || s.probed[0].Name != "n1" {
		t.Errorf("before n2 has settled: %+v", s)
	}
	if s := c.choose(c.targets[0], now.Add(settling)); s.waits != 0 || len(s.probed) != 2 {
		t.Errorf("after n2 has settled: %+v", s)
	}
}

// The first usable nodes are next hops, one more is probed, and dead or unknown ones take no place. A next hop stays
// until there are enough before it.
func TestChoose(t *testing.T) {
	var is target
	c := &Control{
		config: Config{NextHops: 2}, since: map[route]time.Time{}, speaker: &speaker{announced: map[route]bool{}},
	}
	type state struct{ usable, known bool }
	states := map[netip.Addr]state{}
	c.usable = func(a netip.Addr) (usable, known bool) { return states[a].usable, states[a].known }
	for i := range 9 {
		n := Node{fmt.Sprint("n", i), netip.MustParseAddr(fmt.Sprintf("fd70:696c:6100:%x::1", i+1))}
		is.candidates = append(is.candidates, candidate{Node: n})
		c.since[route{is.addr, n.Addr}] = time.Time{}
	}
	set := func(s state, nodes ...int) {
		for _, n := range nodes {
			states[is.candidates[n].Addr] = s
		}
	}
	names := func(nodes []Node) (all string) {
		for _, n := range nodes {
			all += n.Name
		}
		return all
	}
	want := func(hops, probed, reason string) {
		t.Helper()
		s := c.choose(is, time.Now())
		if names(s.is.Nodes) != hops || names(s.probed) != probed || s.is.Reason != reason {
			t.Errorf("next hops %s, probed %s, %q; want %s, %s, %q", names(s.is.Nodes), names(s.probed), s.is.Reason,
				hops, probed, reason)
		}
	}
	good, dead := state{known: true, usable: true}, state{known: true}
	want("", "n0n1n2", whySettling)
	set(dead, 0, 1, 2, 3, 4)
	want("", "n0n1n2n3n4n5n6n7", whySilent)
	set(good, 6, 7)
	want("n6n7", "n0n1n2n3n4n5n6n7", "")
	c.speaker.announced[route{is.addr, is.candidates[8].Addr}] = true
	set(good, 8)
	want("n6n7", "n0n1n2n3n4n5n6n7n8", "")
	set(state{}, 0, 1, 2, 3)
	want("n8", "n0n1n2n8", "")
}
