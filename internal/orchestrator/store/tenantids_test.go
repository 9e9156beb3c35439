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

// list writes ids as above: one below 0 is only accepted.
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

func says(node string, accepts, holds []uint32) *pilasterv1.Hosting {
	return &pilasterv1.Hosting{Node: node, Accepts: accepts, Holds: holds}
}

func TestDue(t *testing.T) {
	type u = []uint32
	for name, c := range map[string]struct {
		ids     []*pilasterv1.TenantId
		hosting []*pilasterv1.Hosting
		want    string // empty: nothing is due
	}{
		"one id":                          {ids(1), []*pilasterv1.Hosting{says("n1", u{1}, u{1})}, ""},
		"nobody hosts":                    {ids(1, -2), nil, "1 2"},
		"nobody hosts, after that":        {ids(1, 2), nil, "2"},
		"a node lacks it":                 {ids(1, -2), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{1}), says("n2", u{1}, u{1})}, ""},
		"all accept it":                   {ids(1, -2), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{1}), says("n2", u{1, 2}, u{1})}, "1 2"},
		"a node has said nothing":         {ids(1, -2), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{1}), says("n2", nil, nil)}, ""},
		"may be held by one that did not": {ids(1, 2), []*pilasterv1.Hosting{says("n2", nil, nil)}, ""},
		"old one is held":                 {ids(1, 2), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{2}), says("n2", u{1, 2}, u{1, 2})}, ""},
		"old one is free":                 {ids(1, 2), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{2}), says("n2", u{1, 2}, u{2})}, "2"},
		"one between is free":             {ids(1, 2, 3), []*pilasterv1.Hosting{says("n1", u{1, 2, 3}, u{1, 3})}, "1 3"},
		"the current one is never":        {ids(1, 2, -3), []*pilasterv1.Hosting{says("n1", u{1, 2}, u{1})}, ""},
		"two steps at once":               {ids(1, 2, -3), []*pilasterv1.Hosting{says("n1", u{1, 2, 3}, u{2})}, "2 3"},
	} {
		if got := list(store.Due(&pilasterv1.Tenant{Ids: c.ids}, c.hosting)); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// testRotation follows a tenant's ids through their lives, as two nodes see them.
func testRotation(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	register(t, s, 1)
	register(t, s, 2)
	made, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	now := func() *pilasterv1.Tenant {
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
		if got := list(now().Ids); got != ids {
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

	// Who asks for a tenant counts at once, before it has said anything.
	if _, _, err := s.Resolve(ctx, node(1), 5, "blue", nil); err != nil {
		t.Fatal(err)
	}
	first := rotate()
	if again := rotate(); list(again.Ids) != "1 -2" || again.Changes != first.Changes ||
		string(again.Ids[1].Key) != string(first.Ids[1].Key) {
		t.Errorf("repeated: %v after %v", again, first)
	}
	if string(first.Ids[1].Key) == string(made.Ids[0].Key) || len(first.Ids[1].Key) != 16 {
		t.Error("the new id has no key of its own")
	}
	want("1 -2")
	// One that comes to host meanwhile gets both, and is taken at its word before it speaks.
	if _, _, err := s.Resolve(ctx, node(2), 1, "blue", nil); err != nil {
		t.Fatal(err)
	}
	want("1 -2")
	report(1, 6, u{1, 2}, u{1})
	want("1 2")

	// Messages that were overtaken change nothing, in particular not that a node hosts.
	if late := report(1, 4, u{2}, u{2}); len(late) != 1 {
		t.Errorf("an overtaken report was taken: %v", late)
	}
	if _, err := s.RecordHosting(ctx, node(1), 5, nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	report(2, 3, u{1, 2}, u{2})
	want("1 2")
	refused(t, s.DeleteTenant(ctx, "blue"), store.Refused, "n1, n2")
	report(1, 9, u{1, 2}, u{2})
	want("2")
	if tenant := now(); tenant.Changes != 4 || string(tenant.Ids[0].Key) != string(first.Ids[1].Key) {
		t.Errorf("in the end %v", tenant)
	}

	// Not more than a packet path takes; ids are never used again; a node that is away can be done without.
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
			t.Fatalf("rotated to %q", got)
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
		t.Errorf("force of an old id: %v, %v", tenant, err)
	}

	// A node that is gone for good holds nothing.
	if err := s.DeleteNode(ctx, "n1", false); err != nil {
		t.Fatal(err)
	}
	report(2, 20, u{2, 3, 4, 5}, u{3, 5})
	want("3 5")
	if _, _, err := s.Resolve(ctx, node(1), 99, "blue", nil); err == nil {
		t.Error("a deleted node hosts again")
	}
}

// Of what a node holds, only what its containers use stands against the cluster's word.
func testRecallOfIds(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	held := func(changes uint64, list ...int) []*pilasterv1.Tenant {
		return []*pilasterv1.Tenant{{Name: "blue", Ids: ids(list...), Changes: changes}}
	}
	refused(t, recall(s, held(9, 1, 7), nil), store.Refused, "id 7 of tenant blue", "does not have it")
	if err := recall(s, held(9, 1, -7), nil); err != nil {
		t.Fatal(err)
	}
	// What the node has heard of lies behind.
	rotated, err := s.RotateKey(ctx, "blue")
	if err != nil || list(rotated.Ids) != "1 -8" || rotated.Changes <= 9 {
		t.Errorf("rotated %v, %v", rotated, err)
	}
	refused(t, recall(s, held(9, 1, 7), nil), store.Refused, "id 7 of tenant blue", "does not have it")
}

// What one node makes up costs the cluster no more than what it names.
func testRecallOfNonsense(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	if err := recall(s, []*pilasterv1.Tenant{{Name: "lost", Ids: ids(3, 0xffffff)}}, nil); err != nil {
		t.Fatal(err)
	}
	if red, err := s.CreateTenant(ctx, "red", 0); err != nil || list(red.Ids) != "4" {
		t.Errorf("a tenant after an id that nobody can have handed out: %v, %v", red, err)
	}
	for i, id := range []uint32{2, uint32(address.FirstReservedApp) - 1} {
		if err := recall(s, nil, []*pilasterv1.App{{Tenant: "blue", Id: id, Labels: map[string]string{"held": fmt.Sprint(i)}}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, app, err := s.Resolve(ctx, node(77), 1, "blue", nil); err != nil || app.Id != 3 {
		t.Errorf("an app after one that nobody can have handed out: %v, %v", app, err)
	}
	refused(
		t,
		recall(s, []*pilasterv1.Tenant{{Name: "blue", Changes: 1<<64 - 1}}, nil),
		store.Refused,
		"changes of tenant blue",
		"nothing more was accepted",
	)
	if rotated, err := s.RotateKey(ctx, "blue"); err != nil || list(rotated.Ids) != "1 -5" || rotated.Changes != 2 {
		t.Errorf("rotated %v, %v", rotated, err)
	}

	// Nor does it when it makes up more and more.
	var err error
	for id := 50_000; err == nil && id < int(address.MaxTenantID); id += 50_000 {
		err = recall(s, []*pilasterv1.Tenant{{Name: "lost", Ids: ids(id)}}, nil)
	}
	refused(t, err, store.Refused, "n77", "node delete n77", "nothing more was accepted")
	if green, err := s.CreateTenant(ctx, "green", 0); err != nil || list(green.Ids) != "100001" {
		t.Errorf("a tenant after many made-up ids: %v, %v", green, err)
	}
	if err := recall(s, nil, nil); err != nil {
		t.Errorf("the same node without them: %v", err)
	}
}
