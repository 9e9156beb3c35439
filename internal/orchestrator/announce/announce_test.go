package announce

import (
	"fmt"
	"log/slog"
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
	var nodes []Node
	for i := range 20 {
		nodes = append(nodes, Node{fmt.Sprint("n", i), netip.MustParseAddr(fmt.Sprintf("fd70:696c:6100:%x::1", i+1))})
	}
	const addresses = 2000
	first := map[string]int{}
	for i := range addresses {
		a := netip.MustParseAddr(fmt.Sprintf("2001:db8:7::%x", i))
		all := rank(a, nodes)
		first[all[0].Name]++
		without := slices.DeleteFunc(slices.Clone(all), func(n Node) bool { return n == nodes[7] })
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

// A node that does not answer is not usable, unless none answers: then the fault may be this machine's.
func TestProber(t *testing.T) {
	p, err := newProber(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	go p.run()
	here, dead := netip.IPv6Loopback(), netip.MustParseAddr("2001:db8:dead::1")
	rounds := func(n int) {
		for range n {
			_, next := p.round()
			time.Sleep(next / 4)
		}
	}
	want := func(a netip.Addr, usable, known bool) {
		t.Helper()
		if u, k := p.usable(a); u != usable || k != known {
			t.Errorf("%v: usable %v, known %v, want %v, %v", a, u, k, usable, known)
		}
	}
	p.watch(map[netip.Addr]string{here: "n1", dead: "n2"})
	want(here, false, false)
	rounds(2)
	want(here, true, true)
	want(dead, false, false)
	rounds(deadAfter)
	want(here, true, true)
	want(dead, false, true)
	p.watch(map[netip.Addr]string{dead: "n2"})
	rounds(deadAfter + 1)
	want(dead, false, true) // it stays as it is
	other := netip.MustParseAddr("2001:db8:dead::2")
	p.watch(map[netip.Addr]string{other: "n3"})
	rounds(deadAfter + 1)
	want(other, true, true)
}

// A node that begins to host a tenant waits, those that were there at the start do not.
func TestNewHostsWait(t *testing.T) {
	c := &Control{}
	e := exposed(nil, nil)
	now := time.Now()
	first := e
	first.Nodes = e.Nodes[:2]
	if left := c.waits([]cache.Exposed{first}, now); len(left) != 0 {
		t.Errorf("at the start: %v", left)
	}
	n3 := hosting{"shop", "n3"}
	if left := c.waits([]cache.Exposed{e}, now); len(left) != 1 || left[n3] != settling {
		t.Errorf("a new node: %v", left)
	}
	if left := c.waits([]cache.Exposed{e}, now.Add(settling-1)); left[n3] != 1 {
		t.Errorf("before the end: %v", left)
	}
	if left := c.waits([]cache.Exposed{e}, now.Add(settling)); len(left) != 0 {
		t.Errorf("at the end: %v", left)
	}
}
