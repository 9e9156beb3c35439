package store_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// via returns gateways from "NODE" or "NODE ADDRESS".
func via(texts ...string) (all []tenant.EgressGateway) {
	for _, text := range texts {
		node, a, _ := strings.Cut(text, " ")
		g := tenant.EgressGateway{Node: node}
		g.Address, _ = netip.ParseAddr(a)
		all = append(all, g)
	}
	return all
}

// rules formats the egress rules of a tenant in the store.
func rules(t *testing.T, s *store.Store, name string) string {
	t.Helper()
	var all []string
	for _, r := range stored(t, s, name).Egress {
		text := fmt.Sprint(r.To, map[bool]string{true: " allow", false: " deny"}[r.Allow])
		for _, g := range r.Gateways {
			text += fmt.Sprint(" ", g.Node, "=", g.Address)
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// joinEgress registers nodes that can be egress gateways.
func joinEgress(t *testing.T, s *store.Store, nodes ...int) {
	t.Helper()
	for _, n := range nodes {
		if _, err := s.Register(t.Context(), store.Registration{Node: node(n), Egress: true}); err != nil {
			t.Fatal(err)
		}
	}
}

func mustSet(t *testing.T, s *store.Store, name, to string, gateways ...string) {
	t.Helper()
	if _, err := s.SetEgressRules(t.Context(), name, prefixes(to), true, via(gateways...)); err != nil {
		t.Fatal(err)
	}
}

func testEgressRules(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	nimitz(t, s, "green", "fd12:3456::/48")
	for _, c := range []struct {
		tenant string
		to     []netip.Prefix
		allow  bool
		want   string
	}{
		{"blue", prefixes("2001:db8:9::/48", "::/0"), true, "::/0 allow; 2001:db8:9::/48 allow"},
		{"blue", prefixes("2001:db8:8::/48"), false, "::/0 allow; 2001:db8:8::/48 deny; 2001:db8:9::/48 allow"},
		{"blue", prefixes("2001:db8:9::/48"), false, "::/0 allow; 2001:db8:8::/48 deny; 2001:db8:9::/48 deny"},
		{"blue", prefixes("2001:db8:9::/48"), false, "::/0 allow; 2001:db8:8::/48 deny; 2001:db8:9::/48 deny"},
	} {
		if _, err := s.SetEgressRules(ctx, c.tenant, c.to, c.allow, nil); err != nil {
			t.Fatal(err)
		}
		if got := rules(t, s, c.tenant); got != c.want {
			t.Errorf("after %v %v: %s, want %s", c.to, c.allow, got, c.want)
		}
	}
	if got := stored(t, s, "blue").Changes; got != blue.Changes+3 { // the last call changed nothing
		t.Errorf("%d changes, want %d", got, blue.Changes+3)
	}
	before := rules(t, s, "blue")
	for _, c := range []struct {
		tenant string
		to     []netip.Prefix
		reason store.Reason
		want   string
	}{
		{"red", prefixes("::/0"), store.NotFound, `no tenant "red"`},
		{"Blue", prefixes("::/0"), store.Invalid, "tenant name"},
		{"green", prefixes("::/0"), store.Refused, "on network nimitz, and only tenants of network netpila"},
		{"blue", nil, store.Invalid, "needs a prefix"},
		{"blue", prefixes("10.0.0.0/8"), store.Invalid, "not an IPv6 prefix"},
		{"blue", prefixes("2001:db8:7::1/48"), store.Invalid, "write 2001:db8:7::/48"},
		{"blue", prefixes("2001:db8:7::/48", "2001:db8:7::/48"), store.Invalid, "there twice"},
		{"blue", prefixes("2001:db8:7::/48", "fe80::/64"), store.Invalid, "would have no effect, because no " +
			"rule leads to fe80::/10"},
		{"blue", prefixes("fd70:696c:6100:1::/64"), store.Invalid, "no rule leads to fd70:696c:6100::/40"},
		{"blue", prefixes("64:ff9b::a00:0/104"), store.Invalid, "would have no effect"},
	} {
		_, err := s.SetEgressRules(ctx, c.tenant, c.to, true, nil)
		refused(t, err, c.reason, c.want)
	}
	refused(t, s.DeleteEgressRules(ctx, "blue", prefixes("::/0", "2001:db8:7::/48")), store.NotFound,
		"no egress rule to 2001:db8:7::/48", "pilaster egress list blue")
	if got := rules(t, s, "blue"); got != before {
		t.Errorf("refused changes made the rules %s, want %s", got, before)
	}
	if err := s.DeleteEgressRules(ctx, "blue", prefixes("::/0", "2001:db8:9::/48")); err != nil {
		t.Fatal(err)
	}
	if got := rules(t, s, "blue"); got != "2001:db8:8::/48 deny" {
		t.Errorf("after the deletion: %s", got)
	}
	var most []netip.Prefix
	for i := range tenant.MaxEgressRules - 1 {
		most = append(most, netip.MustParsePrefix(fmt.Sprintf("2001:db8:9:%x::/64", i)))
	}
	if _, err := s.SetEgressRules(ctx, "blue", most, true, nil); err != nil {
		t.Fatal(err)
	}
	_, err = s.SetEgressRules(ctx, "blue", prefixes("::/0"), true, nil)
	refused(t, err, store.Full, "257 egress rules", "256 at most")
	if _, err := s.SetEgressRules(ctx, "blue", most[:1], false, nil); err != nil { // it replaces one
		t.Error(err)
	}
	_, err = s.Migrate(ctx, "blue", tenant.Nimitz, 0)
	refused(t, err, store.Refused, "cannot move to network")

	for _, c := range []struct {
		nodes []netip.Prefix
		all   bool
		want  string
	}{
		{nil, true, "[fd70:696c:6100::/40]"},
		{prefixes("fd70:696c:6100:2::/64", "fd70:696c:6100:1::/64", "fd70:696c:6100:2::/64"), false,
			"[fd70:696c:6100:1::/64 fd70:696c:6100:2::/64]"},
		{nil, false, "[]"},
	} {
		set, err := s.SetTenantNodes(ctx, "blue", c.nodes, c.all)
		if got := stored(t, s, "blue").NodePrefixes; err != nil || fmt.Sprint(got) != c.want ||
			!slices.Equal(got, set) {
			t.Errorf("nodes %v, all %v: %v, %v; want %s", c.nodes, c.all, got, err, c.want)
		}
	}
	_, err = s.SetTenantNodes(ctx, "blue", prefixes("2001:db8::/48"), false)
	refused(t, err, store.Invalid, "2001:db8::/48 has no nodes", "fd70:696c:6100::/40")
	_, err = s.SetTenantNodes(ctx, "green", nil, true)
	refused(t, err, store.Refused, "on network nimitz")
}

func testEgressGateways(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
	}
	joinEgress(t, s, 1, 2)
	register(t, s, 3) // its agent cannot be a gateway
	uplink := netip.MustParseAddr("2001:db8:1::1")
	if _, err := s.Register(ctx, store.Registration{
		Node: node(4), Egress: true, Uplinks: []netip.Addr{uplink},
	}); err != nil {
		t.Fatal(err)
	}
	const first, second = "fd70:696c:6100:1:0:ff:100:10", "fd70:696c:6100:1:0:ff:100:11"
	want := func(name, want string) {
		t.Helper()
		if got := rules(t, s, name); got != want {
			t.Errorf("rules of %s: %s\nwant %s", name, got, want)
		}
	}
	// A tenant has one address at a node, which stays.
	mustSet(t, s, "blue", "::/0", "n1")
	mustSet(t, s, "blue", "2001:db8:9::/48", "n1", "n2 2001:db8:7::9")
	mustSet(t, s, "red", "::/0", "n1")
	mustSet(t, s, "blue", "::/0", "n2", "n1")
	want("blue", "::/0 allow n2=2001:db8:7::9 n1="+first+"; 2001:db8:9::/48 allow n1="+first+" n2=2001:db8:7::9")
	want("red", "::/0 allow n1="+second)
	before := rules(t, s, "blue")
	for _, c := range []struct {
		to     string
		via    []string
		reason store.Reason
		want   string
	}{
		{"2001:db8:5::/48", []string{"n5"}, store.NotFound, `no node "n5"`},
		{"2001:db8:5::/48", []string{"n3"}, store.Refused, "node n3 cannot be an egress gateway"},
		{"2001:db8:5::/48", []string{"n1", "n2", "n4"}, store.Invalid, "3 gateways"},
		{"2001:db8:5::/48", []string{"n1", "n1"}, store.Invalid, "twice"},
		{"2001:db8:5::/48", []string{"n2 2001:db8:7::8"}, store.Refused, "have address 2001:db8:7::9 at node n2"},
		{"2001:db8:5::/48", []string{"n4 2001:db8:7::9"}, store.Refused, "that of tenant blue at node n2"},
		{"2001:db8:5::/48", []string{"n4 " + second}, store.Refused, "that of tenant red at node n1"},
		{"2001:db8:5::/48", []string{"n4 " + uplink.String()}, store.Refused, "is an address of node n4"},
		{"2001:db8:5::/48", []string{"n4 fd70:696c:6100:4:0:ff:100:10"}, store.Invalid, "the cluster allocates"},
		{"2001:db8:5::/48", []string{"n4 fe80::1"}, store.Invalid, "is in fe80::/10"},
		{"2001:db8:5::/48", []string{"n4 fc00::1"}, store.Invalid, "is in fc00::/8"},
		{"2001:db8:5::/48", []string{"n4 192.0.2.1"}, store.Invalid, "not an IPv6 unicast address"},
	} {
		_, err := s.SetEgressRules(ctx, "blue", prefixes(c.to), true, via(c.via...))
		refused(t, err, c.reason, c.want, "nothing was changed")
	}
	_, err := s.SetEgressRules(ctx, "blue", prefixes("2001:db8:5::/48"), false, via("n1"))
	refused(t, err, store.Invalid, "it denies, so it has no gateway")
	want("blue", before)

	// An address is not reused, unless an operator asks for it. Rules that are set together may get another one.
	if err := s.DeleteEgressRules(ctx, "red", prefixes("::/0")); err != nil {
		t.Fatal(err)
	}
	mustSet(t, s, "red", "::/0", "n1")
	want("red", "::/0 allow n1=fd70:696c:6100:1:0:ff:100:12")
	mustSet(t, s, "red", "::/0", "n1 "+second)
	want("red", "::/0 allow n1="+second)
	all := prefixes("::/0", "2001:db8:9::/48")
	if _, err := s.SetEgressRules(ctx, "blue", all, true, via("n1", "n2 2001:db8:7::8")); err != nil {
		t.Fatal(err)
	}
	want("blue", "::/0 allow n1="+first+" n2=2001:db8:7::8; 2001:db8:9::/48 allow n1="+first+" n2=2001:db8:7::8")

	// The last address of a node.
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/egress/n4", fmt.Sprint(tenant.FirstEgressIndex-1)); err != nil {
		t.Fatal(err)
	}
	mustSet(t, s, "red", "2001:db8:5::/48", "n4")
	want("red", "::/0 allow n1="+second+"; 2001:db8:5::/48 allow n4=fd70:696c:6100:4:0:ff:100:ffff")
	_, err = s.SetEgressRules(ctx, "blue", prefixes("2001:db8:5::/48"), true, via("n4"))
	refused(t, err, store.Full, "all 65520 addresses of node n4", "nothing was changed")

	// Without force, a gateway is not deleted. The rules come first, also if it is connected: an operator who stops its
	// agent first loses packets. With force, rules without another gateway deny.
	if err := s.Connect(ctx, node(1), session(1)); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeleteNode(ctx, "n1", false), store.Refused, "gateway of 3 egress rules, so it was not deleted: "+
		"blue to ::/0, blue to 2001:db8:9::/48, red to ::/0. Set", "--force, after which these deny: red to ::/0")
	mustSet(t, s, "red", "::/0", "n1", "n2")
	refused(t, s.DeleteNode(ctx, "n1", false), store.Refused, "--force, after which they use their other gateway")
	mustSet(t, s, "red", "::/0", "n1 "+second)
	want("red", "::/0 allow n1="+second+"; 2001:db8:5::/48 allow n4=fd70:696c:6100:4:0:ff:100:ffff")
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	want("blue", "::/0 allow n2=2001:db8:7::8; 2001:db8:9::/48 allow n2=2001:db8:7::8")
	want("red", "::/0 deny; 2001:db8:5::/48 allow n4=fd70:696c:6100:4:0:ff:100:ffff")
	_, err = s.SetEgressRules(ctx, "red", prefixes("::/0"), true, via("n1"))
	refused(t, err, store.NotFound, `no node "n1"`)
	for _, name := range []string{"blue", "red"} {
		if err := s.DeleteTenant(ctx, name); err != nil {
			t.Error(err)
		}
	}
	if err := s.DeleteNode(ctx, "n4", false); err != nil {
		t.Errorf("a former gateway: %v", err)
	}
}

func testProtected(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	for _, c := range []struct {
		add, remove []netip.Prefix
		want        string
	}{
		{prefixes("2001:db8:9::/48", "2001:db8:8::/48"), nil, "[2001:db8:8::/48 2001:db8:9::/48]"},
		{prefixes("2001:db8:9::/48"), nil, "[2001:db8:8::/48 2001:db8:9::/48]"},
		{prefixes("::/0"), prefixes("2001:db8:8::/48"), "[::/0 2001:db8:9::/48]"},
		{nil, prefixes("::/0", "2001:db8:9::/48"), "[]"},
	} {
		if got, err := s.ChangeProtected(ctx, c.add, c.remove); err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("add %v, remove %v: %v, %v; want %s", c.add, c.remove, got, err, c.want)
		}
	}
	var most []netip.Prefix
	for i := range tenant.MaxProtected {
		most = append(most, netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x::/48", i)))
	}
	if _, err := s.ChangeProtected(ctx, most, nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		add, remove []netip.Prefix
		reason      store.Reason
		want        string
	}{
		{prefixes("2001:db8:ff::/48"), nil, store.Full, "65 prefixes"},
		{prefixes("2001:db8:ff::/48"), prefixes("2001:db8:fe::/48"), store.NotFound, "2001:db8:fe::/48 is not"},
		{prefixes("2001:db8:1::1/48"), most[:2], store.Invalid, "write 2001:db8:1::/48"},
		{prefixes("10.0.0.0/8"), most[:2], store.Invalid, "not an IPv6 prefix"},
		{prefixes("fe80:1::/32"), most[:2], store.Invalid, "always protected, as a part of fe80::/10"},
	} {
		_, err := s.ChangeProtected(ctx, c.add, c.remove)
		refused(t, err, c.reason, c.want, "nothing was changed")
	}
	if got, err := s.ChangeProtected(ctx, nil, nil); err != nil || !slices.Equal(got, most) {
		t.Errorf("after refused changes: %v, %v", got, err)
	}
}

func testEgressPrefix(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	joinEgress(t, s, 1, 2)
	mustSet(t, s, "blue", "::/0", "n1")
	if _, err := s.Register(ctx, store.Registration{
		Node: node(3), Uplinks: []netip.Addr{netip.MustParseAddr("2001:db8:6::1")},
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ egress, want string }{
		{"2001:db8:7::/63", "--egress-prefix: node n2: node prefix fd70:696c:6100:2::/64 has number 2, and " +
			"egress prefix 2001:db8:7::/63 has a /64 for numbers below 2"},
		{"2001:db8:6::/48", "overlaps 2001:db8:6::1/128, an address of node n3"},
		{"fd70:696c:6100::/48", "overlaps fd70:696c:6100::/40"},
	} {
		wanted := address.Plan{Egress: netip.MustParsePrefix(c.egress)}
		_, err := store.Open(ctx, etcd, wanted, slog.Default())
		refused(t, err, store.Invalid, c.want, "nothing was changed")
	}
	// Added later, also with an orchestrator that does not know it yet. It stays without the flag, and cannot change.
	wanted := address.Plan{Egress: netip.MustParsePrefix("2001:db8:7::/61")}
	if with := open(t, etcd, wanted); with.Cluster().Plan.Egress != wanted.Egress {
		t.Errorf("the plan is %+v", with.Cluster().Plan)
	}
	if found := open(t, etcd, address.Plan{}); found.Cluster().Plan.Egress != wanted.Egress {
		t.Errorf("without the flag the plan is %+v", found.Cluster().Plan)
	}
	_, err := store.Open(ctx, etcd, address.Plan{Egress: netip.MustParsePrefix("2001:db8:7::/48")}, slog.Default())
	refused(t, err, store.Refused, "--egress-prefix 2001:db8:7::/61 and cannot change to 2001:db8:7::/48")
	mustSet(t, s, "blue", "2001:db8:9::/48", "n1", "n2")
	if got, want := rules(t, s, "blue"), "::/0 allow n1=fd70:696c:6100:1:0:ff:100:10; 2001:db8:9::/48 allow "+
		"n1=fd70:696c:6100:1:0:ff:100:10 n2=2001:db8:7:2:0:ff:100:10"; got != want {
		t.Errorf("rules %s, want %s", got, want)
	}
}

// testEgressNodes: nodes with numbers beyond the egress prefix are refused.
func testEgressNodes(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{Egress: netip.MustParsePrefix("2001:db8:7::/62")})
	joinEgress(t, s, 1, 2)
	_, err := s.Register(ctx, store.Registration{Node: node(9), Prefix: netip.MustParsePrefix("fd70:696c:6100:4::/64")})
	refused(t, err, store.Refused, "has number 4, and egress prefix 2001:db8:7::/62 has a /64 for numbers below 4",
		"--node-prefix")
	joinEgress(t, s, 3)
	_, err = s.Register(ctx, store.Registration{Node: node(4)})
	refused(t, err, store.Full, "all 4 nodes that have a /64 in the egress prefix 2001:db8:7::/62")
	joinEgress(t, s, 3) // a registered one
}

// A restored store skips addresses of gateways that may have been allocated since the backup, and has the protected
// prefixes.
func TestRestoreSkipsGateways(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{Egress: netip.MustParsePrefix("2001:db8:7::/48")})
	for _, name := range []string{"blue", "red", "pink"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	joinEgress(t, s, 1, 2)
	mustSet(t, s, "blue", "::/0", "n1")
	pools := prefixes("2001:db8:8::/112")
	if _, err := s.ChangeServicePools(t.Context(), pools, nil, nil); err != nil {
		t.Fatal(err)
	}
	balanced := []service.Service{exposed("web", "80", "balanced")}
	before, err := s.ApplyServices(t.Context(), "red", balanced, nil, store.ApplyingServices{})
	if err != nil {
		t.Fatal(err)
	}
	protected := prefixes("2001:db8:5::/48")
	if _, err := s.ChangeProtected(t.Context(), protected, nil); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "backup")
	if _, err := store.Backup(t.Context(), dir, file, log); err != nil {
		t.Fatal(err)
	}
	e.Close()
	dir = t.TempDir()
	if _, err := store.Restore(t.Context(), file, dir, 0x1000, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), dir, log); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s = open(t, e.Client, address.Plan{})
	mustSet(t, s, "red", "::/0", "n1", "n2")
	if got := rules(t, s, "blue"); got != "::/0 allow n1=2001:db8:7:1:0:ff:100:10" {
		t.Errorf("the restored rules are %s", got)
	}
	want := "::/0 allow n1=2001:db8:7:1:0:ff:100:1011 n2=2001:db8:7:2:0:ff:100:1010"
	if got := rules(t, s, "red"); got != want {
		t.Errorf("new rules are %s, want %s", got, want)
	}
	if got, err := s.ChangeProtected(t.Context(), nil, nil); err != nil || !slices.Equal(got, protected) {
		t.Errorf("protected are %v, %v; want %v", got, err, protected)
	}
	after, err := s.ApplyServices(t.Context(), "red", balanced, nil, store.ApplyingServices{})
	if err != nil || after[0].Service.LoadBalancerIp != before[0].Service.LoadBalancerIp {
		t.Errorf("the load-balancer address is %v, %v; it was %v", after, err, before)
	}
	_, err = s.ChangeServicePools(t.Context(), nil, pools, nil)
	refused(t, err, store.Refused, "service web of tenant red")
}

// testEgressEvents: a watch reports the protected prefixes, also when none are left.
func testEgressEvents(t *testing.T, etcd *clientv3.Client) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s := open(t, etcd, address.Plan{})
	got := make(chan []netip.Prefix, 8)
	go s.Watch(ctx, func(b store.Batch) {
		for _, e := range b.Events {
			if e.Protected != nil {
				got <- *e.Protected
			}
		}
	})
	all := prefixes("2001:db8:5::/48")
	for _, want := range [][]netip.Prefix{all, nil} {
		add, remove := want, all
		if want != nil {
			remove = nil
		}
		if _, err := s.ChangeProtected(ctx, add, remove); err != nil {
			t.Fatal(err)
		}
		select {
		case is := <-got:
			if !slices.Equal(is, want) {
				t.Errorf("the watch reports %v, want %v", is, want)
			}
		case <-ctx.Done():
			t.Fatal("the watch reports nothing")
		}
	}
}
