package store_test

import (
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

func ids(list ...int) (out []*pilasterv1.TenantId) {
	for _, id := range list {
		out = append(out, &pilasterv1.TenantId{Id: uint32(max(id, -id)), OnlyAccepted: id < 0})
	}
	return out
}

// list formats ids. An id that is only accepted has a minus sign.
func list(ids []*pilasterv1.TenantId) string {
	var words []string
	for _, id := range ids {
		n := int(id.Id)
		if id.OnlyAccepted {
			n = -n
		}
		words = append(words, fmt.Sprint(n))
	}
	return strings.Join(words, " ")
}

func TestDue(t *testing.T) {
	type u = []uint32
	type hosting = []*pilasterv1.Hosting
	of := func(node string, accepts, holds u) *pilasterv1.Hosting {
		return &pilasterv1.Hosting{Node: node, Accepts: accepts, Holds: holds}
	}
	for name, c := range map[string]struct {
		ids     []*pilasterv1.TenantId
		hosting hosting
		want    string // empty: no step is due
	}{
		"one id":                      {ids(1), hosting{of("n1", u{1}, u{1})}, ""},
		"no node hosts":               {ids(1, -2), nil, "1 2"},
		"no node hosts, next step":    {ids(1, 2), nil, "2"},
		"a node does not accept 2":    {ids(1, -2), hosting{of("n1", u{1, 2}, u{1}), of("n2", u{1}, u{1})}, ""},
		"all nodes accept 2":          {ids(1, -2), hosting{of("n1", u{1, 2}, u{1}), of("n2", u{1, 2}, u{1})}, "1 2"},
		"a node has not reported":     {ids(1, -2), hosting{of("n1", u{1, 2}, u{1}), of("n2", nil, nil)}, ""},
		"such a node may hold 1":      {ids(1, 2), hosting{of("n2", nil, nil)}, ""},
		"old id held":                 {ids(1, 2), hosting{of("n1", u{1, 2}, u{2}), of("n2", u{1, 2}, u{1, 2})}, ""},
		"old id not held":             {ids(1, 2), hosting{of("n1", u{1, 2}, u{2}), of("n2", u{1, 2}, u{2})}, "2"},
		"second id not held":          {ids(1, 2, 3), hosting{of("n1", u{1, 2, 3}, u{1, 3})}, "1 3"},
		"current id is never removed": {ids(1, 2, -3), hosting{of("n1", u{1, 2}, u{1})}, ""},
		"two steps at once":           {ids(1, 2, -3), hosting{of("n1", u{1, 2, 3}, u{2})}, "2 3"},
	} {
		if got := list(store.Due(&pilasterv1.Tenant{Ids: c.ids}, c.hosting)); got != c.want {
			t.Errorf("%s: ids %q are due, want %q", name, got, c.want)
		}
	}
}

// testRotation rotates the key of a tenant that two nodes host.
func testRotation(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	register(t, s, 1)
	register(t, s, 2)
	made, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	current := func() *pilasterv1.Tenant {
		t.Helper()
		resp, err := etcd.Get(ctx, "/pilaster/1/tenants/blue")
		found := new(pilasterv1.Tenant)
		if err != nil || protojson.Unmarshal(resp.Kvs[0].Value, found) != nil {
			t.Fatalf("blue in the store: %v, %v", resp, err)
		}
		return found
	}
	want := func(ids string) {
		t.Helper()
		if err := s.Reconcile(ctx, "blue"); err != nil {
			t.Fatal(err)
		}
		if got := list(current().Ids); got != ids {
			t.Fatalf("ids %q, want %q", got, ids)
		}
	}
	report := func(n int, sequence uint64, accepts, holds []uint32) []string {
		t.Helper()
		is, err := s.RecordHosting(
			ctx,
			node(n),
			sequence,
			[]*pilasterv1.Hosting{{Tenant: "blue", Accepts: accepts, Holds: holds}},
			nil,
		)
		if err != nil {
			t.Fatal(err)
		}
		return is.Overtaken
	}
	rotate := func() *pilasterv1.Tenant {
		t.Helper()
		r, err := s.RotateKey(ctx, "blue")
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	type u = []uint32

	// A node that resolves a tenant counts as hosting it, before its first report.
	if _, _, err := s.Resolve(ctx, node(1), 5, "blue", nil); err != nil {
		t.Fatal(err)
	}
	first := rotate()
	if again := rotate(); list(again.Ids) != "1 -2" || again.Changes != first.Changes ||
		string(again.Ids[1].Key) != string(first.Ids[1].Key) {
		t.Errorf("a repeated rotation returned %v, want %v", again, first)
	}
	if string(first.Ids[1].Key) == string(made.Ids[0].Key) || len(first.Ids[1].Key) != 16 {
		t.Error("the new id does not have a new key")
	}
	want("1 -2")
	// A node that starts hosting during the rotation receives both ids and counts as accepting both before its report.
	if _, _, err := s.Resolve(ctx, node(2), 1, "blue", nil); err != nil {
		t.Fatal(err)
	}
	want("1 -2")
	report(1, 6, u{1, 2}, u{1})
	want("1 2")

	// Overtaken messages change nothing.
	if late := report(1, 4, u{2}, u{2}); len(late) != 1 {
		t.Errorf("an overtaken report was recorded; overtaken are %v", late)
	}
	if _, err := s.RecordHosting(ctx, node(1), 5, nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	report(2, 3, u{1, 2}, u{2})
	want("1 2")
	refused(t, s.DeleteTenant(ctx, "blue"), store.Refused, "n1, n2")
	report(1, 9, u{1, 2}, u{2})
	want("2")
	if tenant := current(); tenant.Changes != 4 || string(tenant.Ids[0].Key) != string(first.Ids[1].Key) {
		t.Errorf("after the rotation the tenant is %v, want change 4 and the new key", tenant)
	}

	// A tenant has 4 ids at most, ids are never reused, and ForceKey does not wait for a disconnected node.
	rotate()
	report(1, 10, u{2, 3}, u{2})
	want("2 -3")
	if _, err := s.ForceKey(ctx, "blue", 3); err != nil {
		t.Fatal(err)
	}
	report(1, 11, u{2, 3}, u{2, 3})
	report(2, 11, u{2, 3}, u{2, 3})
	for i, id := range []uint32{4, 5} {
		if got := list(rotate().Ids); !strings.HasSuffix(got, fmt.Sprint("-", id)) {
			t.Fatalf("rotated to %q, want the last id -%d", got, id)
		}
		for n := range 2 {
			report(n+1, uint64(12+i), append(u{2, 3, 4}, id), append(u{2, 3, 4}, id))
		}
		if err := s.Reconcile(ctx, "blue"); err != nil {
			t.Fatal(err)
		}
	}
	want("2 3 4 5")
	_, err = s.RotateKey(ctx, "blue")
	refused(t, err, store.Refused, "tenant blue has 4 ids", "nothing was changed", "id 2 is held by n1, n2")
	_, err = s.RotateKey(ctx, "red")
	refused(t, err, store.NotFound, "red")
	_, err = s.ForceKey(ctx, "blue", 99)
	refused(t, err, store.NotFound, "no id 99")
	if tenant, err := s.ForceKey(ctx, "blue", 3); err != nil || list(tenant.Ids) != "2 3 4 5" {
		t.Errorf("ForceKey of an old id: %v, %v; want no change", tenant, err)
	}

	// A deleted node holds no id.
	if err := s.DeleteNode(ctx, "n1", false); err != nil {
		t.Fatal(err)
	}
	report(2, 20, u{2, 3, 4, 5}, u{3, 5})
	want("3 5")
	if _, _, err := s.Resolve(ctx, node(1), 99, "blue", nil); err == nil {
		t.Error("Resolve of a deleted node succeeded")
	}
}

// A node is refused if it holds an id that the tenant does not have, but not if it only accepts such an id.
func testReclaimOfIDs(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	held := func(changes uint64, list ...int) []*pilasterv1.Tenant {
		return []*pilasterv1.Tenant{{Name: "blue", Ids: ids(list...), Changes: changes}}
	}
	refused(t, reclaim(s, held(9, 1, 7), nil), store.Refused, "id 7 of tenant blue", "does not have it")
	if err := reclaim(s, held(9, 1, -7), nil); err != nil {
		t.Fatal(err)
	}
	// The change counter is above the one that the node reported.
	rotated, err := s.RotateKey(ctx, "blue")
	if err != nil || list(rotated.Ids) != "1 -8" || rotated.Changes <= 9 {
		t.Errorf("rotated %v, %v; want ids 1 and -8 and a change above 9", rotated, err)
	}
	refused(t, reclaim(s, held(9, 1, 7), nil), store.Refused, "id 7 of tenant blue", "does not have it")
}

// If a node invents ids, the store loses only these ids, not the lower ones. A node can invent a limited number of ids.
func testReclaimOfInventedIDs(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	if err := reclaim(s, []*pilasterv1.Tenant{{Name: "lost", Ids: ids(3, 0xffffff)}}, nil); err != nil {
		t.Fatal(err)
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || list(red.Ids) != "4" {
		t.Errorf("tenant after an invented id: %v, %v; want id 4", red, err)
	}
	for i, id := range []uint32{2, uint32(address.FirstReservedApp) - 1} {
		app := &pilasterv1.App{Tenant: "blue", Id: id, Labels: map[string]string{"held": fmt.Sprint(i)}}
		if err := reclaim(s, nil, []*pilasterv1.App{app}); err != nil {
			t.Fatal(err)
		}
	}
	if _, app, err := s.Resolve(ctx, node(77), 1, "blue", nil); err != nil || app.Id != 3 {
		t.Errorf("app after an invented one: %v, %v; want id 3", app, err)
	}
	refused(
		t,
		reclaim(s, []*pilasterv1.Tenant{{Name: "blue", Changes: 1<<64 - 1}}, nil),
		store.Refused,
		"changes of tenant blue",
		"nothing more was accepted",
	)
	if rotated, err := s.RotateKey(ctx, "blue"); err != nil || list(rotated.Ids) != "1 -5" || rotated.Changes != 2 {
		t.Errorf("rotated %v, %v; want ids 1 and -5 and change 2", rotated, err)
	}

	// A node that invents more and more ids is refused.
	var err error
	for id := 50_000; err == nil && id < int(address.MaxTenantID); id += 50_000 {
		err = reclaim(s, []*pilasterv1.Tenant{{Name: "lost", Ids: ids(id)}}, nil)
	}
	refused(t, err, store.Refused, "n77", "node delete n77", "nothing more was accepted")
	if green, err := s.CreateTenant(ctx, "green", 0); err != nil || list(green.Ids) != "100001" {
		t.Errorf("tenant after many invented ids: %v, %v; want id 100001", green, err)
	}
	if err := reclaim(s, nil, nil); err != nil {
		t.Errorf("register the same node without invented ids: %v", err)
	}
}
