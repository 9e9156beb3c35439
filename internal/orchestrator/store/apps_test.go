package store_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// appsTest is a store with tenant blue, which may have 16 apps, and with nodes that host it.
type appsTest struct {
	t *testing.T
	*store.Store
	etcd *clientv3.Client
	at   uint64 // sequence number of the last message of any node
}

func newAppsTest(t *testing.T, etcd *clientv3.Client, nodes int) *appsTest {
	b := &appsTest{t: t, Store: open(t, etcd, address.Plan{}), etcd: etcd}
	b.LimitApps(16)
	for n := range nodes {
		register(t, b.Store, n+1)
	}
	if _, err := b.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func appLabels(i int) map[string]string { return map[string]string{"app": fmt.Sprint("a", i)} }

func (b *appsTest) tryResolve(n, i int) (*pilasterv1.Tenant, *pilasterv1.App, error) {
	b.at++
	return b.Resolve(b.t.Context(), node(n), b.at, "blue", appLabels(i))
}

func (b *appsTest) resolve(n, i int) uint32 {
	b.t.Helper()
	_, app, err := b.tryResolve(n, i)
	if err != nil {
		b.t.Fatal(err)
	}
	return app.Id
}

func (b *appsTest) tenant() *pilasterv1.Tenant {
	b.t.Helper()
	resp, err := b.etcd.Get(b.t.Context(), "/pilaster/1/tenants/blue")
	found := new(pilasterv1.Tenant)
	if err != nil || protojson.Unmarshal(resp.Kvs[0].Value, found) != nil {
		b.t.Fatalf("blue in the store: %v, %v", resp, err)
	}
	return found
}

func (b *appsTest) round() *pilasterv1.RetiringApps { return b.tenant().RetiringApps }

// confirm reports that a node has applied the current round and keeps some apps.
func (b *appsTest) confirm(n int, keeps ...uint32) { b.report(n, b.round().GetRound(), keeps...) }

func (b *appsTest) report(n int, round uint64, keeps ...uint32) {
	b.t.Helper()
	b.at++
	report := &pilasterv1.Hosting{
		Tenant:     "blue",
		Accepts:    []uint32{1},
		Holds:      []uint32{1},
		HeardRound: round,
		KeepsApps:  keeps,
	}
	if _, err := b.RecordHosting(b.t.Context(), node(n), b.at, []*pilasterv1.Hosting{report}, nil); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsTest) reconcile() {
	b.t.Helper()
	if err := b.Reconcile(b.t.Context(), "blue"); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsTest) begin() {
	b.t.Helper()
	if err := b.BeginAppRound(b.t.Context(), "blue"); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsTest) count(dir string) int64 {
	b.t.Helper()
	resp, err := b.etcd.Get(b.t.Context(), "/pilaster/1/"+dir+"/blue/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		b.t.Fatal(err)
	}
	return resp.Count
}

// want compares the apps of the round, and whether nodes must delete them.
func (b *appsTest) want(forgotten bool, apps ...uint32) {
	b.t.Helper()
	if r := b.round(); !slices.Equal(r.GetApps(), apps) || r.GetForgotten() != forgotten {
		b.t.Fatalf("the round is %v, want apps %v, to be deleted: %v", r, apps, forgotten)
	}
}

// endQuarantine ends the quarantine of all ids, as quarantineTTL does.
func (b *appsTest) endQuarantine() {
	b.t.Helper()
	if _, err := b.etcd.Delete(b.t.Context(), "/pilaster/1/resting-apps/", clientv3.WithPrefix()); err != nil {
		b.t.Fatal(err)
	}
}

func upTo(n uint32) (all []uint32) {
	for i := range n {
		all = append(all, i+1)
	}
	return all
}

// Apps retire after two nodes confirmed both rounds, and their ids are quarantined and reused.
func testRetirement(t *testing.T, etcd *clientv3.Client) {
	b := newAppsTest(t, etcd, 2)
	for i := range 11 {
		b.resolve(1+i%2, i)
	}
	if b.begin(); b.round() != nil {
		t.Fatalf("a round begins with 11 apps of 16: %v", b.round())
	}
	b.resolve(1, 11)
	b.begin()
	b.want(false, upTo(12)...)
	first := b.round().Round

	b.confirm(1, 1, 3)
	b.reconcile()
	b.want(false, upTo(12)...) // the other node has not confirmed
	if got := b.resolve(2, 4); got != 5 {
		t.Fatalf("labels that are resolved again in the first round are app %d, want 5", got)
	}
	b.want(false, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12)
	b.confirm(2, 2)
	b.reconcile()
	b.want(true, 4, 6, 7, 8, 9, 10, 11, 12)
	if second := b.round().Round; second == first {
		t.Fatalf("the second round has number %d like the first", second)
	}

	b.confirm(1)
	if got := b.resolve(2, 5); got != 6 {
		t.Fatalf("labels that are resolved again in the second round are app %d, want 6", got)
	}
	b.report(2, first, 2)
	b.reconcile()
	b.want(true, 4, 7, 8, 9, 10, 11, 12) // node 2 confirmed only the first round
	b.confirm(2)
	b.reconcile()
	if b.round() != nil || b.count("apps") != 5 || b.count("app-ids") != 5 || b.count("resting-apps") != 7 {
		t.Fatalf(
			"round %v, %d apps with %d ids, %d in quarantine; want none, 5, 5, 7",
			b.round(),
			b.count("apps"),
			b.count("app-ids"),
			b.count("resting-apps"),
		)
	}

	for i, want := range []uint32{13, 14, 15, 16} {
		if got := b.resolve(1, 20+i); got != want {
			t.Fatalf("app %d, want %d: the ended ids are in quarantine", got, want)
		}
	}
	_, _, err := b.tryResolve(1, 30)
	if e := (*store.Error)(nil); !errors.As(err, &e) || e.Reason != store.Full ||
		!strings.Contains(err.Error(), "try again in 7 minutes") {
		t.Fatalf("no id is free: got %v, want Full", err)
	}
	b.endQuarantine()
	for i, want := range []uint32{4, 7, 8, 9, 10, 11} {
		if got := b.resolve(1, 30+i); got != want {
			t.Fatalf("app %d, want %d", got, want)
		}
	}
	if got := b.resolve(1, 3); got != 12 {
		t.Fatalf("the labels of the ended app 4 are app %d, want 12", got)
	}
}

// No app ends while a node has not confirmed the round: it is disconnected, has an earlier build, or is new to the
// tenant.
func testRetirementWithDisconnectedNodes(t *testing.T, etcd *clientv3.Client) {
	b := newAppsTest(t, etcd, 3)
	for i := range 12 {
		b.resolve(1, i)
	}
	b.resolve(2, 0)
	b.begin()
	b.confirm(1)
	b.report(2, 0) // an earlier build reports no round
	b.reconcile()
	b.want(false, upTo(12)...)
	b.confirm(2)
	b.resolve(3, 1) // a new node, which has not confirmed the round
	b.reconcile()
	b.want(false, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	if _, _, err := b.tryResolve(1, 20); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		b.resolve(1, 21+i)
	}
	if _, _, err := b.tryResolve(1, 30); err == nil || !strings.Contains(err.Error(), "delete them: n3") {
		t.Fatalf("no id is free: got %v, want an error that names n3", err)
	}
	if err := b.DeleteNode(t.Context(), "n3", false); err != nil {
		t.Fatal(err)
	}
	b.reconcile()
	b.want(true, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	b.confirm(1)
	// The last container of node 2 ends.
	if _, err := b.RecordHosting(t.Context(), node(2), b.at+1, nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.reconcile()
	if b.want(false); b.count("resting-apps") != 11 {
		t.Fatalf("%d ids in quarantine, want 11", b.count("resting-apps"))
	}
}

// More apps end than fit into one transaction.
func testRetirementOfManyApps(t *testing.T, etcd *clientv3.Client) {
	b := newAppsTest(t, etcd, 1)
	b.LimitApps(480)
	for i := range 400 {
		b.resolve(1, i)
	}
	b.begin()
	b.confirm(1, 7)
	b.reconcile()
	b.confirm(1)
	b.reconcile()
	if b.want(false); b.count("apps") != 1 || b.count("app-ids") != 1 || b.count("resting-apps") != 399 {
		t.Fatalf(
			"%d apps with %d ids, %d in quarantine; want 1, 1, 399",
			b.count("apps"),
			b.count("app-ids"),
			b.count("resting-apps"),
		)
	}
}

// appsNode is a node that follows the protocol of the rounds.
type appsNode struct {
	n         int
	known     map[uint32]string // labels, by app
	uses      map[uint32]int    // number of containers, by app
	round     *pilasterv1.RetiringApps
	confirmed uint64
}

// apply applies a tenant's record. The node confirms only rounds that it received on its stream.
func (n *appsNode) apply(of *pilasterv1.Tenant, onStream bool) {
	if n.round = of.RetiringApps; n.round.GetForgotten() {
		for _, app := range n.round.Apps {
			if n.uses[app] == 0 {
				delete(n.known, app)
			}
		}
	}
	if onStream && n.round != nil {
		n.confirmed = n.round.Round
	}
}

func (n *appsNode) keeps() (apps []uint32) {
	for _, app := range n.round.GetApps() {
		if _, known := n.known[app]; n.uses[app] > 0 || n.round.Forgotten && known {
			apps = append(apps, app)
		}
	}
	return apps
}

// Containers of many labels start and end on nodes that receive updates late and report late. No two nodes ever have
// different labels for one id.
func testRandomRetirement(t *testing.T, etcd *clientv3.Client) {
	b := newAppsTest(t, etcd, 3)
	r := rand.New(rand.NewPCG(7, 8))
	nodes := []*appsNode{{n: 1}, {n: 2}, {n: 3}}
	for _, n := range nodes {
		n.known, n.uses = map[uint32]string{}, map[uint32]int{}
	}
	labelsOf, allocated, reused, full := map[uint32]string{}, map[uint32]string{}, 0, 0
	for step := range 1500 {
		n := nodes[r.IntN(len(nodes))]
		switch r.IntN(7) {
		case 0, 1: // a container starts
			labels := r.IntN(60)
			name := fmt.Sprint(appLabels(labels))
			var app uint32
			for known, is := range n.known {
				if is == name && (!slices.Contains(n.round.GetApps(), known) || n.uses[known] > 0) {
					app = known
				}
			}
			if app == 0 {
				of, resolved, err := b.tryResolve(n.n, labels)
				if e := (*store.Error)(nil); errors.As(err, &e) && e.Reason == store.Full {
					full++
					continue
				} else if err != nil {
					t.Fatal(err)
				}
				app = resolved.Id
				if was := allocated[app]; was != "" && was != name {
					reused++
				}
				allocated[app], n.known[app] = name, name
				n.apply(of, false)
			}
			n.uses[app]++
		case 2, 3: // a container ends
			if apps := slices.Sorted(maps.Keys(n.uses)); len(apps) > 0 {
				app := apps[r.IntN(len(apps))]
				if n.uses[app]--; n.uses[app] == 0 {
					delete(n.uses, app)
				}
			}
		case 4: // the node receives the whole tenant and reports
			of := b.tenant()
			for app, labels := range b.apps() {
				n.known[app] = labels
			}
			n.apply(of, true)
			b.report(n.n, n.confirmed, n.keeps()...)
		case 5:
			b.reconcile()
			b.endQuarantine()
		case 6:
			b.begin()
		}
		clear(labelsOf)
		for _, n := range nodes {
			for app, labels := range n.known {
				if was := labelsOf[app]; was != "" && was != labels {
					t.Fatalf("step %d: app %d has labels %s and %s", step, app, was, labels)
				}
				labelsOf[app] = labels
			}
			for app := range n.uses {
				if n.known[app] == "" {
					t.Fatalf("step %d: node %d has deleted app %d, which one of its containers uses", step, n.n, app)
				}
			}
		}
	}
	if reused < 20 || full == 0 {
		t.Errorf("%d ids were reused, and %d times none was free; want at least 20 and 1", reused, full)
	}
}

// apps returns the labels of the tenant's apps, by id.
func (b *appsTest) apps() map[uint32]string {
	b.t.Helper()
	resp, err := b.etcd.Get(b.t.Context(), "/pilaster/1/apps/blue/", clientv3.WithPrefix())
	if err != nil {
		b.t.Fatal(err)
	}
	all := map[uint32]string{}
	for _, kv := range resp.Kvs {
		app := new(pilasterv1.App)
		if err := protojson.Unmarshal(kv.Value, app); err != nil {
			b.t.Fatal(err)
		}
		all[app.Id] = fmt.Sprint(app.Labels)
	}
	return all
}
