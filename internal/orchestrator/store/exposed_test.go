package store_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
)

// exposed returns a service by its name and words: external addresses, and ports as "PORT" or "PORT=NODEPORT", which is
// 0 for any; "balanced" for a load balancer, or "balancedADDRESS".
func exposed(name string, words ...string) service.Service {
	s := service.Service{Name: service.ParseName(name)}
	for _, word := range words {
		if text, is := strings.CutPrefix(word, "balanced"); is { // "balanced", or "balancedADDRESS"
			s.LoadBalancer = true
			s.LoadBalancerIP, _ = netip.ParseAddr(text)
			continue
		}
		if a, err := netip.ParseAddr(word); err == nil {
			s.ExternalIPs = append(s.ExternalIPs, a)
			continue
		}
		p := service.Port{Name: "p" + strings.Split(word, "=")[0], Protocol: service.TCP}
		if n, _ := fmt.Sscanf(word, "%d=%d", &p.Port, &p.NodePort); n == 2 {
			s.NodePorts = true
		}
		p.Target = p.Port
		s.Ports = append(s.Ports, p)
	}
	return s
}

// claims returns the claims for hosts outside of the cluster.
func claims(t *testing.T, etcd *clientv3.Client) string {
	t.Helper()
	var all []string
	for _, dir := range []string{"external-addresses/", "node-ports/"} {
		for _, key := range slices.Sorted(maps.Keys(revisions(t, etcd, dir))) {
			resp, err := etcd.Get(t.Context(), "/pilaster/1/"+dir+key)
			if err != nil || len(resp.Kvs) != 1 {
				t.Fatal(resp, err)
			}
			all = append(all, key+" "+string(resp.Kvs[0].Value))
		}
	}
	return strings.Join(all, "; ")
}

// testExposed: external addresses and node ports belong to one service until it drops them.
func testExposed(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
	}
	const a, b = "2001:db8:7::a", "2001:db8:7::b"
	of := func(all ...service.Service) []service.Service { return all }
	for i, c := range []struct {
		tenant   string
		services []service.Service
		actions  string // first letters
		claims   string
	}{
		{"blue", of(exposed("web", "80=30080", a)), "cr", a + ` {"tenant":"blue","ports":{"80/TCP":"web"}}; ` +
			`TCP/30080 blue web`},
		{"blue", of(exposed("web", "80=30080", a)), "un", a + ` {"tenant":"blue","ports":{"80/TCP":"web"}}; ` +
			`TCP/30080 blue web`},
		{"blue", of(exposed("web", "80=0", a), exposed("shop/tls", "443", a, b)), "un cr",
			a + ` {"tenant":"blue","ports":{"443/TCP":"shop/tls","80/TCP":"web"}}; ` +
				b + ` {"tenant":"blue","ports":{"443/TCP":"shop/tls"}}; TCP/30080 blue web`},
		// Two services swap ports of an address and a node port.
		{"blue", of(exposed("web", "443=30443", a), exposed("shop/tls", "80=30080", a)), "co co",
			a + ` {"tenant":"blue","ports":{"443/TCP":"web","80/TCP":"shop/tls"}}; ` +
				`TCP/30080 blue shop/tls; TCP/30443 blue web`},
		{"red", of(exposed("web", "80=30081", b)), "cr",
			a + ` {"tenant":"blue","ports":{"443/TCP":"web","80/TCP":"shop/tls"}}; ` +
				b + ` {"tenant":"red","ports":{"80/TCP":"web"}}; ` +
				`TCP/30080 blue shop/tls; TCP/30081 red web; TCP/30443 blue web`},
		{"blue", of(exposed("web", "443"), exposed("shop/tls", "80")), "co co",
			b + ` {"tenant":"red","ports":{"80/TCP":"web"}}; TCP/30081 red web`},
		{"red", of(exposed("other", "80=30080", a)), "cr", a + ` {"tenant":"red","ports":{"80/TCP":"other"}}; ` +
			b + ` {"tenant":"red","ports":{"80/TCP":"web"}}; TCP/30080 red other; TCP/30081 red web`},
	} {
		applied, err := s.ApplyServices(ctx, c.tenant, c.services, nil, store.ApplyingServices{})
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		var actions []string
		for _, a := range applied {
			actions = append(actions, a.Action[:2])
		}
		if got := claims(t, etcd); got != c.claims || strings.Join(actions, " ") != c.actions {
			t.Errorf("%d: %q, and the claims are\n%s\nwant %s and\n%s", i, actions, got, c.actions, c.claims)
		}
	}

	if _, err := s.Register(ctx, store.Registration{
		Node: node(1), Egress: true, Uplinks: []netip.Addr{netip.MustParseAddr("2001:db8:1::1")},
	}); err != nil {
		t.Fatal(err)
	}
	mustSet(t, s, "blue", "2001:db8:2::/48", "n1 2001:db8:9::9")
	before := claims(t, etcd)
	for _, c := range []struct {
		service service.Service
		reason  store.Reason
		says    string
	}{
		{exposed("web", "81", a), store.Exists, "is that of services of tenant red"},
		{exposed("web", "80=30080"), store.Exists, "node port 30080/TCP of service web is that of service other of " +
			"tenant red"},
		{exposed("web", "80", "2001:db8:1::1"), store.Refused, "an address of node n1"},
		{exposed("web", "80", "2001:db8:9::9"), store.Refused, "that of tenant blue at node n1"},
		{exposed("web", "80", "fd70:696c:7300:9::1"), store.Invalid, "is in fd70:696c:7300::/40"},
		{exposed("web", "80", "fd70:696c:6100:1::1"), store.Invalid, "is in fd70:696c:6100::/40"},
		{exposed("web", "80", "fc12::1"), store.Invalid, "is in fc00::/8"},
		{exposed("web", "80", "10.0.0.1"), store.Invalid, "not a global unicast IPv6 address"},
	} {
		_, err := s.ApplyServices(ctx, "blue", of(exposed("new", "90=0", "2001:db8:7::c"), c.service), nil,
			store.ApplyingServices{})
		refused(t, err, c.reason, c.says, "nothing was changed")
	}
	_, err := s.ApplyServices(ctx, "red", of(exposed("third", "80", a)), nil, store.ApplyingServices{})
	refused(t, err, store.Exists, "service other has port 80/TCP of external address "+a)
	_, err = s.SetEgressRules(ctx, "blue", prefixes("2001:db8:3::/48"), true, via("n1 "+a))
	refused(t, err, store.Refused, "other rules of tenant blue have address")
	_, err = s.SetEgressRules(ctx, "red", prefixes("2001:db8:3::/48"), true, via("n1 "+a))
	refused(t, err, store.Refused, "an external address of services")
	if got := claims(t, etcd); got != before {
		t.Errorf("refused changes made the claims %s, want %s", got, before)
	}
	if err := s.DeleteService(ctx, "red", service.ParseName("other")); err != nil {
		t.Fatal(err)
	}
	if got := claims(t, etcd); got != b+` {"tenant":"red","ports":{"80/TCP":"web"}}; TCP/30081 red web` {
		t.Errorf("without service other the claims are %s", got)
	}
	if err := s.DeleteTenant(ctx, "red"); err != nil {
		t.Fatal(err)
	}
	if got := claims(t, etcd); got != "" {
		t.Errorf("without tenant red the claims are %s", got)
	}
}

// testNodePorts: node ports without a number are free ones, until all are taken.
func testNodePorts(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	both := exposed("dns", "53=0", "54=0")
	both.Ports[1].Protocol, both.Ports[1].Port = service.UDP, 53
	ports := func(is service.Service, dryRun bool) string {
		applied, err := s.ApplyServices(ctx, "blue", []service.Service{is}, nil, store.ApplyingServices{DryRun: dryRun})
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, p := range applied[0].Service.Ports {
			if p.NodePort < service.FirstNodePort || p.NodePort > service.LastNodePort {
				t.Errorf("%v has node port %d", p, p.NodePort)
			}
			all = append(all, fmt.Sprintf("%s/%d", p.Protocol, p.NodePort))
		}
		return strings.Join(all, " ")
	}
	would := ports(both, true)
	if got := claims(t, etcd); got != "" {
		t.Errorf("after a dry run the claims are %s", got)
	}
	if got := ports(both, false); got != would {
		t.Errorf("node ports %s, and the dry run said %s", got, would)
	}
	changed := both
	changed.Ports = append(slices.Clone(both.Ports), exposed("", "80=0").Ports...)
	if got := ports(changed, false); !strings.HasPrefix(got, would+" TCP/") {
		t.Errorf("with one more port the node ports are %s, want those before and one more: %s", got, would)
	}

	// All others are taken, and the one that becomes free is found.
	first := would[len("TCP/"):][:5]
	for n := service.FirstNodePort; n <= service.LastNodePort; n++ {
		key := fmt.Sprintf("/pilaster/1/node-ports/TCP/%d", n)
		if fmt.Sprint(n) != first {
			if _, err := etcd.Put(ctx, key, "red web"); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, err := s.ApplyServices(ctx, "blue", []service.Service{exposed("web", "80=0")}, nil, store.ApplyingServices{})
	refused(t, err, store.Full, "all 2768 node ports of protocol TCP are taken")
	if err := s.DeleteService(ctx, "blue", service.ParseName("dns")); err != nil {
		t.Fatal(err)
	}
	if got := ports(exposed("web", "80=0"), false); got != "TCP/"+first {
		t.Errorf("node port %s, want the free one %s", got, first)
	}
	if _, err := etcd.Delete(ctx, "/pilaster/1/node-ports/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}

	// More claims than a transaction has go with their tenant.
	most := 100
	if len(etcd.Endpoints()) == 0 {
		most = 1000
	}
	for i := range 2 {
		var words []string
		for p := range service.MaxPorts {
			words = append(words, fmt.Sprint(p+1, "=0"))
		}
		for j := 0; j < most; j += len(words) {
			if most-j >= len(words) {
				ports(exposed(fmt.Sprintf("s%d-%d", i, j), words...), false)
			}
		}
	}
	if err := s.DeleteTenant(ctx, "blue"); err != nil {
		t.Fatal(err)
	}
	if got := claims(t, etcd) + keysOf(t, etcd); got != "" {
		t.Errorf("without the tenant the store has %s", got)
	}
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	var many []service.Service
	for i := range most/service.MaxPorts + 1 {
		many = append(many, changed)
		many[i].Name.Name, many[i].Ports = fmt.Sprint("s", i), nil
		for p := range service.MaxPorts {
			many[i].Ports = append(many[i].Ports, exposed("", fmt.Sprint(p+1, "=0")).Ports...)
		}
	}
	_, err = s.ApplyServices(ctx, "blue", many, nil, store.ApplyingServices{})
	refused(t, err, store.Full, "external addresses and node ports", "use several steps")
}

// testLoadBalancers: a service has an address of a pool until it is deleted, or no load balancer.
func testLoadBalancers(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
	}
	apply := func(tenant string, dryRun bool, all ...service.Service) (string, error) {
		applied, err := s.ApplyServices(ctx, tenant, all, nil, store.ApplyingServices{DryRun: dryRun})
		var got []string
		for _, a := range applied {
			got = append(got, a.Service.LoadBalancerIp)
		}
		return strings.Join(got, " "), err
	}
	must := func(tenant string, all ...service.Service) string {
		t.Helper()
		got, err := apply(tenant, false, all...)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	_, err := apply("blue", false, exposed("web", "80", "balanced"))
	refused(t, err, store.Refused, "no pool", "pilaster service pool add PREFIX")
	if _, err := s.ChangeServicePools(ctx, prefixes("2001:db8:8::/64"), nil, nil); err != nil {
		t.Fatal(err)
	}

	// A dry run shows the address, updates keep it, and another service gets another one.
	would, err := apply("blue", true, exposed("web", "80", "balanced"))
	if err != nil || claims(t, etcd) != "" {
		t.Errorf("after a dry run: %v, claims %s", err, claims(t, etcd))
	}
	web := must("blue", exposed("web", "80", "balanced"))
	if web != would || !strings.HasPrefix(web, "2001:db8:8:") {
		t.Errorf("address %s, and the dry run said %s", web, would)
	}
	if got := must("blue", exposed("web", "80", "balanced")); got != web {
		t.Errorf("an update without change made %s of %s", got, web)
	}
	if got, want := must("blue", exposed("web", "81", "balanced")), claims(t, etcd); got != web ||
		want != web+` {"tenant":"blue","ports":{"81/TCP":"web"}}` {
		t.Errorf("a change of the port made %s of %s, claims %s", got, web, want)
	}
	red := must("red", exposed("web", "81", "balanced"))
	if red == web {
		t.Errorf("two services have %s", red)
	}

	// An address belongs to one tenant, whether it has it as a load-balancer or as an external address.
	for _, word := range []string{web, "balanced" + web} {
		_, err = apply("red", false, exposed("other", "80", word))
		refused(t, err, store.Exists, "is that of services of tenant blue")
	}
	_, err = apply("blue", false, exposed("other", "81", web))
	refused(t, err, store.Exists, "service web has port 81/TCP of external address "+web)
	_, err = apply("blue", false, exposed("other", "81", "balanced2001:db8:9::1"))
	refused(t, err, store.Invalid, "load-balancer address 2001:db8:9::1 of service other is in no pool")
	if got := must("blue", exposed("other", "80", "balanced"+web)); got != web {
		t.Errorf("address %s, want that of web, %s", got, web)
	}

	// The address is free when the service is no load balancer any more, also beside one that takes it.
	must("blue", exposed("other", "80"), exposed("web", "80", "balanced2001:db8:8::7"))
	if got := must("red", exposed("other", "80", "balanced"+web)); got != web {
		t.Errorf("address %s, want %s", got, web)
	}
	if err := s.DeleteService(ctx, "red", service.ParseName("other")); err != nil {
		t.Fatal(err)
	}
	if got := claims(t, etcd); got != red+` {"tenant":"red","ports":{"81/TCP":"web"}}; `+
		`2001:db8:8::7 {"tenant":"blue","ports":{"80/TCP":"web"}}` && got != `2001:db8:8::7 {"tenant":"blue",`+
		`"ports":{"80/TCP":"web"}}; `+red+` {"tenant":"red","ports":{"81/TCP":"web"}}` {
		t.Errorf("the claims are %s", got)
	}
	for _, name := range []string{"blue", "red"} {
		if err := s.DeleteTenant(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if got := claims(t, etcd); got != "" {
		t.Errorf("without tenants the claims are %s", got)
	}

	// Small pools: the first, then the next; addresses of nodes and external ones are not allocated.
	if _, err := s.ChangeServicePools(ctx, prefixes("2001:db8:a::/127", "2001:db8:b::/126"),
		prefixes("2001:db8:8::/64"), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Register(ctx, store.Registration{
		Node: node(1), Uplinks: []netip.Addr{netip.MustParseAddr("2001:db8:b::2")},
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	must("blue", exposed("fixed", "80", "2001:db8:b::1"))
	got := strings.Fields(must("blue", exposed("a", "80", "balanced"), exposed("b", "80", "balanced"),
		exposed("c", "80", "balanced")))
	got = append(got, must("blue", exposed("d", "80", "balanced")))
	slices.Sort(got[:2])
	slices.Sort(got[2:])
	if want := "[2001:db8:a:: 2001:db8:a::1 2001:db8:b:: 2001:db8:b::3]"; fmt.Sprint(got) != want {
		t.Errorf("addresses %v, want %s", got, want)
	}
	_, err = apply("blue", false, exposed("e", "80", "balanced"))
	refused(t, err, store.Full, "addresses of the pools of load-balancer addresses are taken", "service e")
	_, err = apply("blue", false, exposed("e", "80", "balanced2001:db8:b::2"))
	refused(t, err, store.Refused, "an address of node n1")
	if err := s.DeleteService(ctx, "blue", service.ParseName("c")); err != nil {
		t.Fatal(err)
	}
	freed := must("blue", exposed("e", "80", "balanced"))
	if !strings.HasPrefix(freed, "2001:db8:b:") {
		t.Errorf("address %s, want that of service c", freed)
	}

	// No service gets the address of a machine, and one that has it keeps it.
	occupied := func(is service.Service) error {
		_, err := s.ApplyServices(ctx, "blue", []service.Service{is}, nil, store.ApplyingServices{
			Occupied: map[netip.Addr]string{netip.MustParseAddr(freed): "a BGP peer"},
		})
		return err
	}
	if err := occupied(exposed("e", "80", "81", "balanced")); err != nil {
		t.Errorf("a service with an occupied address: %v", err)
	}
	if err := s.DeleteService(ctx, "blue", service.ParseName("e")); err != nil {
		t.Fatal(err)
	}
	refused(t, occupied(exposed("e", "80", "balanced")), store.Full, "pools of load-balancer addresses are taken")
	refused(t, occupied(exposed("e", "80", freed)), store.Refused, freed, "that of a BGP peer", "nothing was changed")
}

// testServicePools: pools are the operator's, and stay as long as services have their addresses.
func testServicePools(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Register(ctx, store.Registration{
		Node: node(1), Egress: true, Uplinks: []netip.Addr{netip.MustParseAddr("2001:db8:1::1")},
	}); err != nil {
		t.Fatal(err)
	}
	mustSet(t, s, "blue", "2001:db8:2::/48", "n1 2001:db8:9::9")
	change := func(add, remove string) (string, error) {
		all, err := s.ChangeServicePools(ctx, prefixes(strings.Fields(add)...), prefixes(strings.Fields(remove)...),
			map[netip.Addr]string{netip.MustParseAddr("2001:db8:8:3::9"): "a BGP peer"})
		var got []string
		for _, p := range all {
			got = append(got, fmt.Sprint(p.Prefix, "=", p.Allocated))
		}
		return strings.Join(got, " "), err
	}
	for _, c := range []struct{ add, remove, want string }{
		{"2001:db8:8:1::/64 2001:db8:8::/112", "", "2001:db8:8::/112=0 2001:db8:8:1::/64=0"},
		{"", "", "2001:db8:8::/112=0 2001:db8:8:1::/64=0"},
		{"2001:db8:8:2::/64", "2001:db8:8:1::/64", "2001:db8:8::/112=0 2001:db8:8:2::/64=0"},
		{"", "2001:db8:8:2::/64", "2001:db8:8::/112=0"},
	} {
		if got, err := change(c.add, c.remove); err != nil || got != c.want {
			t.Errorf("add %s, remove %s: %s, %v; want %s", c.add, c.remove, got, err, c.want)
		}
	}
	if _, err := s.ApplyServices(ctx, "blue", []service.Service{
		exposed("web", "80", "443", "balanced2001:db8:8::7"), exposed("fixed", "80", "2001:db8:8::8"),
	}, nil, store.ApplyingServices{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		add, remove string
		reason      store.Reason
		says        string
	}{
		{"2001:db8:8::/64", "", store.Exists, "overlaps pool 2001:db8:8::/112"},
		{"2001:db8:8::/63", "", store.Invalid, "pools are /64 to /128"},
		{"fd70:696c:6100:1::/112", "", store.Invalid, "overlaps fd70:696c:6100::/40"},
		{"fd70:696c:7300:1::/112", "", store.Invalid, "overlaps fd70:696c:7300::/40"},
		{"fd00:ec2::/64", "", store.Invalid, "overlaps fd00:ec2::254/128"},
		{"2001:db8:1::/64", "", store.Refused, "an address of node n1"},
		{"2001:db8:8:3::/64", "", store.Refused, "contains 2001:db8:8:3::9, the address of a BGP peer"},
		{"2001:db8:9::/64", "", store.Refused, "2001:db8:9::9, the address of tenant blue at node n1"},
		{"", "2001:db8:7::/64", store.NotFound, "there is no pool 2001:db8:7::/64"},
		{"", "2001:db8:8::/112", store.Refused, "of the pool: service web of tenant blue (2001:db8:8::7); nothing"},
	} {
		_, err := change(c.add, c.remove)
		refused(t, err, c.reason, c.says, "nothing was changed")
	}
	var many []string
	for i := range service.MaxPools {
		many = append(many, fmt.Sprintf("2001:db8:10:%x::/64", i))
	}
	_, err := change(strings.Join(many, " "), "")
	refused(t, err, store.Full, "would have 17 pools", "the maximum is 16")
	_, err = s.SetEgressRules(ctx, "blue", prefixes("2001:db8:3::/48"), true, via("n1 2001:db8:8::9"))
	refused(t, err, store.Refused, "other rules")
	if _, err := s.CreateTenant(ctx, "red", 0); err != nil {
		t.Fatal(err)
	}
	_, err = s.SetEgressRules(ctx, "red", prefixes("2001:db8:3::/48"), true, via("n1 2001:db8:8::9"))
	refused(t, err, store.Refused, "is in 2001:db8:8::/112, a pool of load-balancer addresses")

	// A pool may be replaced by one that has its addresses, and be removed without load balancers.
	if got, err := change("2001:db8:8::/96", "2001:db8:8::/112"); err != nil || got != "2001:db8:8::/96=2" {
		t.Errorf("wider pool: %s, %v", got, err)
	}
	if err := s.DeleteService(ctx, "blue", service.ParseName("web")); err != nil {
		t.Fatal(err)
	}
	if got, err := change("", "2001:db8:8::/96"); err != nil || got != "" {
		t.Errorf("no pool: %s, %v", got, err)
	}
}
