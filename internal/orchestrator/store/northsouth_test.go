package store_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

func server(name, virtual, real string) tenant.UnderlayService {
	return tenant.UnderlayService{Name: name, Virtual: netip.MustParseAddr(virtual), Real: netip.MustParseAddr(real)}
}

func container(name string) netip.Addr {
	a := netip.MustParseAddr("fd12:3456::").As16()
	copy(a[12:], name)
	return netip.AddrFrom16(a)
}

// publish creates a publication of a separate container per name. It returns the index: the last 24 bits of the
// address.
func publish(t *testing.T, s *store.Store, of, name string, n int) uint32 {
	t.Helper()
	p, err := s.CreatePublication(t.Context(), of, name, container(name), node(n).Name)
	if err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr(p.Underlay)
	if p.Name != name || p.Node != node(n).Name || !netip.MustParsePrefix(p.Gateway).Contains(a) {
		t.Errorf("got publication %v, want %s at the gateway of node n%d", p, name, n)
	}
	return uint32(address.Split(a).Index)
}

// stored returns a tenant from the store.
func stored(t *testing.T, s *store.Store, name string) *pilasterv1.Tenant {
	t.Helper()
	register(t, s, 99)
	found, _, err := s.Resolve(t.Context(), node(99), 1, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.RecordHosting(t.Context(), node(99), 2, nil, []string{name}); err != nil {
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

// putTenant writes a tenant's record directly. The store would need many changes for it.
func putTenant(t *testing.T, etcd *clientv3.Client, is *pilasterv1.Tenant) {
	t.Helper()
	text, err := protojson.Marshal(is)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Put(t.Context(), "/pilaster/1/tenants/"+is.Name, string(text)); err != nil {
		t.Fatal(err)
	}
}

func underlay(at *pilasterv1.Node, i int) string {
	return tenant.UnderlayAddress(netip.MustParsePrefix(at.Prefix), address.Index(i)).String()
}

func testUnderlayServices(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	green := nimitz(t, s, "green", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "10.0.0.0/16,24")
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tenant string
		is     tenant.UnderlayService
		reason store.Reason
		want   string
	}{
		{"green", server("storage", "fd09::7", "2001:db8::9"), 0, ""},
		{"green", server("storage", "fd09::8", "2001:db8::a"), store.Exists, "an underlay service storage already"},
		{"green", server("db", "fd09::7", "2001:db8::a"), store.Refused, "storage and db of tenant green both have " +
			"fd09::7"},
		{"green", server("db", "fd09::8", "2001:db8::9"), store.Refused, "both have 2001:db8::9"},
		{"green", server("db", "fd12:3456::8", "2001:db8::a"), store.Invalid, "own CIDR"},
		{"green", server("db", "fd70:696c:6100:1::8", "2001:db8::a"), store.Invalid, "base prefix"},
		{"green", server("db", "fd09::8", "192.0.2.9"), store.Invalid, "IPv6 alone"},
		// Addresses of a prefix that no node has yet.
		{"green", server("db", "fd09::8", "fd70:696c:6100:7::1"), store.Invalid,
			"reserved for the node; nothing was changed: use a separate address for the underlay service"},
		{"green", server("db", "fd09::8", "fd70:696c:6100:7::2"), store.Invalid, "reserved for the node"},
		{"green", server("db", "fd09::8", "fd70:696c:6100:7:0:ff:0:1"), store.Invalid,
			"belongs to a node's gateway, and one gateway cannot forward to another; nothing was changed"},
		{"green", server("db", "fd09::8", "fd70:696c:6100:7:0:ff:0:2"), store.Invalid, "cannot forward to another"},
		{"green", server("db", "fd09::8", "fd70:696c:6100:7:0:7ff:0:2"), store.Invalid, "a container's"},
		{"lime", server("db", "fd09::8", "2001:db8::a"), store.Refused, "no IPv6 CIDR"},
		{"blue", server("db", "fd09::8", "2001:db8::a"), store.Refused, "on network netpila"},
		{"red", server("db", "fd09::8", "2001:db8::a"), store.NotFound, `no tenant "red"`},
		{"Green", server("db", "fd09::8", "2001:db8::a"), store.Invalid, "tenant name"},
		{"green", server("db", "fd09::8", "2001:db8::a"), 0, ""},
	} {
		made, err := s.CreateUnderlayService(ctx, c.tenant, c.is)
		if c.reason != 0 {
			refused(t, err, c.reason, c.want)
		} else if err != nil || made.Virtual != c.is.Virtual.String() || made.Real != c.is.Real.String() {
			t.Errorf("service %v: got %v, %v", c.is, made, err)
		}
	}
	if is := stored(t, s, "green"); len(is.UnderlayServices) != 2 || is.UnderlayServices[0].Name != "storage" ||
		is.Changes != green.Changes+2 {
		t.Errorf("green is %v, want services storage and db", is)
	}
	if err := s.DeleteUnderlayService(ctx, "green", "storage"); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeleteUnderlayService(ctx, "green", "storage"), store.NotFound, `no underlay service "storage"`,
		"--tenant green")
	refused(t, s.DeleteUnderlayService(ctx, "red", "storage"), store.NotFound)
	if is := stored(t, s, "green"); len(is.UnderlayServices) != 1 || is.UnderlayServices[0].Name != "db" ||
		is.Changes != green.Changes+3 {
		t.Errorf("green is %v, want only service db", is)
	}
	// An old service at an address that is now reserved does not prevent other changes.
	is := stored(t, s, "green")
	is.UnderlayServices = append(
		is.UnderlayServices,
		&pilasterv1.UnderlayService{Name: "before", Virtual: "fd09::9", Real: "fd70:696c:6100:7::1"},
	)
	putTenant(t, etcd, is)
	if _, err := s.CreateUnderlayService(ctx, "green", server("storage", "fd09::7", "2001:db8::9")); err != nil {
		t.Error(err)
	}
	if err := s.DeleteUnderlayService(ctx, "green", "storage"); err != nil {
		t.Error(err)
	}
	is = stored(t, s, "green")
	for i := 2; i < tenant.MaxUnderlayServices-1; i++ {
		is.UnderlayServices = append(
			is.UnderlayServices,
			&pilasterv1.UnderlayService{
				Name:    fmt.Sprint("s", i),
				Virtual: fmt.Sprintf("fd09::1:%x", i),
				Real:    fmt.Sprintf("2001:db8::1:%x", i),
			},
		)
	}
	putTenant(t, etcd, is)
	if _, err := s.CreateUnderlayService(ctx, "green", server("storage", "fd09::7", "2001:db8::9")); err != nil {
		t.Fatal(err)
	}
	_, err := s.CreateUnderlayService(ctx, "green", server("more", "fd09::7", "2001:db8::9"))
	refused(t, err, store.Full, "256 underlay services")
}

// The field has another name in Go than in stored records, which earlier builds write and read.
func testEarlierUnderlayServices(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	green := nimitz(t, s, "green", "fd12:3456::/48,80")
	text, err := protojson.Marshal(green)
	if err != nil {
		t.Fatal(err)
	}
	const key = "/pilaster/1/tenants/green"
	const storage = `"services":[{"name":"storage","virtual":"fd09::7","real":"2001:db8::9"}]}`
	if _, err := etcd.Put(ctx, key, strings.TrimSuffix(string(text), "}")+","+storage); err != nil {
		t.Fatal(err)
	}
	if is := stored(t, s, "green").UnderlayServices; len(is) != 1 || is[0].Name != "storage" ||
		is[0].Virtual != "fd09::7" || is[0].Real != "2001:db8::9" {
		t.Errorf("got %v, want underlay service storage", is)
	}
	if _, err := s.CreateUnderlayService(ctx, "green", server("db", "fd09::8", "2001:db8::a")); err != nil {
		t.Fatal(err)
	}
	resp, err := etcd.Get(ctx, key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("got %v, %v, want the record of green", resp, err)
	}
	var record struct {
		Services []struct{ Name string }
	}
	if err := json.Unmarshal(resp.Kvs[0].Value, &record); err != nil || len(record.Services) != 2 {
		t.Errorf("got %s, %v, want services storage and db", resp.Kvs[0].Value, err)
	}
}

func testPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(
		t,
		etcd,
		address.Plan{
			Base:     netip.MustParsePrefix("fd70:696c:6100::/40"),
			Gateway6: netip.MustParsePrefix("fd70:696c:6700::/76"),
		},
	)
	nimitz(t, s, "green", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "fd12:3456::/48")
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	register(t, s, 1)
	register(t, s, 2)
	high := netip.MustParsePrefix("fd70:696c:6100:10::/64")
	if _, err := s.Register(ctx, store.Registration{Node: node(16), Gateway: true, Prefix: high}); err != nil {
		t.Fatal(err)
	}
	for _, gateway := range []bool{true, false} { // node 4 no longer has a gateway
		if _, err := s.Register(ctx, store.Registration{Node: node(4), Gateway: gateway}); err != nil {
			t.Fatal(err)
		}
	}
	const at = "fd12:3456::5"
	for _, c := range []struct {
		tenant, name, container, node string
		reason                        store.Reason
		want                          string
	}{
		{"blue", "web", at, "n1", store.Refused, "on network netpila"},
		{"red", "web", at, "n1", store.NotFound, `no tenant "red"`},
		{"green", "web", at, "n3", store.NotFound, `no node "n3"`},
		{"green", "web", at, "n4", store.Refused, "node n4 has no gateway; nothing was changed: start its agent with " +
			"--nimitz"},
		{"green", "web", "fd12:3457::5", "n1", store.Invalid, "not in the tenant's CIDR"},
		{"green", "web", "10.0.0.5", "n1", store.Invalid, "IPv6 alone"},
		{"green", "-web", at, "n1", store.Invalid, "publication name"},
		{"green", "web", at, "n16", store.Refused, "has number 16"},
	} {
		_, err := s.CreatePublication(ctx, c.tenant, c.name, netip.MustParseAddr(c.container), c.node)
		refused(t, err, c.reason, c.want)
	}
	// All tenants share the indexes of a node.
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
	refused(
		t,
		err,
		store.Refused,
		"web and web2 of tenant green are both of container",
		"another node's gateway",
		"nothing was changed",
	)

	// The address of a deleted publication is not reused: a disconnected gateway may still publish it.
	if err := s.DeletePublication(ctx, "lime", "web"); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeletePublication(ctx, "lime", "web"), store.NotFound, `no publication "web"`, "--tenant lime")
	for i, name := range []string{"web", "late"} {
		if got := publish(t, s, "lime", name, 1); got != uint32(5+i) {
			t.Errorf("after index 4, lime/%s has index %d, want %d", name, got, 5+i)
		}
	}

	// Without force, a node whose gateway publishes containers is not deleted.
	refused(t, s.DeleteNode(ctx, "n1", false), store.Refused, "publishes 4 containers", "--force")
	if got := published(stored(t, s, "green")); len(got) != 3 {
		t.Errorf("green has publications %v, want 3", got)
	}
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	green, lime := published(stored(t, s, "green")), published(stored(t, s, "lime"))
	if strings.Join(green, " ") != "api" || len(lime) != 0 {
		t.Errorf("without the node, publications are %v and %v; want api and none", green, lime)
	}
	_, err = s.CreatePublication(ctx, "green", "web", netip.MustParseAddr(at), "n1")
	refused(t, err, store.NotFound, `no node "n1"`)

	// The deletion of a tenant deletes its publications.
	if err := s.DeleteTenant(ctx, "green"); err != nil {
		t.Fatal(err)
	}
	if got := publish(t, s, "lime", "web", 2); got != 3 {
		t.Errorf("the index after 2 is %d, want 3", got)
	}
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/published/n2", fmt.Sprint(address.MaxIndex)); err != nil {
		t.Fatal(err)
	}
	if got := publish(t, s, "lime", "last", 2); got != uint32(address.MaxIndex) {
		t.Errorf("the last index is %d, want %d", got, address.MaxIndex)
	}
	_, err = s.CreatePublication(ctx, "lime", "more", netip.MustParseAddr(at), "n2")
	refused(t, err, store.Full, "all 16777214 addresses", "node n2", "nothing was changed")
}

// The store deletes a tenant with the maximum number of publications in one transaction, and a node that publishes
// containers of 140 tenants.
func testManyPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	one, two := register(t, s, 1), register(t, s, 2)
	nimitz(t, s, "green", "fd12:3456::/48")
	is := stored(t, s, "green")
	for i := range tenant.MaxPublications - 1 {
		is.Publications = append(
			is.Publications,
			&pilasterv1.Publication{
				Name:      fmt.Sprint("p", i),
				Container: fmt.Sprintf("fd12:3456::1:%x", i),
				Node:      "n1",
				Gateway:   one.Prefix,
				Underlay:  underlay(one, i+2),
			},
		)
	}
	putTenant(t, etcd, is)
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/published/n1", fmt.Sprint(tenant.MaxPublications+1)); err != nil {
		t.Fatal(err)
	}
	publish(t, s, "green", "last", 1)
	_, err := s.CreatePublication(ctx, "green", "more", netip.MustParseAddr("fd12:3456::5"), "n1")
	refused(t, err, store.Full, "256 publications")
	before := s.Revision()
	if err := s.DeleteTenant(ctx, "green"); err != nil {
		t.Fatal(err)
	}
	if changes := s.Revision() - before; changes != 1 {
		t.Errorf("the tenant was deleted in %d transactions, want 1", changes)
	}
	const tenants = 140
	for i := range tenants {
		is := &pilasterv1.Tenant{Name: fmt.Sprint("t", i), Ids: is.Ids, Network: is.Network, Overlays: is.Overlays}
		for _, at := range []*pilasterv1.Node{one, two} {
			is.Publications = append(
				is.Publications,
				&pilasterv1.Publication{
					Name:      "of-" + at.Name,
					Container: "fd12:3456::5",
					Node:      at.Name,
					Gateway:   at.Prefix,
					Underlay:  underlay(at, i+2),
				},
			)
		}
		putTenant(t, etcd, is)
	}
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < tenants; i += 20 {
		if got := published(stored(t, s, fmt.Sprint("t", i))); len(got) != 1 || got[0] != "of-n2" {
			t.Errorf("tenant %d has publications %v, want of-n2", i, got)
		}
	}
}

// Indexes that a node publishes are not allocated again, even if the store has lost them.
func testReclaimPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "fd12:3456::/48")
	register(t, s, 1)
	publish(t, s, "green", "web", 1)
	report := func(published uint32) error {
		_, err := s.Register(ctx, store.Registration{Node: node(1), Gateway: true, Published: published})
		return err
	}
	for _, c := range []struct{ published, next uint32 }{{2, 3}, {7, 8}, {0, 9}, {7, 10}} {
		for range 2 {
			if err := report(c.published); err != nil {
				t.Fatal(err)
			}
		}
		if got := publish(t, s, "green", fmt.Sprint("p", c.next), 1); got != c.next {
			t.Errorf("after the node reported index %d, the next is %d, want %d", c.published, got, c.next)
		}
	}
	refused(t, report(1<<24), store.Invalid, "the highest is 16777215")
}

// Indexes that an orchestrator of an earlier build allocated, before or beside this one, are not allocated again.
func testEarlierPublications(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "fd12:3456::/48")
	nimitz(t, s, "lime", "fd12:3456::/48")
	one := register(t, s, 1)
	register(t, s, 2)
	publish(t, s, "green", "web", 1)
	is := stored(t, s, "green")
	is.Publications = append(
		is.Publications,
		&pilasterv1.Publication{
			Name:      "beside",
			Container: "fd12:3456::5",
			Node:      "n1",
			Gateway:   one.Prefix,
			Underlay:  underlay(one, 7),
		},
	)
	putTenant(t, etcd, is)
	if got := publish(t, s, "lime", "web", 1); got != 8 {
		t.Errorf("the index after 7 is %d, want 8", got)
	}
	for _, key := range []string{"published/n1/12", "withdrawn/n1/30", "published/n2/4"} {
		if _, err := etcd.Put(ctx, "/pilaster/1/"+key, "green"); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		s = open(t, etcd, address.Plan{})
	}
	for _, c := range []struct {
		node int
		want uint32
	}{{1, 31}, {2, 5}} {
		if got := publish(t, s, "lime", "late", c.node); got != c.want {
			t.Errorf("the next index at n%d is %d, want %d", c.node, got, c.want)
		}
		if err := s.DeletePublication(ctx, "lime", "late"); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"published/", "withdrawn/"} {
		if resp, err := etcd.Get(ctx, "/pilaster/1/"+dir, clientv3.WithPrefix()); err != nil || len(resp.Kvs) > 0 {
			t.Errorf("directory %s has %v, %v; want no key", dir, resp.Kvs, err)
		}
	}
}

// A restored store skips indexes that may have been allocated since the backup, and its tenants have higher change
// counters than those that nodes received since the backup.
func TestRestoreSkipsPublications(t *testing.T) {
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
	changes := stored(t, s, "green").Changes
	for _, node := range []string{"n1", "n2"} { // an earlier build has no marks
		if _, err := e.Client.Delete(t.Context(), "/pilaster/1/marks/published/"+node); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []uint32{104, 205} { // restore twice: the second backup is of the restored store
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
			t.Errorf("the next index of a gateway without publications is %d, want %d", got, want-2)
		}
		for _, name := range []string{"late", "first"} {
			if err := s.DeletePublication(t.Context(), "green", name); err != nil {
				t.Fatal(err)
			}
		}
		is := stored(t, s, "green")
		if changes += 104; is.Changes != changes || len(is.Publications) != 1 {
			t.Errorf("green is %v, want change counter %d and one publication", is, changes)
		}
	}
	e.Close()
}
