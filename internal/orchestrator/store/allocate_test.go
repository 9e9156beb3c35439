package store_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// TestStore runs everything on one server of each kind; each part has the store to itself.
func TestStore(t *testing.T) {
	parts := map[string]func(t *testing.T, etcd *clientv3.Client){
		"plan": testPlan, "older cluster": testOlderCluster, "nodes": testNodes, "prefixes run out": testPrefixesRunOut, "tenants": testTenants, "apps": testApps,
		"recall": testRecall, "recall refuses": testRecallRefuses, "recall is whole": testRecallIsWhole, "many in few requests": testManyInFewRequests, "hosting": testHosting, "rotation": testRotation, "recall of ids": testRecallOfIds, "recall of nonsense": testRecallOfNonsense, "two stores": testTwoStores,
		"watch": testWatch, "sleeper": store.SleeperTest, "compacted": store.CompactedTest,
		"hosted meanwhile": store.HostedMeanwhileTest, "deleted meanwhile": store.DeletedMeanwhileTest, "large change": store.LargeChangeTest, "others between": store.OthersBetweenTest,
		"crash": store.CrashTest, "half a deletion": store.HalfDeletionTest, "deletion among changes": store.DeletionAmongChangesTest,
		"together": store.TogetherTest, "too many wait": store.TooManyWaitTest, "refused in vain": store.RefusedInVainTest, "another is first": store.OtherFirstTest, "refused on what is old": store.RefusedOnOldTest, "after a sweep": store.AfterSweepTest, "large in company": store.LargeInCompanyTest, "given up": store.GivenUpTest, "panic in company": store.PanicInCompanyTest, "forgotten lease": store.ForgottenLeaseTest,
		"subnets": testSubnets, "addresses": testAddresses, "rest": testRest, "mappings recalled": testRecallMappings, "pages": testPages, "hardly anything free": testHardlyAnythingFree, "families amid each other": testFamiliesAmidEachOther, "given by two": testGivenByTwo, "the gateway's id": testGatewayID,
		"regions": testRegions, "many regions": testManyRegions,
		"services": testServices, "publications": testPublications, "many publications": testManyPublications, "publications recalled": testRecallPublications, "publications of earlier builds": testEarlierPublications,
		"policies": testPolicies, "many policies together": testManyPolicies, "long policies": testLongPolicies, "overrides": testOverrides, "enforcing": testEnforcing, "enforcing meets": testEnforcingMeets,
		"apps end": testAppsEnd, "apps of nodes that are away": testAppsOfAwayNodes, "many apps end": testManyAppsEnd, "apps as they may come": testAppsRandomly,
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
	node, err := s.Register(t.Context(), store.Registration{Node: node(n), Gateway: true})
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
	_, err = store.Open(t.Context(), etcd, address.Plan{Gateway4: netip.MustParsePrefix("10.0.0.0/8")}, slog.Default())
	refused(t, err, store.Refused, "--gateway-prefix", "10.0.0.0/8", "100.64.0.0/10")
}

// A cluster from before gateway prefixes has the defaults, but for one that it has something else in.
func testOlderCluster(t *testing.T, etcd *clientv3.Client) {
	for base, want6 := range map[string]netip.Prefix{
		"fd11::/48":           address.DefaultPlan().Gateway6,
		"fd70:696c:6700::/40": {},
	} {
		plan := address.Plan{
			Base:     netip.MustParsePrefix(base),
			Gateway4: netip.MustParsePrefix("10.0.0.0/8"),
			Gateway6: netip.MustParsePrefix("fd99::/48"),
		}
		open(t, etcd, plan)
		record, err := etcd.Get(t.Context(), "/pilaster/1/cluster")
		if err != nil {
			t.Fatal(err)
		}
		older := regexp.MustCompile(`,"gateways":\{[^}]*\}`).ReplaceAll(record.Kvs[0].Value, nil)
		if len(older) == len(record.Kvs[0].Value) {
			t.Fatalf("no gateways in %s", older)
		}
		if _, err := etcd.Put(t.Context(), "/pilaster/1/cluster", string(older)); err != nil {
			t.Fatal(err)
		}
		if got := open(t, etcd, address.Plan{}).Cluster().Plan; got.Gateway4 != address.DefaultPlan().Gateway4 ||
			got.Gateway6 != want6 {
			t.Errorf("base %s: plan %v", base, got)
		}
		if _, err := etcd.Delete(t.Context(), "/", clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
	}
}
