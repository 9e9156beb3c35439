package store_test

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

func service(name, virtual, real string) tenant.Service {
	return tenant.Service{Name: name, Virtual: netip.MustParseAddr(virtual), Real: netip.MustParseAddr(real)}
}

func container(name string) netip.Addr {
	a := netip.MustParseAddr("fd12:3456::").As16()
	copy(a[12:], name)
	return netip.AddrFrom16(a)
}

// publish gives the last 24 bits of the address, the index. Each name is of a container of its own.
func publish(t *testing.T, s *store.Store, of, name string, n int) uint32 {
	t.Helper()
	p, err := s.CreatePublication(t.Context(), of, name, container(name), node(n).Name)
	if err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr(p.Underlay)
	if p.Name != name || p.Node != node(n).Name || !netip.MustParsePrefix(p.Gateway).Contains(a) {
		t.Errorf("published %v", p)
	}
	return uint32(address.Split(a).Index)
}

// now is a tenant as the store has it.
func now(t *testing.T, s *store.Store, name string) *pilasterv1.Tenant {
	t.Helper()
	register(t, s, 99)
	found, _, err := s.Resolve(t.Context(), node(99), 1, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Hosts(t.Context(), node(99), 2, nil, []string{name}); err != nil {
		t.Fatal(err)
	}
	return found
}

func published(of *pilasterv1.Tenant) (names []string) {
	for _, p := range of.Publications {
		names = append(names, p.Name)
	}
	return names
}

// stuff writes a tenant at once that would take many changes.
func stuff(t *testing.T, etcd *clientv3.Client, is *pilasterv1.Tenant) {
	t.Helper()
	text, err := protojson.Marshal(is)
	if err != nil {
		t.Fatal(err)
	}
	puts := []clientv3.Op{clientv3.OpPut("/pilaster/1/tenants/"+is.Name, string(text))}
	for _, p := range is.Publications {
		puts = append(puts, clientv3.OpPut(fmt.Sprintf("/pilaster/1/published/%s/%d", p.Node, address.Split(netip.MustParseAddr(p.Underlay)).Index), is.Name))
	}
	for part := range slices.Chunk(puts, 100) {
		if _, err := etcd.Txn(t.Context()).Then(part...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

func underlay(at *pilasterv1.Node, i int) string {
	return tenant.UnderlayAddress(netip.MustParsePrefix(at.Prefix), address.Index(i)).String()
}

func testServices(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	green := nimitz(t, s, "green", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "10.0.0.0/16,24")
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tenant string
		is     tenant.Service
		reason store.Reason
		says   string
	}{
		{"green", service("storage", "fd09::7", "2001:db8::9"), 0, ""},
		{"green", service("storage", "fd09::8", "2001:db8::a"), store.Exists, "a service storage already"},
		{"green", service("db", "fd09::7", "2001:db8::a"), store.Invalid, "storage and db of tenant green both have fd09::7"},
		{"green", service("db", "fd09::8", "2001:db8::9"), store.Invalid, "both have 2001:db8::9"},
		{"green", service("db", "fd12:3456::8", "2001:db8::a"), store.Invalid, "own CIDR"},
		{"green", service("db", "fd70:696c:6100:1::8", "2001:db8::a"), store.Invalid, "base prefix"},
		{"green", service("db", "fd09::8", "192.0.2.9"), store.Invalid, "IPv6 alone"},
		{"lime", service("db", "fd09::8", "2001:db8::a"), store.Invalid, "no IPv6 CIDR"},
		{"blue", service("db", "fd09::8", "2001:db8::a"), store.Refused, "on network netpila"},
		{"red", service("db", "fd09::8", "2001:db8::a"), store.NotFound, `no tenant "red"`},
		{"Green", service("db", "fd09::8", "2001:db8::a"), store.Invalid, "tenant name"},
		{"green", service("db", "fd09::8", "2001:db8::a"), 0, ""},
	} {
		made, err := s.CreateService(ctx, c.tenant, c.is)
		if c.reason != 0 {
			refused(t, err, c.reason, c.says)
		} else if err != nil || made.Virtual != c.is.Virtual.String() || made.Real != c.is.Real.String() {
			t.Errorf("%v: %v, %v", c.is, made, err)
		}
	}
	if is := now(t, s, "green"); len(is.Services) != 2 || is.Services[0].Name != "storage" || is.Changes != green.Changes+2 {
		t.Errorf("green is %v", is)
	}
	if err := s.DeleteService(ctx, "green", "storage"); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeleteService(ctx, "green", "storage"), store.NotFound, `no service "storage"`, "--tenant green")
	refused(t, s.DeleteService(ctx, "red", "storage"), store.NotFound)
	if is := now(t, s, "green"); len(is.Services) != 1 || is.Services[0].Name != "db" || is.Changes != green.Changes+3 {
		t.Errorf("then green is %v", is)
	}
	is := now(t, s, "green")
	for i := 2; i < tenant.MaxServices; i++ {
		is.Services = append(is.Services, &pilasterv1.Service{Name: fmt.Sprint("s", i), Virtual: fmt.Sprintf("fd09::1:%x", i), Real: fmt.Sprintf("2001:db8::1:%x", i)})
	}
	stuff(t, etcd, is)
	if _, err := s.CreateService(ctx, "green", service("storage", "fd09::7", "2001:db8::9")); err != nil {
		t.Fatal(err)
	}
	_, err := s.CreateService(ctx, "green", service("more", "fd09::7", "2001:db8::9"))
	refused(t, err, store.Full, "256 services")
}

func testPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{Base: netip.MustParsePrefix("fd70:696c:6100::/40"), Gateway6: netip.MustParsePrefix("fd70:696c:6700::/76")})
	nimitz(t, s, "green", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "fd12:3456::/48")
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	register(t, s, 1)
	register(t, s, 2)
	if _, err := s.Register(ctx, store.Registration{Node: node(16), Prefix: netip.MustParsePrefix("fd70:696c:6100:10::/64")}); err != nil {
		t.Fatal(err)
	}
	const at = "fd12:3456::5"
	for _, c := range []struct {
		tenant, name, container, node string
		reason                        store.Reason
		says                          string
	}{
		{"blue", "web", at, "n1", store.Refused, "on network netpila"},
		{"red", "web", at, "n1", store.NotFound, `no tenant "red"`},
		{"green", "web", at, "n3", store.NotFound, `no node "n3"`},
		{"green", "web", "fd12:3457::5", "n1", store.Invalid, "not in the tenant's CIDR"},
		{"green", "web", "10.0.0.5", "n1", store.Invalid, "IPv6 alone"},
		{"green", "-web", at, "n1", store.Invalid, "publication name"},
		{"green", "web", at, "n16", store.Invalid, "has number 16"},
	} {
		_, err := s.CreatePublication(ctx, c.tenant, c.name, netip.MustParseAddr(c.container), c.node)
		refused(t, err, c.reason, c.says)
	}
	// The lowest index that is free at the node, whatever the tenant.
	for i, c := range []struct {
		tenant, name string
		node         int
		want         uint32
	}{{"green", "web", 1, 2}, {"lime", "web", 1, 3}, {"green", "api", 2, 2}, {"green", "db", 1, 4}} {
		if got := publish(t, s, c.tenant, c.name, c.node); got != c.want {
			t.Errorf("publication %d has index %d, want %d", i, got, c.want)
		}
	}
	_, err := s.CreatePublication(ctx, "green", "web", netip.MustParseAddr(at), "n2")
	refused(t, err, store.Exists, "a publication web already")
	_, err = s.CreatePublication(ctx, "green", "web2", container("web"), "n1")
	refused(t, err, store.Invalid, "web and web2 of tenant green are both of container", "another node's gateway", "nothing was changed")

	// One that ends leaves its address to nobody for a while.
	if err := s.DeletePublication(ctx, "lime", "web"); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeletePublication(ctx, "lime", "web"), store.NotFound, `no publication "web"`, "--tenant lime")
	if got := publish(t, s, "lime", "web", 1); got != 5 {
		t.Errorf("while index 3 rests, the next is %d", got)
	}
	awake(t, etcd)
	if got := publish(t, s, "lime", "late", 1); got != 3 {
		t.Errorf("after its rest, the next is %d", got)
	}

	// A node whose gateway publishes is not deleted by the way.
	refused(t, s.DeleteNode(ctx, "n1", false), store.Refused, "publishes 4 containers", "--force")
	if got := published(now(t, s, "green")); len(got) != 3 {
		t.Errorf("green has %v", got)
	}
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	if green, lime := published(now(t, s, "green")), published(now(t, s, "lime")); strings.Join(green, " ") != "api" || len(lime) != 0 {
		t.Errorf("without the node, published are %v and %v", green, lime)
	}
	_, err = s.CreatePublication(ctx, "green", "web", netip.MustParseAddr(at), "n1")
	refused(t, err, store.NotFound, `no node "n1"`)

	// A tenant's end ends them.
	if err := s.DeleteTenant(ctx, "green"); err != nil {
		t.Fatal(err)
	}
	if got := publish(t, s, "lime", "web", 2); got != 3 {
		t.Errorf("while index 2 rests, the next is %d", got)
	}
	awake(t, etcd)
	if got := publish(t, s, "lime", "api", 2); got != 2 {
		t.Errorf("after its rest, the next is %d", got)
	}
}

// What is too much for one transaction goes too: as many publications as a tenant may have with it, and those of many tenants with a node.
func testManyPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	one, two := register(t, s, 1), register(t, s, 2)
	nimitz(t, s, "green", "fd12:3456::/48")
	is := now(t, s, "green")
	for i := range tenant.MaxPublications - 1 {
		is.Publications = append(is.Publications, &pilasterv1.Publication{Name: fmt.Sprint("p", i), Container: fmt.Sprintf("fd12:3456::1:%x", i), Node: "n1", Gateway: one.Prefix, Underlay: underlay(one, i+2)})
	}
	stuff(t, etcd, is)
	publish(t, s, "green", "last", 1)
	_, err := s.CreatePublication(ctx, "green", "more", netip.MustParseAddr("fd12:3456::5"), "n1")
	refused(t, err, store.Full, "256 publications")
	if err := s.DeleteTenant(ctx, "green"); err != nil {
		t.Fatal(err)
	}
	left := func(dir string) int {
		t.Helper()
		resp, err := etcd.Get(ctx, "/pilaster/1/"+dir, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		return int(resp.Count)
	}
	if has, rests := left("published/"), left("withdrawn/"); has != 0 || rests != tenant.MaxPublications {
		t.Errorf("%d have an index still, and %d rest", has, rests)
	}
	const tenants = 140
	for i := range tenants {
		is := &pilasterv1.Tenant{Name: fmt.Sprint("t", i), Ids: is.Ids, Network: is.Network, Overlays: is.Overlays}
		for _, at := range []*pilasterv1.Node{one, two} {
			is.Publications = append(is.Publications, &pilasterv1.Publication{Name: "of-" + at.Name, Container: "fd12:3456::5", Node: at.Name, Gateway: at.Prefix, Underlay: underlay(at, i+2)})
		}
		stuff(t, etcd, is)
	}
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	if has, rests := left("published/"), left("withdrawn/"); has != tenants || rests != 0 {
		t.Errorf("without the node %d have an index, and %d rest", has, rests)
	}
	for i := 0; i < tenants; i += 20 {
		if got := published(now(t, s, fmt.Sprint("t", i))); len(got) != 1 || got[0] != "of-n2" {
			t.Errorf("tenant %d has %v", i, got)
		}
	}
}

// What a node publishes that the store has forgotten is not another's at once.
func testRecallPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "fd12:3456::/48")
	one := register(t, s, 1)
	publish(t, s, "green", "web", 1)
	says := func(held ...*pilasterv1.Publication) error { // of tenants that it only carries
		_, err := s.Register(ctx, store.Registration{Node: node(1), Tenants: []*pilasterv1.Tenant{{Name: "green", Changes: 9, Publications: held}, {Name: "lost", Publications: held[1:]}}})
		return err
	}
	p := func(i int) *pilasterv1.Publication {
		return &pilasterv1.Publication{Name: "p", Container: "fd12:3456::5", Gateway: one.Prefix, Underlay: underlay(one, i)}
	}
	elsewhere := p(5)
	elsewhere.Gateway = "fd70:696c:6100:7::/64"
	for range 2 {
		if err := says(p(2), p(3), elsewhere, p(4)); err != nil {
			t.Fatal(err)
		}
	}
	if is := now(t, s, "green"); len(is.Publications) != 1 || is.Changes <= 9 {
		t.Errorf("green is %v", is)
	}
	if got := publish(t, s, "green", "api", 1); got != 5 {
		t.Errorf("beside what the node has, the next is %d", got)
	}
	bad := p(3)
	bad.Underlay = one.Prefix
	refused(t, says(bad), store.Invalid, "not an address")
	bad.Underlay = "fd70:696c:6100:1::1"
	refused(t, says(bad), store.Invalid, "none of the gateway's")
}

// A restored store gives no index that may have been given since the backup, takes no rest for eternal, and its tenants count as newer than
// what nodes have heard since.
func TestRestoreLeavesOutPublications(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{})
	nimitz(t, s, "green", "fd12:3456::/48")
	register(t, s, 1)
	register(t, s, 2)
	publish(t, s, "green", "web", 1)
	publish(t, s, "green", "api", 1)
	if err := s.DeletePublication(t.Context(), "green", "web"); err != nil {
		t.Fatal(err)
	}
	changes := now(t, s, "green").Changes
	for _, want := range []uint32{104, 204} { // a restored one is restored again
		file := filepath.Join(t.TempDir(), "backup")
		if _, err := store.Backup(t.Context(), dir, file, log); err != nil {
			t.Fatal(err)
		}
		e.Close()
		dir = t.TempDir()
		if _, err := store.Restore(t.Context(), file, dir, 100, log); err != nil {
			t.Fatal(err)
		}
		if e, err = store.Embed(t.Context(), dir, log); err != nil {
			t.Fatal(err)
		}
		s = open(t, e.Client, address.Plan{})
		if got := publish(t, s, "green", "late", 1); got != want {
			t.Errorf("after a restore the next index is %d, want %d", got, want)
		}
		if got := publish(t, s, "green", "first", 2); got != want-2 {
			t.Errorf("of a gateway that published nothing it is %d, want %d", got, want-2)
		}
		for _, name := range []string{"late", "first"} {
			if err := s.DeletePublication(t.Context(), "green", name); err != nil {
				t.Fatal(err)
			}
		}
		is := now(t, s, "green")
		if changes += 104; is.Changes != changes || len(is.Publications) != 1 {
			t.Errorf("green is %v, want change %d", is, changes)
		}
	}
	e.Close()
}
