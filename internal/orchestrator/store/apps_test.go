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

// appsBed is a tenant of 16 apps at most, on nodes of which only the store knows.
type appsBed struct {
	t *testing.T
	*store.Store
	etcd *clientv3.Client
	at   uint64 // the last message of any node
}

func newAppsBed(t *testing.T, etcd *clientv3.Client, nodes int) *appsBed {
	b := &appsBed{t: t, Store: open(t, etcd, address.Plan{}), etcd: etcd}
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

func (b *appsBed) tryResolve(n, i int) (*pilasterv1.Tenant, *pilasterv1.App, error) {
	b.at++
	return b.Resolve(b.t.Context(), node(n), b.at, "blue", appLabels(i))
}

func (b *appsBed) resolve(n, i int) uint32 {
	b.t.Helper()
	_, app, err := b.tryResolve(n, i)
	if err != nil {
		b.t.Fatal(err)
	}
	return app.Id
}

func (b *appsBed) tenant() *pilasterv1.Tenant {
	b.t.Helper()
	resp, err := b.etcd.Get(b.t.Context(), "/pilaster/1/tenants/blue")
	found := new(pilasterv1.Tenant)
	if err != nil || protojson.Unmarshal(resp.Kvs[0].Value, found) != nil {
		b.t.Fatalf("blue in the store: %v, %v", resp, err)
	}
	return found
}

func (b *appsBed) round() *pilasterv1.RetiringApps { return b.tenant().RetiringApps }

// hears has a node say that it goes by the round there is.
func (b *appsBed) hears(n int, keeps ...uint32) { b.says(n, b.round().GetRound(), keeps...) }

func (b *appsBed) says(n int, round uint64, keeps ...uint32) {
	b.t.Helper()
	b.at++
	said := &pilasterv1.Hosting{
		Tenant:     "blue",
		Accepts:    []uint32{1},
		Holds:      []uint32{1},
		HeardRound: round,
		KeepsApps:  keeps,
	}
	if _, err := b.RecordHosting(b.t.Context(), node(n), b.at, []*pilasterv1.Hosting{said}, nil); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsBed) settle() {
	b.t.Helper()
	if err := b.Reconcile(b.t.Context(), "blue"); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsBed) ask() {
	b.t.Helper()
	if err := b.BeginAppRound(b.t.Context(), "blue"); err != nil {
		b.t.Fatal(err)
	}
}

func (b *appsBed) count(dir string) int64 {
	b.t.Helper()
	resp, err := b.etcd.Get(b.t.Context(), "/pilaster/1/"+dir+"/blue/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		b.t.Fatal(err)
	}
	return resp.Count
}

// want compares the round with apps, and whether they are to be forgotten.
func (b *appsBed) want(forgotten bool, apps ...uint32) {
	b.t.Helper()
	if r := b.round(); !slices.Equal(r.GetApps(), apps) || r.GetForgotten() != forgotten {
		b.t.Fatalf("the round is %v, want apps %v, to be forgotten: %v", r, apps, forgotten)
	}
}

// rested has all that rests be free, as it is after quarantineTTL.
func (b *appsBed) rested() {
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

// testAppsEnd follows numbers through their lives, as two nodes see them.
func testAppsEnd(t *testing.T, etcd *clientv3.Client) {
	b := newAppsBed(t, etcd, 2)
	for i := range 11 {
		b.resolve(1+i%2, i)
	}
	if b.ask(); b.round() != nil {
		t.Fatal("nodes are asked about 11 apps of 16")
	}
	b.resolve(1, 11)
	b.ask()
	b.want(false, upTo(12)...)
	first := b.round().Round

	b.hears(1, 1, 3)
	b.settle()
	b.want(false, upTo(12)...) // the other has not answered
	if got := b.resolve(2, 4); got != 5 {
		t.Fatalf("labels that come back while nodes are asked are app %d, want 5", got)
	}
	b.want(false, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12)
	b.hears(2, 2)
	b.settle()
	b.want(true, 4, 6, 7, 8, 9, 10, 11, 12)
	if second := b.round().Round; second == first {
		t.Fatal("to be asked and to forget is one round")
	}

	b.hears(1)
	if got := b.resolve(2, 5); got != 6 {
		t.Fatalf("labels that come back while they are forgotten are app %d, want 6", got)
	}
	b.says(2, first, 2)
	b.settle()
	b.want(true, 4, 7, 8, 9, 10, 11, 12) // that was an answer to what was before
	b.hears(2)
	b.settle()
	if b.round() != nil || b.count("apps") != 5 || b.count("app-ids") != 5 || b.count("resting-apps") != 7 {
		t.Fatalf(
			"round %v, %d apps with %d numbers, %d rest; want none, 5, 5, 7",
			b.round(),
			b.count("apps"),
			b.count("app-ids"),
			b.count("resting-apps"),
		)
	}

	for i, want := range []uint32{13, 14, 15, 16} {
		if got := b.resolve(1, 20+i); got != want {
			t.Fatalf("app %d, want %d: others rest", got, want)
		}
	}
	_, _, err := b.tryResolve(1, 30)
	if e := (*store.Error)(nil); !errors.As(err, &e) || e.Reason != store.Full ||
		!strings.Contains(err.Error(), "try again in 7 minutes") {
		t.Fatalf("no number is free: %v", err)
	}
	b.rested()
	for i, want := range []uint32{4, 7, 8, 9, 10, 11} {
		if got := b.resolve(1, 30+i); got != want {
			t.Fatalf("app %d, want %d", got, want)
		}
	}
	if got := b.resolve(1, 3); got != 12 {
		t.Fatalf("labels whose app 4 ended are app %d, want 12", got)
	}
}

// testAppsOfAwayNodes has nothing end that a node may have which says nothing: it is away, of an earlier build, or new
// to the tenant.
func testAppsOfAwayNodes(t *testing.T, etcd *clientv3.Client) {
	b := newAppsBed(t, etcd, 3)
	for i := range 12 {
		b.resolve(1, i)
	}
	b.resolve(2, 0)
	b.ask()
	b.hears(1)
	b.says(2, 0) // an earlier build says nothing of rounds
	b.settle()
	b.want(false, upTo(12)...)
	b.hears(2)
	b.resolve(3, 1) // and this one has not heard
	b.settle()
	b.want(false, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	if _, _, err := b.tryResolve(1, 20); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		b.resolve(1, 21+i)
	}
	if _, _, err := b.tryResolve(1, 30); err == nil || !strings.Contains(err.Error(), "away: n3") {
		t.Fatalf("no number is free and n3 is waited for: %v", err)
	}
	if err := b.DeleteNode(t.Context(), "n3", false); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.want(true, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	b.hears(1)
	if _, err := b.RecordHosting(t.Context(), node(2), b.at+1, nil, []string{"blue"}); err != nil { // its last container has gone
		t.Fatal(err)
	}
	b.settle()
	if b.want(false); b.count("resting-apps") != 11 {
		t.Fatalf("%d numbers rest, want 11", b.count("resting-apps"))
	}
}

// testManyAppsEnd has more end than one transaction takes.
func testManyAppsEnd(t *testing.T, etcd *clientv3.Client) {
	b := newAppsBed(t, etcd, 1)
	b.LimitApps(480)
	for i := range 400 {
		b.resolve(1, i)
	}
	b.ask()
	b.hears(1, 7)
	b.settle()
	b.hears(1)
	b.settle()
	if b.want(false); b.count("apps") != 1 || b.count("app-ids") != 1 || b.count("resting-apps") != 399 {
		t.Fatalf(
			"%d apps with %d numbers, %d rest; want 1, 1, 399",
			b.count("apps"),
			b.count("app-ids"),
			b.count("resting-apps"),
		)
	}
}

// appsNode is a node as the protocol wants it.
type appsNode struct {
	n     int
	known map[uint32]string // apps, with their labels
	uses  map[uint32]int    // containers
	round *pilasterv1.RetiringApps
	heard uint64
}

func (n *appsNode) takes(of *pilasterv1.Tenant, told bool) {
	if n.round = of.RetiringApps; n.round.GetForgotten() {
		for _, app := range n.round.Apps {
			if n.uses[app] == 0 {
				delete(n.known, app)
			}
		}
	}
	if told && n.round != nil {
		n.heard = n.round.Round
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

// testAppsRandomly has containers of many labels come and go at nodes that hear late and say late. No number is ever
// known by two meanings.
func testAppsRandomly(t *testing.T, etcd *clientv3.Client) {
	b := newAppsBed(t, etcd, 3)
	r := rand.New(rand.NewPCG(7, 8))
	nodes := []*appsNode{{n: 1}, {n: 2}, {n: 3}}
	for _, n := range nodes {
		n.known, n.uses = map[uint32]string{}, map[uint32]int{}
	}
	meaning, given, again, full := map[uint32]string{}, map[uint32]string{}, 0, 0
	for step := range 1500 {
		n := nodes[r.IntN(len(nodes))]
		switch r.IntN(7) {
		case 0, 1: // a container comes
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
				if was := given[app]; was != "" && was != name {
					again++
				}
				given[app], n.known[app] = name, name
				n.takes(of, false)
			}
			n.uses[app]++
		case 2, 3: // one goes
			if apps := slices.Sorted(maps.Keys(n.uses)); len(apps) > 0 {
				app := apps[r.IntN(len(apps))]
				if n.uses[app]--; n.uses[app] == 0 {
					delete(n.uses, app)
				}
			}
		case 4: // it is told all there is, and says how it is
			of := b.tenant()
			for app, labels := range b.apps() {
				n.known[app] = labels
			}
			n.takes(of, true)
			b.says(n.n, n.heard, n.keeps()...)
		case 5:
			b.settle()
			b.rested()
		case 6:
			b.ask()
		}
		clear(meaning)
		for _, n := range nodes {
			for app, labels := range n.known {
				if was := meaning[app]; was != "" && was != labels {
					t.Fatalf("step %d: app %d is %s and %s", step, app, was, labels)
				}
				meaning[app] = labels
			}
			for app := range n.uses {
				if n.known[app] == "" {
					t.Fatalf("step %d: node %d has forgotten app %d, which a container of it is of", step, n.n, app)
				}
			}
		}
	}
	if again < 20 || full == 0 {
		t.Errorf("%d numbers went to other labels, and %d times none was free: that tells little", again, full)
	}
}

// apps are those there are, with their labels.
func (b *appsBed) apps() map[uint32]string {
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
