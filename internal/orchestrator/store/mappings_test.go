package store_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// nimitz creates a tenant with these CIDRs, each with node bits ("10.0.0.0/16,24") or without.
func nimitz(t *testing.T, s *store.Store, name string, cidrs ...string) *pilasterv1.Tenant {
	t.Helper()
	var overlays []tenant.Overlay
	for _, text := range cidrs {
		cidr, bits, _ := strings.Cut(text, ",")
		o := tenant.Overlay{CIDR: netip.MustParsePrefix(cidr)}
		fmt.Sscan(bits, &o.NodeBits)
		overlays = append(overlays, o)
	}
	made, err := s.CreateTenantOn(t.Context(), tenant.Nimitz, name, 0, overlays)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// hosts registers nodes and lets them host a tenant.
func hosts(t *testing.T, s *store.Store, name string, nodes ...int) {
	t.Helper()
	for _, n := range nodes {
		register(t, s, n)
		if _, _, err := s.Resolve(t.Context(), node(n), 1, name, nil); err != nil {
			t.Fatal(err)
		}
	}
}

func allocate(t *testing.T, s *store.Store, n int, name, key string) string {
	t.Helper()
	prefixes, err := s.Allocate(t.Context(), node(n), name, key, 0)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Trim(fmt.Sprint(prefixes), "[]")
}

// mapped lists a tenant's mappings in the order of the pages: "10.0.1.0/24 n1".
func mapped(t *testing.T, s *store.Store, name string) (all []string) {
	t.Helper()
	for token := ""; ; {
		page, err := s.ListMappings(t.Context(), name, token)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range page.Mappings {
			all = append(all, m.To+" "+m.Name)
		}
		if token = page.Next; token == "" {
			return all
		}
	}
}

// endQuarantine ends the quarantine of all prefixes.
func endQuarantine(t *testing.T, etcd *clientv3.Client) {
	t.Helper()
	if _, err := etcd.Delete(t.Context(), "/pilaster/1/resting/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
}

func testSubnets(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/22,24", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "10.0.0.0/22,24") // the same addresses
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	hosts(t, s, "green", 1, 2, 3, 4, 5)
	hosts(t, s, "lime", 1)
	hosts(t, s, "blue", 1)
	first := allocate(t, s, 1, "green", "")
	if first != "10.0.1.0/24 fd12:3456:0:0:1::/80" || allocate(t, s, 1, "green", "") != first {
		t.Errorf("node 1 has %s, and in a repeated call %s", first, allocate(t, s, 1, "green", ""))
	}
	if got := allocate(t, s, 1, "lime", ""); got != "10.0.1.0/24" {
		t.Errorf("node 1 has %s of the other tenant, want 10.0.1.0/24", got)
	}
	seen := map[string]bool{first: true}
	for n := 2; n <= 4; n++ {
		seen[allocate(t, s, n, "green", "")] = true
	}
	if len(seen) != 4 {
		t.Errorf("four nodes have %v, want different subnets", seen)
	}
	_, err := s.Allocate(ctx, node(5), "green", "", 0)
	refused(t, err, store.Full, "all 4 subnets /24 of 10.0.0.0/22", "green", "nothing was changed", "--node-bits")
	_, err = s.Allocate(ctx, node(1), "green", "c1/eth0", 0)
	refused(t, err, store.Invalid, "green")
	_, err = s.Allocate(ctx, node(1), "blue", "", 0)
	refused(t, err, store.Refused, "blue")
	_, err = s.Allocate(ctx, node(2), "lime", "", 0)
	refused(t, err, store.Refused, "does not host")
	_, err = s.Allocate(ctx, pki.Node{Name: "n1", UUID: node(9).UUID}, "green", "", 0)
	refused(t, err, store.Refused, "n1")
	_, err = s.RotateKey(ctx, "green")
	refused(t, err, store.Refused, "no key to rotate")
	if got := mapped(t, s, "green"); len(got) != 8 || got[0] != "10.0.0.0/24 n4" || got[1] != "10.0.1.0/24 n1" {
		t.Errorf("mappings are %v", got)
	}

	// A node that no longer hosts the tenant releases its subnets. During the quarantine only the same node gets them.
	if _, err := s.RecordHosting(ctx, node(2), 2, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); len(got) != 6 {
		t.Errorf("after node 2 left, mappings are %v, want 6", got)
	}
	_, err = s.Allocate(ctx, node(5), "green", "", 0)
	refused(t, err, store.Full)
	hosts(t, s, "green", 2)
	if got := allocate(t, s, 2, "green", ""); got != "10.0.2.0/24 fd12:3456:0:0:2::/80" {
		t.Errorf("node 2 has %s when it hosts the tenant again, want its subnets from before", got)
	}
	// An overtaken message releases nothing.
	if _, err := s.RecordHosting(ctx, node(2), 0, nil, []string{"green"}); err != nil ||
		len(mapped(t, s, "green")) != 8 {
		t.Errorf("after an overtaken message mappings are %v, %v; want 8", mapped(t, s, "green"), err)
	}
	// The deletion of a node releases its subnets.
	if err := s.DeleteNode(ctx, "n3", false); err != nil {
		t.Fatal(err)
	}
	_, err = s.Allocate(ctx, node(5), "green", "", 0)
	refused(t, err, store.Full)
	endQuarantine(t, etcd)
	if got := allocate(t, s, 5, "green", ""); got != "10.0.3.0/24 fd12:3456:0:0:5::/80" {
		t.Errorf("node 5 has %s, want the released IPv4 subnet and a new IPv6 subnet", got)
	}
	if err := s.DeleteTenant(ctx, "green"); err == nil {
		t.Error("a tenant with containers was deleted")
	}
}

func testAddresses(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/29", "fd12:3456::/48")
	hosts(t, s, "green", 1, 2)
	if got := allocate(t, s, 1, "green", "c1/eth0"); got != "10.0.0.2/32 fd12:3456::2/128" ||
		got != allocate(t, s, 1, "green", "c1/eth0") {
		t.Errorf("the first endpoint has %s, and in a repeated call %s", got, allocate(t, s, 1, "green", "c1/eth0"))
	}
	if got := allocate(t, s, 2, "green", "c1/eth0"); got != "10.0.0.3/32 fd12:3456::3/128" {
		t.Errorf("the same key on another node has %s, want the next addresses", got)
	}
	for _, key := range []string{"c2/eth0", "c3/eth0", "c4/eth0", "c5/eth0"} {
		allocate(t, s, 1, "green", key)
	}
	_, err := s.Allocate(ctx, node(1), "green", "c6/eth0", 0)
	refused(t, err, store.Full, "all 6 addresses of 10.0.0.0/29", "in 6 minutes", "nothing was changed")
	_, err = s.Allocate(ctx, node(1), "green", strings.Repeat("c", 513), 0)
	refused(t, err, store.Invalid, "513")
	for range 2 {
		if err := s.Free(ctx, node(1), "green", "c1/eth0"); err != nil {
			t.Error(err)
		}
	}
	refused(t, s.Free(ctx, node(1), "green", ""), store.Invalid)
	if got := mapped(t, s, "green"); slices.Contains(got, "10.0.0.2/32 n1") ||
		!slices.Contains(got, "10.0.0.3/32 n2") ||
		len(got) != 10 {
		t.Errorf("mappings are %v", got)
	}
	_, err = s.Allocate(ctx, node(1), "green", "c6/eth0", 0) // the free address is in quarantine
	refused(t, err, store.Full)
	endQuarantine(t, etcd)
	if got := allocate(t, s, 1, "green", "c6/eth0"); got != "10.0.0.2/32 fd12:3456::8/128" {
		t.Errorf("after the quarantine the endpoint has %s, want the free addresses", got)
	}
	// A node that no longer hosts the tenant releases all addresses.
	if _, err := s.RecordHosting(ctx, node(1), 2, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); !slices.Equal(got, []string{"10.0.0.3/32 n2", "fd12:3456::3/128 n2"}) {
		t.Errorf("after node 1 left, mappings are %v, want those of node 2", got)
	}
	if _, err := s.RecordHosting(ctx, node(2), 2, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteTenant(ctx, "green"); err != nil {
		t.Fatal(err)
	}
	if left, err := etcd.Get(ctx, "/pilaster/1/", clientv3.WithPrefix(), clientv3.WithKeysOnly()); err != nil ||
		slices.ContainsFunc(left.Kvs, func(kv *mvccpb.KeyValue) bool {
			return strings.Contains(string(kv.Key), "green")
		}) {
		t.Errorf("after the deletion the store has %v, %v; want no key of the tenant", left.Kvs, err)
	}
}

// Quarantined keys have a lease, so they expire also without an orchestrator.
func testQuarantine(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16")
	hosts(t, s, "green", 1)
	for i := range 3 {
		key := fmt.Sprintf("c%d/eth0", i)
		allocate(t, s, 1, "green", key)
		if err := s.Free(ctx, node(1), "green", key); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := etcd.Get(ctx, "/pilaster/1/resting/green/", clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 3 {
		t.Fatalf("in quarantine are %v, %v; want 3 keys", resp, err)
	}
	for _, kv := range resp.Kvs {
		if kv.Lease == 0 || kv.Lease != resp.Kvs[0].Lease {
			t.Errorf("%s has lease %x, want that of the first key", kv.Key, kv.Lease)
		}
	}
	lease, err := etcd.TimeToLive(ctx, clientv3.LeaseID(resp.Kvs[0].Lease))
	if err != nil || lease.TTL > 360 || lease.TTL < 300 {
		t.Errorf("the lease is %+v, %v; want a TTL of 300 to 360 s", lease, err)
	}
	// When etcd has lost the lease, one call fails, and the next call gets a new lease.
	if _, err := etcd.Revoke(ctx, clientv3.LeaseID(resp.Kvs[0].Lease)); err != nil {
		t.Fatal(err)
	}
	allocate(t, s, 1, "green", "c9/eth0")
	refused(t, s.Free(ctx, node(1), "green", "c9/eth0"), store.Unavailable, "try again")
	if err := s.Free(ctx, node(1), "green", "c9/eth0"); err != nil {
		t.Error(err)
	}
}

// Two orchestrators never allocate the same address.
func testConcurrentAllocation(t *testing.T, etcd *clientv3.Client) {
	stores := []*store.Store{open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})}
	nimitz(t, stores[0], "green", "10.0.0.0/16")
	hosts(t, stores[0], "green", 1, 2)
	var mu sync.Mutex
	seen := map[netip.Prefix]int{}
	var work sync.WaitGroup
	for i := range 60 {
		work.Go(func() {
			key := fmt.Sprintf("c%d/eth0", i)
			prefixes, err := stores[i%2].Allocate(context.Background(), node(1+i%2), "green", key, 0)
			mu.Lock()
			defer mu.Unlock()
			if err != nil || len(prefixes) != 1 || seen[prefixes[0]] > 0 {
				t.Errorf("allocated %v, %v; want one address that no other endpoint has", prefixes, err)
				return
			}
			seen[prefixes[0]]++
		})
	}
	work.Wait()
	if stores[0].Conflicts()+stores[1].Conflicts() == 0 {
		t.Error("the stores had no conflict, so the test checked nothing")
	}
}

func testPages(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16")
	hosts(t, s, "green", 1)
	want := 2*store.MappingsPage + 1
	allocate(t, s, 1, "green", "0")
	one, err := etcd.Get(ctx, "/pilaster/1/mappings/green/0a000002/32")
	if err != nil || len(one.Kvs) != 1 {
		t.Fatalf("%v, %v", one, err)
	}
	var more []clientv3.Op
	for i := 1; i < want; i++ {
		more = append(
			more,
			clientv3.OpPut(fmt.Sprintf("/pilaster/1/mappings/green/%08x/32", 0x0a000002+i), string(one.Kvs[0].Value)),
		)
	}
	for some := range slices.Chunk(more, 128) {
		if _, err := etcd.Txn(ctx).Then(some...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	last := allocate(t, s, 1, "green", "last") // a change of the store, which updates s.Revision
	want++
	first, err := s.ListMappings(ctx, "green", "")
	if err != nil || len(first.Mappings) != store.MappingsPage || first.Next == "" || first.Revision != s.Revision() {
		t.Fatalf("the first page has %d mappings, revision %d, next %q, %v; want %d, revision %d",
			len(first.Mappings), first.Revision, first.Next, err, store.MappingsPage, s.Revision())
	}
	m := first.Mappings[0]
	if m.Tenant != "green" || m.To != "10.0.0.2/32" || m.Node != "fd70:696c:6100:1::/64" || m.Name != "n1" ||
		m.Key != "0" {
		t.Errorf("the first mapping is %v", m)
	}
	// The next pages have the revision of the first, without later changes.
	allocate(t, s, 1, "green", "late")
	if err := s.Free(ctx, node(1), "green", "last"); err != nil {
		t.Fatal(err)
	}
	all, page := len(first.Mappings), first
	for page.Next != "" {
		if page, err = s.ListMappings(ctx, "green", page.Next); err != nil || page.Revision != first.Revision {
			t.Fatalf("a page is %+v, %v; want revision %d", page, err, first.Revision)
		}
		all += len(page.Mappings)
	}
	if all != want || len(page.Mappings) != 2 || page.Mappings[1].To != last {
		t.Errorf("%d mappings, want %d; the last page has %v", all, want, page.Mappings)
	}
	sameFromMemory(t, s)
	if _, err := etcd.Compact(ctx, s.Revision()-s.Cluster().From); err != nil {
		t.Fatal(err)
	}
	_, err = s.ListMappings(ctx, "green", first.Next)
	refused(t, err, store.Stale, "begin again with the first")
	_, err = s.ListMappings(
		ctx,
		"green",
		strings.Replace(first.Next, fmt.Sprint(first.Revision), fmt.Sprint(first.Revision+1<<40), 1),
	)
	refused(t, err, store.Stale)
	_, err = s.ListMappings(ctx, "green", "17:../nodes")
	refused(t, err, store.Invalid, "page token")
	if got := mapped(t, s, "unknown"); got != nil {
		t.Errorf("an unknown tenant has mappings %v, want none", got)
	}
}

// sameFromMemory checks that the pages of a Listing, made of mappings in any order, equal those of the store.
func sameFromMemory(t *testing.T, s *store.Store) {
	t.Helper()
	var pages []store.Page
	var all []*pilasterv1.Mapping
	for next := ""; len(pages) == 0 || next != ""; next = pages[len(pages)-1].Next {
		page, err := s.ListMappings(t.Context(), "green", next)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, page)
		all = append(all, page.Mappings...)
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	listing := store.NewListing(all)
	for i, want := range pages[1:] {
		token, err := store.ParsePageToken(pages[i].Next)
		if err != nil {
			t.Fatal(err)
		}
		got := listing.Page(token)
		if got.Revision != want.Revision || got.Next != want.Next ||
			!slices.EqualFunc(
				got.Mappings,
				want.Mappings,
				func(a, b *pilasterv1.Mapping) bool { return proto.Equal(a, b) },
			) {
			t.Errorf(
				"page %d of the listing has %d mappings, next %q; want %d, %q",
				i+1,
				len(got.Mappings),
				got.Next,
				len(want.Mappings),
				want.Next,
			)
		}
	}
}

// VNI 0xff is that of packets from gateways (NIMITZ §3.1), so no tenant has it.
func testGatewayVNI(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	if _, err := etcd.Put(t.Context(), "/pilaster/1/marks/tenant", "254"); err != nil {
		t.Fatal(err)
	}
	first := nimitz(t, s, "green", "10.0.0.0/16,24")
	second, err := s.CreateTenant(t.Context(), "blue", 0)
	if err != nil || first.Ids[0].Id != 254 || second.Ids[0].Id != 256 {
		t.Errorf("ids %v and %v, %v; want 254 and 256", first.Ids, second, err)
	}
}

// testAnnouncedIDs: a tenant whose id does not fit into a route distinguisher is refused, and takes no id.
func testAnnouncedIDs(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/tenant", "65535"); err != nil {
		t.Fatal(err)
	}
	cidr := []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16")}}
	last, err := s.CreateTenantOn(ctx, tenant.EVPN, "bronze", 0, cidr)
	if err != nil || last.Ids[0].Id != tenant.MaxAnnouncedID {
		t.Fatalf("tenant %v, %v; want id %d", last, err, tenant.MaxAnnouncedID)
	}
	_, err = s.CreateTenantOn(ctx, tenant.EVPN, "brass", 0, cidr)
	refused(t, err, store.Full, "brass", "65536", "65535", "evpn", "nothing was changed")
	next, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil || next.Ids[0].Id != tenant.MaxAnnouncedID+1 {
		t.Errorf("tenant %v, %v; want id %d", next, err, tenant.MaxAnnouncedID+1)
	}
}

// testIdentifiers: a tenant of a network with identifiers gets addresses from a range that follows from its id, none of
// which ends with 16 zeros, and mappings have the apps.
func testIdentifiers(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	made, err := s.CreateTenantOn(ctx, tenant.ILA, "silver", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	id := made.Ids[0].Id
	cidr := fmt.Sprintf("fd70:696c:e100:0:6000:%x::/96", id)
	if len(made.Overlays) != 1 || made.Overlays[0].Cidr != cidr ||
		made.Addressing != pilasterv1.Addressing_ADDRESSING_CLEAR {
		t.Errorf("tenant %v, want the range %s", made, cidr)
	}
	_, err = s.CreateTenantOn(ctx, tenant.ILA, "tin", 0, []tenant.Overlay{{CIDR: netip.MustParsePrefix("fd12::/48")}})
	refused(t, err, store.Invalid, "chooses the addresses")
	_, err = s.CreateTenantOn(ctx, tenant.ILA, "tin", pilasterv1.Addressing_ADDRESSING_ENCRYPTED, nil)
	refused(t, err, store.Invalid, "addressing")
	_, err = s.RotateKey(ctx, "silver")
	refused(t, err, store.Refused, "no key to rotate")
	hosts(t, s, "silver", 1, 2)

	app := func(want uint32) {
		t.Helper()
		page, err := s.ListMappings(ctx, "silver", "")
		if err != nil || len(page.Mappings) != 1 || page.Mappings[0].App != want {
			t.Errorf("mappings %v, %v; want one with app %d", page.Mappings, err, want)
		}
	}
	first, err := s.Allocate(ctx, node(1), "silver", "c1/eth0", 7)
	if err != nil {
		t.Fatal(err)
	}
	app(7)
	again, err := s.Allocate(ctx, node(1), "silver", "c1/eth0", 8)
	if err != nil || !slices.Equal(again, first) {
		t.Errorf("%v with other labels, before %v: %v", again, first, err)
	}
	app(8)
	_, err = s.Allocate(ctx, node(1), "silver", "c1/eth0", 0xff00)
	refused(t, err, store.Invalid, "app 0xff00")
	_, err = s.Allocate(ctx, node(1), "silver", "c1/eth0", 0)
	refused(t, err, store.Invalid, "app 0x0")
	app(8)
	for what, m := range map[string]*pilasterv1.Mapping{
		"with app 0":           {To: fmt.Sprintf("fd70:696c:e100:0:6000:%x:0:99/128", id)},
		"with app 65280":       {To: fmt.Sprintf("fd70:696c:e100:0:6000:%x:0:99/128", id), App: 0xff00},
		"not a prefix of":      {To: fmt.Sprintf("fd70:696c:e100:0:6000:%x:2:0/128", id), App: 7}, // 16 zeros
		"not a prefix of the ": {To: "fd70:696c:e100:0:6000:99:0:1/128", App: 7},
	} {
		m.Tenant, m.Key = "silver", "c9/eth0"
		_, err := s.Register(ctx, store.Registration{Node: node(1), Mappings: []*pilasterv1.Mapping{m}})
		refused(t, err, store.Refused, what)
	}
	app(8)

	mark := "/pilaster/1/marks/overlay/silver/6"
	if _, err := etcd.Put(ctx, mark, fmt.Sprint(0xffff)); err != nil { // the next number is 0x10000
		t.Fatal(err)
	}
	next, err := s.Allocate(ctx, node(2), "silver", "c2/eth0", 7)
	if want := fmt.Sprintf("fd70:696c:e100:0:6000:%x:1:1/128", id); err != nil || next[0].String() != want {
		t.Errorf("%v, %v; want %s", next, err, want)
	}
	if err := s.Free(ctx, node(2), "silver", "c2/eth0"); err != nil {
		t.Fatal(err)
	}
	app(8)
}
