package store_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// TestStore runs everything on one server of each kind; each part has the store to itself.
func TestStore(t *testing.T) {
	parts := map[string]func(t *testing.T, etcd *clientv3.Client){
		"plan": testPlan, "nodes": testNodes, "prefixes run out": testPrefixesRunOut, "tenants": testTenants, "apps": testApps,
		"recall": testRecall, "recall refuses": testRecallRefuses, "recall is whole": testRecallIsWhole, "many in few requests": testManyInFewRequests, "hosting": testHosting, "rotation": testRotation, "recall of ids": testRecallOfIds, "recall of nonsense": testRecallOfNonsense, "two stores": testTwoStores,
		"watch": testWatch, "sleeper": store.SleeperTest, "compacted": store.CompactedTest,
		"hosted meanwhile": store.HostedMeanwhileTest, "large change": store.LargeChangeTest,
		"crash": store.CrashTest, "half a deletion": store.HalfDeletionTest,
		"sessions": testSessions, "sessions lost": testSessionsLost,
	}
	storetest.Each(t, func(t *testing.T, etcd *clientv3.Client) {
		for name, part := range parts {
			t.Run(name, func(t *testing.T) {
				if _, err := etcd.Delete(t.Context(), "/", clientv3.WithPrefix()); err != nil {
					t.Fatal(err)
				}
				part(t, etcd)
			})
		}
	})
}

func open(t *testing.T, etcd *clientv3.Client, plan address.Plan) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), etcd, plan, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// refused checks why something was refused, and that the sentence names what it is about.
func refused(t *testing.T, err error, want store.Reason, words ...string) {
	t.Helper()
	var e *store.Error
	if !errors.As(err, &e) || e.Reason != want {
		t.Errorf("got %v, want reason %d", err, want)
		return
	}
	for _, w := range words {
		if !strings.Contains(e.Text, w) {
			t.Errorf("%q does not say %q", e.Text, w)
		}
	}
}

func node(n int) pki.Node { return pki.Node{Name: fmt.Sprintf("n%d", n), UUID: storetest.UUID(n)} }

// session is a stream of a node.
func session(n int) store.Session {
	return store.Session{Orchestrator: "o", Instance: fmt.Sprint("i", n), Stream: fmt.Sprint("s", n)}
}

func connect(t *testing.T, s *store.Store, n int) {
	t.Helper()
	register(t, s, n)
	if err := s.Connect(t.Context(), node(n), session(n)); err != nil {
		t.Fatal(err)
	}
}

func register(t *testing.T, s *store.Store, n int) *pilasterv1.Node {
	t.Helper()
	node, err := s.Register(t.Context(), store.Registration{Node: node(n)})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func testPlan(t *testing.T, etcd *clientv3.Client) {
	bad := address.Plan{Base: netip.MustParsePrefix("fc00::/7")}
	_, err := store.Open(t.Context(), etcd, bad, slog.Default())
	refused(t, err, store.Invalid)

	wanted := address.Plan{Base: netip.MustParsePrefix("fd11::/48")}
	made := open(t, etcd, wanted)
	first := made.Cluster()
	if first.Plan.Base != wanted.Base || first.Plan.Private != address.DefaultPlan().Private {
		t.Errorf("plan %v", first.Plan)
	}
	found := open(t, etcd, address.Plan{})
	again := found.Cluster()
	token, err := made.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if same, err := found.Token(t.Context()); err != nil || same != token {
		t.Errorf("a second start found another token, %v", err)
	}
	if again.UUID != first.UUID || again.Plan != first.Plan {
		t.Error("a second start found another cluster")
	}
	_, err = store.Open(t.Context(), etcd, address.Plan{Base: netip.MustParsePrefix("fd22::/48")}, slog.Default())
	refused(t, err, store.Refused, "--base-prefix", "fd11::/48", "fd22::/48")
	_, err = store.Open(t.Context(), etcd, address.Plan{Private: netip.MustParsePrefix("fc00::/9")}, slog.Default())
	refused(t, err, store.Refused, "--private-prefix")
}

func testNodes(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if got := register(t, s, 1).Prefix; got != "fd70:696c:6100:1::/64" {
		t.Errorf("first prefix %s", got)
	}
	if got := register(t, s, 1).Prefix; got != "fd70:696c:6100:1::/64" {
		t.Errorf("registered again: %s", got)
	}
	_, err := s.Register(ctx, store.Registration{Node: pki.Node{Name: "n1", UUID: storetest.UUID(99)}})
	refused(t, err, store.Refused, "n1", storetest.UUID(1), "node delete")
	_, err = s.Register(ctx, store.Registration{Node: pki.Node{Name: "other", UUID: storetest.UUID(1)}})
	refused(t, err, store.Refused, "n1", "other")

	brought := func(n int, prefix string) (*pilasterv1.Node, error) {
		return s.Register(ctx, store.Registration{Node: node(n), Prefix: netip.MustParsePrefix(prefix)})
	}
	_, err = brought(1, "fd70:696c:6100:7::/64")
	refused(t, err, store.Refused, "fd70:696c:6100:1::/64")
	_, err = brought(2, "fd70:696c:6100:1::/64")
	refused(t, err, store.Refused, storetest.UUID(1))
	for _, p := range []string{"2001:db8::/64", "fd70:696c:6100:2::/63", "fd70:696c:6100:2::1/64"} {
		_, err = brought(2, p)
		refused(t, err, store.Invalid, "fd70:696c:6100::/40")
	}
	if n, err := brought(2, "fd70:696c:6100:2::/64"); err != nil || n.Prefix != "fd70:696c:6100:2::/64" {
		t.Errorf("brought: %v, %v", n, err)
	}
	if _, err := brought(3, "fd70:696c:61ff:ffff::/64"); err != nil {
		t.Errorf("the last prefix: %v", err)
	}
	if got := register(t, s, 4).Prefix; got != "fd70:696c:6100:3::/64" {
		t.Errorf("after those brought: %s", got)
	}

	refused(t, s.DeleteNode(ctx, "nobody", false), store.NotFound, "nobody")
	if err := s.DeleteNode(ctx, "n2", false); err != nil {
		t.Fatal(err)
	}
	_, err = s.Register(ctx, store.Registration{Node: node(2)})
	refused(t, err, store.Refused, "deleted", "state directory")
	refused(t, s.Admit(ctx, node(2)), store.Refused, "deleted")
	_, err = brought(5, "fd70:696c:6100:2::/64")
	refused(t, err, store.Refused, "never given to another")
	reborn, err := s.Register(ctx, store.Registration{Node: pki.Node{Name: "n2", UUID: storetest.UUID(22)}})
	if err != nil || reborn.Prefix != "fd70:696c:6100:4::/64" {
		t.Errorf("a new machine with the free name got %v, %v", reborn, err)
	}
}

func testPrefixesRunOut(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{Base: netip.MustParsePrefix("fd11:0:0:ff00::/56")})
	mark := netip.MustParsePrefix("fd11:0:0:fffe::/64")
	if _, err := s.Register(t.Context(), store.Registration{Node: node(1), Prefix: mark}); err != nil {
		t.Fatal(err)
	}
	if got := register(t, s, 2).Prefix; got != "fd11:0:0:ffff::/64" {
		t.Errorf("above the mark: %s", got)
	}
	_, err := s.Register(t.Context(), store.Registration{Node: node(3)})
	refused(t, err, store.Full, "256", "fd11:0:0:ff00::/56")
}

func testTenants(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", pilasterv1.Addressing_ADDRESSING_UNSPECIFIED)
	if err != nil {
		t.Fatal(err)
	}
	if blue.Ids[0].Id != 1 || len(blue.Ids[0].Key) != 16 || blue.Addressing != pilasterv1.Addressing_ADDRESSING_ENCRYPTED {
		t.Errorf("blue is %v", blue)
	}
	_, err = s.CreateTenant(ctx, "blue", pilasterv1.Addressing_ADDRESSING_CLEAR)
	refused(t, err, store.Exists, "blue")
	_, err = s.CreateTenant(ctx, "Blue", 0)
	refused(t, err, store.Invalid, "Blue")
	_, err = s.CreateTenant(ctx, "odd", 9)
	refused(t, err, store.Invalid, "9")

	refused(t, s.DeleteTenant(ctx, "red"), store.NotFound, "red")
	if err := s.DeleteTenant(ctx, "blue"); err != nil {
		t.Fatal(err)
	}
	again, err := s.CreateTenant(ctx, "blue", pilasterv1.Addressing_ADDRESSING_CLEAR)
	if err != nil || again.Ids[0].Id != 2 || string(again.Ids[0].Key) == string(blue.Ids[0].Key) {
		t.Errorf("blue made again is %v, %v; want another id and key", again, err)
	}
}

func testApps(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.Resolve(ctx, node(1), 1, "blue", nil)
	refused(t, err, store.Refused, "not registered")
	register(t, s, 1)
	resolve := func(labels map[string]string) uint32 {
		t.Helper()
		tenant, app, err := s.Resolve(ctx, node(1), 1, "blue", labels)
		if err != nil {
			t.Fatal(err)
		}
		if len(tenant.Ids[0].Key) != 16 || !maps.Equal(app.Labels, labels) {
			t.Errorf("resolved %v, %v", tenant, app)
		}
		return app.Id
	}
	web := map[string]string{"app": "web", "tier": "front"}
	if a, b, c := resolve(web), resolve(map[string]string{"app": "db"}), resolve(web); a != 1 || b != 2 || c != 1 {
		t.Errorf("apps %d, %d, %d; want 1, 2, 1", a, b, c)
	}
	_, _, err = s.Resolve(ctx, node(1), 1, "red", web)
	refused(t, err, store.NotFound, "red", "tenant create")

	last := &pilasterv1.App{Tenant: "blue", Id: 0xfeff, Labels: map[string]string{"app": "last"}}
	if err := recall(s, nil, []*pilasterv1.App{last}); err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/app/blue", "65278"); err != nil { // as if all others had been handed out
		t.Fatal(err)
	}
	if got := resolve(map[string]string{"app": "last-but-one"}); got != 0xfefe {
		t.Errorf("the last free app is %d", got)
	}
	_, _, err = s.Resolve(ctx, node(1), 1, "blue", map[string]string{"app": "one-more"}) // the held one is passed over
	refused(t, err, store.Full, "blue", "65279")
	if got := resolve(web); got != 1 {
		t.Errorf("a full tenant forgot app 1: %d", got)
	}
}

func testRecall(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	// A node comes back to a store that was restored from an old backup.
	if n, err := s.Register(ctx, store.Registration{Node: node(7), Prefix: netip.MustParsePrefix("fd70:696c:6100:7::/64")}); err != nil || n.Prefix != "fd70:696c:6100:7::/64" {
		t.Fatalf("held prefix: %v, %v", n, err)
	}
	if got := register(t, s, 8).Prefix; got != "fd70:696c:6100:8::/64" {
		t.Errorf("prefix after a held one: %s", got)
	}
	lost := &pilasterv1.Tenant{Name: "lost", Ids: []*pilasterv1.TenantId{{Id: 41}}}
	known := &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}, Created: blue.Created}
	app := &pilasterv1.App{Tenant: "blue", Id: 17, Labels: map[string]string{"app": "web"}}
	for range 2 { // the second time finds nothing to do
		if err := recall(s, []*pilasterv1.Tenant{lost, known}, []*pilasterv1.App{app, {Tenant: "lost", Id: 3}}); err != nil {
			t.Fatal(err)
		}
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 42 {
		t.Errorf("tenant after a held id: %v, %v", red, err)
	}
	register(t, s, 1)
	if _, a, err := s.Resolve(ctx, node(1), 1, "blue", app.Labels); err != nil || a.Id != 17 {
		t.Errorf("held app: %v, %v", a, err)
	}
	if _, a, err := s.Resolve(ctx, node(1), 1, "blue", map[string]string{"app": "db"}); err != nil || a.Id != 18 {
		t.Errorf("app after a held one: %v, %v", a, err)
	}
}

// recall is a node that registers and holds these.
func recall(s *store.Store, tenants []*pilasterv1.Tenant, apps []*pilasterv1.App) error {
	_, err := s.Register(context.Background(), store.Registration{Node: node(77), Tenants: tenants, Apps: apps})
	return err
}

// A refusal leaves nothing of what came before it, and what is more than a transaction holds comes whole.
func testRecallIsWhole(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	var tenants []*pilasterv1.Tenant
	var apps []*pilasterv1.App
	for i := range 150 {
		tenants = append(tenants, &pilasterv1.Tenant{Name: fmt.Sprintf("lost%d", i), Ids: []*pilasterv1.TenantId{{Id: uint32(1000 + i)}}})
		apps = append(apps, &pilasterv1.App{Tenant: "blue", Id: uint32(10 + i), Labels: map[string]string{"app": fmt.Sprint(i)}})
	}
	before, err := etcd.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	stolen := &pilasterv1.Tenant{Name: "red", Ids: []*pilasterv1.TenantId{{Id: 1}}} // blue's
	refused(t, recall(s, append(tenants, stolen), apps), store.Refused, "id 1 of tenant red", "blue", "nothing was changed")
	twice := append(apps, &pilasterv1.App{Tenant: "blue", Id: 10, Labels: map[string]string{"app": "other"}})
	refused(t, recall(s, tenants, twice), store.Refused, "app 10")
	after, err := etcd.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil || after.Count != before.Count || after.Header.Revision != before.Header.Revision {
		t.Errorf("a refusal left %d keys of %d, %v", after.Count, before.Count, err)
	}

	if err := recall(s, tenants, apps); err != nil {
		t.Fatal(err)
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 1150 {
		t.Errorf("tenant after held ids: %v, %v", red, err)
	}
	if _, a, err := s.Resolve(ctx, node(77), 1, "blue", map[string]string{"app": "new"}); err != nil || a.Id != 160 {
		t.Errorf("app after held ones: %v, %v", a, err)
	}
	for i := range 150 {
		if _, a, err := s.Resolve(ctx, node(77), 1, "blue", map[string]string{"app": fmt.Sprint(i)}); err != nil || a.Id != uint32(10+i) {
			t.Fatalf("held app %d: %v, %v", i, a, err)
		}
		if owner, err := etcd.Get(ctx, fmt.Sprintf("/pilaster/1/tenant-ids/%d", 1000+i)); err != nil || owner.Count != 1 {
			t.Fatalf("held id %d is not claimed: %v", 1000+i, err)
		}
	}
}

func testRecallRefuses(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"app": "web"}
	register(t, s, 1)
	if _, _, err := s.Resolve(ctx, node(1), 1, "blue", labels); err != nil {
		t.Fatal(err)
	}
	older := timestamppb.New(blue.Created.AsTime().Add(-time.Second))
	for name, c := range map[string]struct {
		tenant *pilasterv1.Tenant
		app    *pilasterv1.App
		reason store.Reason
	}{
		"id of another tenant":                {tenant: &pilasterv1.Tenant{Name: "red", Ids: []*pilasterv1.TenantId{{Id: 1}}}, reason: store.Refused},
		"id the tenant never had":             {tenant: &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 5}}}, reason: store.Refused},
		"tenant of the same name":             {tenant: &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}, Created: older}, reason: store.Refused},
		"id 0":                                {tenant: &pilasterv1.Tenant{Name: "red", Ids: []*pilasterv1.TenantId{{Id: 0}}}, reason: store.Invalid},
		"id too large":                        {tenant: &pilasterv1.Tenant{Name: "red", Ids: []*pilasterv1.TenantId{{Id: 1 << 24}}}, reason: store.Invalid},
		"app of other labels":                 {app: &pilasterv1.App{Tenant: "blue", Id: 1, Labels: map[string]string{"app": "db"}}, reason: store.Refused},
		"labels that are another app":         {app: &pilasterv1.App{Tenant: "blue", Id: 2, Labels: labels}, reason: store.Refused},
		"reserved app":                        {app: &pilasterv1.App{Tenant: "blue", Id: 0xff00}, reason: store.Invalid},
		"name that would leave its directory": {tenant: &pilasterv1.Tenant{Name: "a/b"}, reason: store.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			var tenants []*pilasterv1.Tenant
			var apps []*pilasterv1.App
			if c.tenant != nil {
				tenants = append(tenants, c.tenant)
			}
			if c.app != nil {
				apps = append(apps, c.app)
			}
			refused(t, recall(s, tenants, apps), c.reason)
		})
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 2 {
		t.Errorf("a refusal changed something: %v, %v", red, err)
	}
}

func testHosting(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	var names []string
	for i := range 130 { // more than a transaction holds
		names = append(names, fmt.Sprintf("t%d", i))
		if _, err := s.CreateTenant(ctx, names[i], 0); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.Hosts(ctx, node(1), 1, said(names[0]), nil)
	refused(t, err, store.Refused, "not registered")
	register(t, s, 1)
	register(t, s, 2)
	for n := range 2 {
		if _, err := s.Hosts(ctx, node(n+1), 1, said(append(names, "no-such-tenant")...), nil); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, s.DeleteTenant(ctx, "t0"), store.Refused, "n1, n2")
	if _, err := s.Hosts(ctx, node(1), 2, nil, names[:1]); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeleteTenant(ctx, "t0"), store.Refused, "on n2;")
	if err := s.DeleteNode(ctx, "n2", false); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteTenant(ctx, "t0"); err != nil {
		t.Errorf("nobody hosts it any more: %v", err)
	}
	refused(t, s.DeleteTenant(ctx, "t129"), store.Refused, "on n1;")
}

// said is what a node says that has not drawn from any id.
func said(tenants ...string) []*pilasterv1.Hosting {
	var all []*pilasterv1.Hosting
	for _, name := range tenants {
		all = append(all, &pilasterv1.Hosting{Tenant: name})
	}
	return all
}
