package store_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// A node registers after the store was restored from an old backup: the store accepts the ids that it has lost, and
// allocates higher ones.
func testReclaim(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	r := store.Registration{Node: node(7), Prefix: netip.MustParsePrefix("fd70:696c:6100:7::/64")}
	if n, err := s.Register(ctx, r); err != nil || n.Prefix != "fd70:696c:6100:7::/64" {
		t.Fatalf("held prefix: got %v, %v", n, err)
	}
	if got := register(t, s, 8).Prefix; got != "fd70:696c:6100:8::/64" {
		t.Errorf("prefix after a held one: %s, want fd70:696c:6100:8::/64", got)
	}
	lost := &pilasterv1.Tenant{Name: "lost", Ids: []*pilasterv1.TenantId{{Id: 41}}}
	known := &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}, Created: blue.Created}
	app := &pilasterv1.App{Tenant: "blue", Id: 17, Labels: map[string]string{"app": "web"}}
	tenants, apps := []*pilasterv1.Tenant{lost, known}, []*pilasterv1.App{app, {Tenant: "lost", Id: 3}}
	for range 2 { // the second call changes nothing
		if err := reclaim(s, tenants, apps); err != nil {
			t.Fatal(err)
		}
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 42 {
		t.Errorf("tenant after a held id: %v, %v; want id 42", red, err)
	}
	register(t, s, 1)
	if _, a, err := s.Resolve(ctx, node(1), 1, "blue", app.Labels); err != nil || a.Id != 17 {
		t.Errorf("held app: %v, %v; want id 17", a, err)
	}
	if _, a, err := s.Resolve(ctx, node(1), 1, "blue", map[string]string{"app": "db"}); err != nil || a.Id != 18 {
		t.Errorf("app after a held one: %v, %v; want id 18", a, err)
	}
}

// reclaim registers a node that holds these tenants and apps.
func reclaim(s *store.Store, tenants []*pilasterv1.Tenant, apps []*pilasterv1.App) error {
	_, err := s.Register(context.Background(), store.Registration{Node: node(77), Tenants: tenants, Apps: apps})
	return err
}

// A refused registration changes nothing. A registration that exceeds one transaction is recorded completely.
func testReclaimIsAtomic(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	var tenants []*pilasterv1.Tenant
	var apps []*pilasterv1.App
	for i := range 150 {
		tenants = append(
			tenants,
			&pilasterv1.Tenant{Name: fmt.Sprintf("lost%d", i), Ids: []*pilasterv1.TenantId{{Id: uint32(1000 + i)}}},
		)
		apps = append(
			apps,
			&pilasterv1.App{Tenant: "blue", Id: uint32(10 + i), Labels: map[string]string{"app": fmt.Sprint(i)}},
		)
	}
	before, err := etcd.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	conflict := &pilasterv1.Tenant{Name: "red", Ids: []*pilasterv1.TenantId{{Id: 1}}} // an id of blue
	refused(
		t,
		reclaim(s, append(tenants, conflict), apps),
		store.Refused,
		"id 1 of tenant red",
		"blue",
		"nothing more was accepted",
	)
	twice := append(apps, &pilasterv1.App{Tenant: "blue", Id: 10, Labels: map[string]string{"app": "other"}})
	refused(t, reclaim(s, tenants, twice), store.Refused, "app 10")
	after, err := etcd.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil || after.Count != before.Count || after.Header.Revision != before.Header.Revision {
		t.Errorf("after refusals the store has %d keys, %v; want %d and the same revision",
			after.Count, err, before.Count)
	}

	if err := reclaim(s, tenants, apps); err != nil {
		t.Fatal(err)
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 1150 {
		t.Errorf("tenant after held ids: %v, %v; want id 1150", red, err)
	}
	if _, a, err := s.Resolve(ctx, node(77), 1, "blue", map[string]string{"app": "new"}); err != nil || a.Id != 160 {
		t.Errorf("app after held ones: %v, %v; want id 160", a, err)
	}
	for i := range 150 {
		if _, a, err := s.Resolve(ctx, node(77), 1, "blue", map[string]string{"app": fmt.Sprint(i)}); err != nil ||
			a.Id != uint32(10+i) {
			t.Fatalf("held app of labels %d: %v, %v; want id %d", i, a, err, 10+i)
		}
		if owner, err := etcd.Get(ctx, fmt.Sprintf("/pilaster/1/tenant-ids/%d", 1000+i)); err != nil ||
			owner.Count != 1 {
			t.Fatalf("held id %d is not claimed: %v", 1000+i, err)
		}
	}
}

// The store refuses a node that contradicts it, and invalid reports.
func testReclaimRefuses(t *testing.T, etcd *clientv3.Client) {
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
		"id of another tenant":    {tenant: &pilasterv1.Tenant{Name: "red", Ids: ids(1)}, reason: store.Refused},
		"id the tenant never had": {tenant: &pilasterv1.Tenant{Name: "blue", Ids: ids(5)}, reason: store.Refused},
		"tenant of the same name": {
			tenant: &pilasterv1.Tenant{Name: "blue", Ids: ids(1), Created: older}, reason: store.Refused,
		},
		"id 0":         {tenant: &pilasterv1.Tenant{Name: "red", Ids: ids(0)}, reason: store.Invalid},
		"id too large": {tenant: &pilasterv1.Tenant{Name: "red", Ids: ids(1 << 24)}, reason: store.Invalid},
		"app of other labels": {
			app:    &pilasterv1.App{Tenant: "blue", Id: 1, Labels: map[string]string{"app": "db"}},
			reason: store.Refused,
		},
		"labels of another app": {
			app: &pilasterv1.App{Tenant: "blue", Id: 2, Labels: labels}, reason: store.Refused,
		},
		"reserved app":             {app: &pilasterv1.App{Tenant: "blue", Id: 0xff00}, reason: store.Invalid},
		"tenant name with a slash": {tenant: &pilasterv1.Tenant{Name: "a/b"}, reason: store.Invalid},
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
			refused(t, reclaim(s, tenants, apps), c.reason)
		})
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || red.Ids[0].Id != 2 {
		t.Errorf("tenant after refusals: %v, %v; want id 2", red, err)
	}
}
