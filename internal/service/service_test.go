package service

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

// sliceOf returns a slice from words: "NODE/ZONE" and endpoints by their last byte, with - for one that is not ready
// and ! for a terminating one. A node with "?" does not answer.
func sliceOf(words string) Slice {
	fields := strings.Fields(words)
	at, lost := strings.CutSuffix(fields[0], "?")
	s := Slice{Unreachable: lost}
	s.Node, s.Zone, _ = strings.Cut(at, "/")
	for _, f := range fields[1:] {
		s.Endpoints = append(s.Endpoints, Endpoint{
			Address:  netip.MustParseAddr("fd70::" + strings.Trim(f, "-!")),
			NotReady: strings.Contains(f, "-"), Terminating: strings.Contains(f, "!"),
		})
	}
	return s
}

func text(all []Placed) string {
	var words []string
	for _, p := range all {
		word := strings.TrimPrefix(p.Address.String(), "fd70::")
		if p.Why != "" {
			word += " " + p.Why
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

func TestSelect(t *testing.T) {
	for _, c := range []struct {
		name                       string
		service                    Service
		slices                     []string
		active, draining, excluded string
	}{
		{"no slices", Service{}, nil, "", "", ""},
		{"ready", Service{}, []string{"n1/z1 1 2", "n2/z2 3"}, "1, 2, 3", "", ""},
		{"not ready", Service{}, []string{"n1/z1 1- 2"}, "2", "1 not ready", ""},
		{"none ready", Service{}, []string{"n1/z1 1-"}, "", "1 not ready", ""},
		{"published", Service{PublishNotReady: true}, []string{"n1/z1 1- 2"}, "1, 2", "", ""},
		{"terminating", Service{}, []string{"n1/z1 1! 2"}, "2", "1 terminating", ""},
		{"all terminating", Service{}, []string{"n1/z1 1! 2!-", "n2/z1 3-"}, "1",
			"2 terminating, not ready, 3 not ready", ""},
		{"all terminating, published", Service{PublishNotReady: true}, []string{"n1/z1 1! 2!-"}, "1, 2", "", ""},
		{"unreachable", Service{}, []string{"n1/z1? 1 2! 4-", "n2/z1 3"}, "3",
			"4 not ready, 1 its node does not answer, 2 its node does not answer", ""},
		{"all unreachable", Service{}, []string{"n1/z1? 1 4-", "n2/z1? 3", "n2/z1 5-"}, "1, 3",
			"4 not ready, 5 not ready", ""},
		{"terminating or unreachable", Service{}, []string{"n1/z1? 1", "n2/z1 3!"}, "3",
			"1 its node does not answer", ""},
		{"in two slices", Service{}, []string{"n1/z1 1", "/ 1 2"}, "1, 2", "", "1 in another slice, too"},
		{"same node", Service{Distribution: PreferSameNode}, []string{"n1/z1 1", "n2/z1 2"}, "1",
			"2 on another node", ""},
		{"same node, not ready there", Service{Distribution: PreferSameNode}, []string{"n1/z1 1-", "n2/z1 2"}, "2",
			"1 not ready", ""},
		{"same node, terminating there", Service{Distribution: PreferSameNode}, []string{"n1/z1 1!", "n2/z1 2"}, "2",
			"1 terminating", ""},
		{"same node, all terminating", Service{Distribution: PreferSameNode}, []string{"n1/z1 1!", "n2/z1 2!"}, "1",
			"2 on another node", ""},
		{"same zone", Service{Distribution: PreferSameZone}, []string{"n3/z1 1", "n2/z2 2"}, "1",
			"2 in another zone", ""},
		{"same zone, none there", Service{Distribution: PreferSameZone}, []string{"n3/ 1", "n2/z2 2"}, "1, 2", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var all []Slice
			for _, words := range c.slices {
				all = append(all, sliceOf(words))
			}
			got := Select(c.service, all, "n1", "z1")
			if text(got.Active) != c.active || text(got.Draining) != c.draining || text(got.Excluded) != c.excluded {
				t.Errorf("active %s; draining %s; excluded %s\nwant %s; %s; %s", text(got.Active), text(got.Draining),
					text(got.Excluded), c.active, c.draining, c.excluded)
			}
		})
	}
	// A client whose zone is not known has all endpoints.
	some := []Slice{sliceOf("n1/ 1"), sliceOf("n2/z2 2")}
	if got := Select(Service{Distribution: PreferSameZone}, some, "n9", ""); text(got.Active) != "1, 2" {
		t.Errorf("without a zone: %s, want both", text(got.Active))
	}
	prefers := Service{Distribution: PreferSameNode}
	if ready, all := Ready(prefers, []Slice{sliceOf("n1/z 1 2! 3-"), sliceOf("n2/z? 4")}); ready != 1 || all != 4 {
		t.Errorf("%d of %d are ready, want 1 of 4", ready, all)
	}
	if ready, all := Ready(Service{}, []Slice{sliceOf("n1/z? 1")}); ready != 0 || all != 1 {
		t.Errorf("%d of %d are ready on a node that does not answer, want 0 of 1", ready, all)
	}
	if ready, all := Ready(Service{}, []Slice{sliceOf("n1/z 1!")}); ready != 0 || all != 1 {
		t.Errorf("%d of %d are ready, want 0 of 1", ready, all)
	}
}

// TestSelectExposed: the distribution has no effect on hosts outside. With policy Local they get what is on the node.
func TestSelectExposed(t *testing.T) {
	for _, c := range []struct {
		policy           TrafficPolicy
		slices           []string
		active, draining string
	}{
		{Cluster, []string{"n1/z1 1", "n2/z2 2", "/ 3"}, "1, 2, 3", ""},
		{Cluster, []string{"n1/z1 1!", "n2/z2 2"}, "2", "1 terminating"},
		{Local, []string{"/ 1 3", "n1/z1 1 4!", "n2/z2 2 5!"}, "1", "4 terminating"},
		{Local, []string{"n1/z1 1! 4-", "n2/z2 2"}, "1", "4 not ready"},
		{Local, []string{"n2/z2 2"}, "", ""},
	} {
		var all []Slice
		for _, words := range c.slices {
			all = append(all, sliceOf(words))
		}
		got := SelectExposed(Service{Distribution: PreferSameNode, TrafficPolicy: c.policy}, all, "n1")
		if text(got.Active) != c.active || text(got.Draining) != c.draining {
			t.Errorf("%v, %v: active %s; draining %s\nwant %s; %s", c.policy, c.slices, text(got.Active),
				text(got.Draining), c.active, c.draining)
		}
	}
}

// web is a valid service.
func web() Service {
	return Service{
		Name: Name{"shop", "web"}, Address: netip.MustParseAddr("fd70:696c:7300:1::1"),
		Ports:    []Port{{"http", TCP, 80, 8080, 30080}, {"dns", UDP, 80, 53, 30080}},
		Selector: map[string]string{"app": "web"}, Affinity: time.Hour, Distribution: PreferSameZone,
		ExternalIPs: []netip.Addr{netip.MustParseAddr("2001:db8:7::9"), netip.MustParseAddr("fd12::9")},
		NodePorts:   true, TrafficPolicy: Local, LoadBalancer: true,
		LoadBalancerIP: netip.MustParseAddr("2001:db8:8::7"),
	}
}

func TestCheck(t *testing.T) {
	if err := web().Check(); err != nil {
		t.Fatal(err)
	}
	many := make([]Port, MaxPorts+1)
	for i := range many {
		many[i] = Port{fmt.Sprint("p", i), TCP, uint16(i + 1), 1, 0}
	}
	for says, change := range map[string]func(*Service){
		`service name "Web"`:            func(s *Service) { s.Name.Name = "Web" },
		`service name ""`:               func(s *Service) { s.Name.Name = "" },
		`namespace "a/b"`:               func(s *Service) { s.Namespace = "a/b" },
		"headless, so it has no":        func(s *Service) { s.Headless = true },
		"no port":                       func(s *Service) { s.Ports = nil },
		"has 65 ports":                  func(s *Service) { s.Ports = many },
		"192.0.2.1 is not an IPv6":      func(s *Service) { s.Address = netip.MustParseAddr("192.0.2.1") },
		"fe80::1%eth0 is not an IPv6":   func(s *Service) { s.Address = netip.MustParseAddr("fe80::1%eth0") },
		"affinity of 24h0m1s":           func(s *Service) { s.Affinity = MaxAffinity + time.Second },
		"affinity of 1ms":               func(s *Service) { s.Affinity = time.Millisecond },
		`distribution "Near"`:           func(s *Service) { s.Distribution = "Near" },
		"port 0/UDP with target 53":     func(s *Service) { s.Ports[1].Port = 0 },
		"port 80/TCP with target 0":     func(s *Service) { s.Ports[0].Target = 0 },
		"port 80/UDP has no name":       func(s *Service) { s.Ports[1].Name = "" },
		`name "Dns": 1 to 63`:           func(s *Service) { s.Ports[1].Name = "Dns" },
		`two ports with the name "dns"`: func(s *Service) { s.Ports[0].Name = "dns" },
		"has port 80/TCP twice":         func(s *Service) { s.Ports[1].Protocol = TCP },
		"its own namespace":             func(s *Service) { s.Selector["io.kubernetes.pod.namespace"] = "x" },
		`label key "a b"`:               func(s *Service) { s.Selector["a b"] = "x" },
		`traffic policy "Near"`:         func(s *Service) { s.TrafficPolicy = "Near" },
		"so hosts outside of the cluster cannot": func(s *Service) {
			s.Headless, s.Address = true, netip.Addr{}
		},
		"policy Local is for hosts outside": func(s *Service) {
			s.ExternalIPs, s.NodePorts, s.Ports = nil, false, []Port{{"", TCP, 80, 80, 0}}
			s.LoadBalancer, s.LoadBalancerIP = false, netip.Addr{}
		},
		"has 9 external addresses":      func(s *Service) { s.ExternalIPs = make([]netip.Addr, MaxExternalIPs+1) },
		"fd12::9 twice":                 func(s *Service) { s.ExternalIPs[0] = s.ExternalIPs[1] },
		"192.0.2.1 is not a global":     func(s *Service) { s.ExternalIPs[0] = netip.MustParseAddr("192.0.2.1") },
		"fe80::1 is not a global":       func(s *Service) { s.ExternalIPs[0] = netip.MustParseAddr("fe80::1") },
		"ff0e::1 is not a global":       func(s *Service) { s.ExternalIPs[0] = netip.MustParseAddr("ff0e::1") },
		"fe80::1%eth0 is not a global":  func(s *Service) { s.ExternalIPs[0] = netip.MustParseAddr("fe80::1%eth0") },
		"2001:db8:8::7 and no load":     func(s *Service) { s.LoadBalancer = false },
		"load-balancer address ff0e::1": func(s *Service) { s.LoadBalancerIP = netip.MustParseAddr("ff0e::1") },
		"the service has no node ports": func(s *Service) { s.NodePorts = false },
		"with node port 29999: node":    func(s *Service) { s.Ports[0].NodePort = FirstNodePort - 1 },
		"with node port 32768: node":    func(s *Service) { s.Ports[0].NodePort = LastNodePort + 1 },
		"has node port 30080/TCP twice": func(s *Service) { s.Ports[1] = Port{"dns", TCP, 53, 53, 30080} },
	} {
		s := web()
		if change(&s); s.Check() == nil || !strings.Contains(s.Check().Error(), says) {
			t.Errorf("%v, want %s", s.Check(), says)
		}
	}
	headless := Service{Name: Name{Name: "web"}, Headless: true}
	if err := headless.Check(); err != nil {
		t.Error(err)
	}
}

func TestCheckSlice(t *testing.T) {
	fixed := func() Slice {
		return Slice{Service: Name{"shop", "web"}, Name: "fixed", Endpoints: sliceOf("/ 1 2").Endpoints}
	}
	if err := fixed().Check(); err != nil {
		t.Error(err)
	}
	for says, change := range map[string]func(*Slice){
		`service name "x/y"`:             func(s *Slice) { s.Service.Name = "x/y" },
		`name of fixed endpoints "n1.0"`: func(s *Slice) { s.Name = "n1.0" },
		"with names n1.0":                func(s *Slice) { s.Node = "n1" },
		"1001 endpoints":                 func(s *Slice) { s.Endpoints = make([]Endpoint, 1001) },
		"invalid IP is not an IPv6":      func(s *Slice) { s.Endpoints[0].Address = netip.Addr{} },
		"fd70::1 is there twice":         func(s *Slice) { s.Endpoints[1].Address = s.Endpoints[0].Address },
		`name "a b"`:                     func(s *Slice) { s.Endpoints[1].Name = "a b" },
	} {
		s := fixed()
		if change(&s); s.Check() == nil || !strings.Contains(s.Check().Error(), says) {
			t.Errorf("%v, want %s", s.Check(), says)
		}
	}
	for name, node := range map[string]string{
		"n1.0": "n1", "n1.17": "n1", "a.b.3": "a.b", "n1": "", "n1.": "", ".0": "", "n1.x": "", "n1.00000": "",
	} {
		for _, n := range []string{"n1", "a.b", "n", "n2", "a"} {
			if got := (Slice{Name: name}).IsOf(n); got != (n == node) {
				t.Errorf("%s is of %s: %v", name, n, got)
			}
		}
	}
}

func TestCheckPool(t *testing.T) {
	for text, says := range map[string]string{
		"2001:db8::/64": "", "2001:db8::7/128": "", "2001:db8::/63": "pools are /64 to /128", "10.0.0.0/24": "no",
		"2001:db8::1/112": "write 2001:db8::/112", "ff0e::/64": "is not a prefix", "::ffff:10.0.0.0/120": "is not",
	} {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := CheckPool(p); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", text, err, says)
		}
	}
	if CheckPool(netip.Prefix{}) == nil {
		t.Error("no prefix was accepted")
	}
}

// TestOutside: an address counts once.
func TestOutside(t *testing.T) {
	s := web()
	if got := fmt.Sprint(s.Outside()); got != "[2001:db8:8::7 2001:db8:7::9 fd12::9]" {
		t.Error(got)
	}
	s.LoadBalancerIP = s.ExternalIPs[1]
	if got := fmt.Sprint(s.Outside()); got != "[2001:db8:7::9 fd12::9]" {
		t.Error(got)
	}
}

func TestProto(t *testing.T) {
	s := web()
	s.Tenant, s.Created, s.PublishNotReady = "blue", time.Unix(1, 0).UTC(), true
	if got, err := FromProto(s.Proto()); err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%+v, %v, want %+v", got, err, s)
	}
	in := sliceOf("n1/z1 1 2- 3!")
	in.Tenant, in.Service, in.Name, in.Unreachable, in.Endpoints[0].Name = "blue", s.Name, "n1.0", true, "web-1"
	if got, err := SliceFromProto(in.Proto()); err != nil || !reflect.DeepEqual(got, in) {
		t.Errorf("%+v, %v, want %+v", got, err, in)
	}
	m := s.Proto()
	m.Ports[0].Target, m.Ports[0].Protocol = 0, ""
	if got, err := FromProto(m); err != nil || got.Ports[0] != (Port{"http", TCP, 80, 80, 30080}) {
		t.Errorf("defaults of a port: %+v, %v", got.Ports, err)
	}
	for _, n := range []Name{{"", "web"}, {"shop", "web"}} {
		if got := ParseName(n.String()); got != n {
			t.Errorf("%q is %+v, want %+v", n.String(), got, n)
		}
	}
	m.Ports[0].Port = 1<<16 + 80
	if _, err := FromProto(m); err == nil {
		t.Error("port 65616 was accepted")
	}
	m.Ports[0].Port, m.Ports[0].NodePort = 80, 1<<16+30080
	if _, err := FromProto(m); err == nil {
		t.Error("node port 95616 was accepted")
	}
	m.Ports[0].NodePort, m.ExternalIps = 0, []string{"x"}
	if _, err := FromProto(m); err == nil {
		t.Error("external address x was accepted")
	}
	m.ExternalIps, m.LoadBalancerIp = nil, "x"
	if _, err := FromProto(m); err == nil {
		t.Error("load-balancer address x was accepted")
	}
	m.LoadBalancerIp, m.Address = "", "x"
	if _, err := FromProto(m); err == nil {
		t.Error("address x was accepted")
	}
	m.Address, m.Ports[0].Protocol = "", "SCTP"
	if _, err := FromProto(m); err == nil {
		t.Error("protocol SCTP was accepted")
	}
}
