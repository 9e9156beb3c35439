package store_test

import (
	"fmt"
	"maps"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func testTenants(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", pilasterv1.Addressing_ADDRESSING_UNSPECIFIED)
	if err != nil {
		t.Fatal(err)
	}
	if blue.Ids[0].Id != 1 || len(blue.Ids[0].Key) != 16 ||
		blue.Addressing != pilasterv1.Addressing_ADDRESSING_ENCRYPTED {
		t.Errorf("blue is %v, want id 1, a key and encrypted addressing", blue)
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
		t.Errorf("blue created again is %v, %v; want another id and key", again, err)
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
			t.Errorf("resolved tenant %v, app %v; want a key and labels %v", tenant, app, labels)
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
	if err := reclaim(s, nil, []*pilasterv1.App{last}); err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Put(ctx, "/pilaster/1/marks/app/blue", "65278"); err != nil { // as if all others were allocated
		t.Fatal(err)
	}
	if got := resolve(map[string]string{"app": "last-but-one"}); got != 0xfefe {
		t.Errorf("the last free app is %d, want 0xfefe", got)
	}
	// Allocation skips the held app and those at the beginning.
	if got := resolve(map[string]string{"app": "one-more"}); got != 3 {
		t.Errorf("the app after the last is %d, want 3", got)
	}
	if got := resolve(web); got != 1 {
		t.Errorf("the labels of app 1 are app %d", got)
	}
}

func testHosting(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	var names []string
	for i := range 130 { // more than fit into one transaction
		names = append(names, fmt.Sprintf("t%d", i))
		if _, err := s.CreateTenant(ctx, names[i], 0); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.RecordHosting(ctx, node(1), 1, reports(names[0]), nil)
	refused(t, err, store.Refused, "not registered")
	register(t, s, 1)
	register(t, s, 2)
	for n := range 2 {
		if _, err := s.RecordHosting(ctx, node(n+1), 1, reports(append(names, "no-such-tenant")...), nil); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, s.DeleteTenant(ctx, "t0"), store.Refused, "n1, n2")
	if _, err := s.RecordHosting(ctx, node(1), 2, nil, names[:1]); err != nil {
		t.Fatal(err)
	}
	refused(t, s.DeleteTenant(ctx, "t0"), store.Refused, "on n2;")
	if err := s.DeleteNode(ctx, "n2", false); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteTenant(ctx, "t0"); err != nil {
		t.Errorf("delete a tenant that no node hosts: %v", err)
	}
	refused(t, s.DeleteTenant(ctx, "t129"), store.Refused, "on n1;")
}

// reports returns a node's reports that it hosts tenants but uses no id.
func reports(tenants ...string) []*pilasterv1.Hosting {
	var all []*pilasterv1.Hosting
	for _, name := range tenants {
		all = append(all, &pilasterv1.Hosting{Tenant: name})
	}
	return all
}
