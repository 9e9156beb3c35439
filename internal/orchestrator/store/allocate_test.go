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

// TestStore runs the tests of the store on one server of each kind of etcd. Each test begins with an empty etcd.
func TestStore(t *testing.T) {
	parts := map[string]func(t *testing.T, etcd *clientv3.Client){
		"plan":                          testPlan,
		"older cluster":                 testOlderCluster,
		"nodes":                         testNodes,
		"prefixes run out":              testPrefixesRunOut,
		"tenants":                       testTenants,
		"apps":                          testApps,
		"reclaim":                       testReclaim,
		"reclaim refuses":               testReclaimRefuses,
		"reclaim is atomic":             testReclaimIsAtomic,
		"few requests for many tenants": testFewRequestsForManyTenants,
		"hosting":                       testHosting,
		"rotation":                      testRotation,
		"reclaim of ids":                testReclaimOfIDs,
		"reclaim of invented ids":       testReclaimOfInventedIDs,
		"two stores":                    testTwoStores,
		"watch":                         testWatch,

		"suspended decision":    store.SuspendedTest,
		"compacted":             store.CompactedTest,
		"concurrent hosting":    store.ConcurrentHostingTest,
		"concurrent deletion":   store.ConcurrentDeletionTest,
		"large change":          store.LargeChangeTest,
		"changes between parts": store.ChangesBetweenPartsTest,
		"crash":                 store.CrashTest,
		"partial deletion":      store.PartialDeletionTest,
		"deletion with changes": store.DeletionWithChangesTest,

		"batch":                         store.BatchTest,
		"full queue":                    store.FullQueueTest,
		"refusal after a failed commit": store.RefusalAfterFailedCommitTest,
		"conflict":                      store.ConflictTest,
		"refusal after a conflict":      store.RefusalAfterConflictTest,
		"after a range deletion":        store.AfterRangeDeletionTest,
		"large change in a batch":       store.LargeChangeInBatchTest,
		"canceled":                      store.CanceledTest,
		"panic in a batch":              store.PanicInBatchTest,
		"lost lease":                    store.LostLeaseTest,

		"subnets":               testSubnets,
		"identifiers":           testIdentifiers,
		"reserved prefix":       testReservation,
		"address keys":          testAddressKeys,
		"address keys, nimitz":  testAddressKeysNimitz,
		"addresses":             testAddresses,
		"quarantine":            testQuarantine,
		"reclaim of mappings":   testReclaimMappings,
		"pages":                 testPages,
		"one free address":      testOneFreeAddress,
		"interleaved families":  testInterleavedFamilies,
		"concurrent allocation": testConcurrentAllocation,
		"VNI of gateways":       testGatewayVNI,
		"announced ids":         testAnnouncedIDs,

		"regions":                        testRegions,
		"many regions":                   testManyRegions,
		"underlay services":              testUnderlayServices,
		"earlier underlay services":      testEarlierUnderlayServices,
		"publications":                   testPublications,
		"many publications":              testManyPublications,
		"reclaim of publications":        testReclaimPublications,
		"publications of earlier builds": testEarlierPublications,

		"egress rules":               testEgressRules,
		"egress gateways":            testEgressGateways,
		"protected prefixes":         testProtected,
		"events of protection":       testEgressEvents,
		"egress prefix":              testEgressPrefix,
		"nodes beyond egress prefix": testEgressNodes,

		"addresses of services": testServiceAddresses,
		"many services":         testManyServices,
		"prefix of services":    testServicePrefix,
		"endpoints of services": testEndpoints,
		"events of services":    testServiceEvents,
		"exposed services":      testExposed,
		"node ports":            testNodePorts,
		"load balancers":        testLoadBalancers,
		"pools":                 testServicePools,

		"start of offloads":      testStartOffload,
		"steps of an offload":    testOffloadSteps,
		"loads":                  testLoads,
		"concurrent offloads":    testConcurrentOffloads,
		"offloads of lost nodes": testDeletedOffloader,

		"policies":                      testPolicies,
		"many policies":                 testManyPolicies,
		"long policies":                 testLongPolicies,
		"overrides":                     testOverrides,
		"enforcing":                     testEnforcing,
		"concurrent policy and hosting": testConcurrentPolicyAndHosting,

		"retirement of apps":                 testRetirement,
		"retirement with disconnected nodes": testRetirementWithDisconnectedNodes,
		"retirement of many apps":            testRetirementOfManyApps,
		"random retirement":                  testRandomRetirement,
		"sessions":                           testSessions,
		"lost sessions":                      testLostSessions,
		"unreachable nodes":                  testUnreachable,
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

// refused checks the reason of a refusal, and that its text contains the words.
func refused(t *testing.T, err error, want store.Reason, words ...string) {
	t.Helper()
	var e *store.Error
	if !errors.As(err, &e) || e.Reason != want {
		t.Errorf("got %v, want reason %d", err, want)
		return
	}
	for _, w := range words {
		if !strings.Contains(e.Text, w) {
			t.Errorf("%q does not contain %q", e.Text, w)
		}
	}
}

func node(n int) pki.Node { return pki.Node{Name: fmt.Sprintf("n%d", n), UUID: storetest.UUID(n)} }

// session returns the session of a stream of node n.
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
		t.Errorf("plan %v, want base prefix %v and the default private prefix", first.Plan, wanted.Base)
	}
	found := open(t, etcd, address.Plan{})
	again := found.Cluster()
	token, err := made.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if same, err := found.Token(t.Context()); err != nil || same != token {
		t.Errorf("the second start has token %v, %v; want %v", same, err, token)
	}
	if again.UUID != first.UUID || again.Plan != first.Plan {
		t.Errorf("the second start has cluster %v, want %v", again, first)
	}
	_, err = store.Open(t.Context(), etcd, address.Plan{Base: netip.MustParsePrefix("fd22::/48")}, slog.Default())
	refused(t, err, store.Refused, "--base-prefix", "fd11::/48", "fd22::/48")
	_, err = store.Open(t.Context(), etcd, address.Plan{Private: netip.MustParsePrefix("fc00::/9")}, slog.Default())
	refused(t, err, store.Refused, "--private-prefix")
	_, err = store.Open(t.Context(), etcd, address.Plan{Gateway4: netip.MustParsePrefix("10.0.0.0/8")}, slog.Default())
	refused(t, err, store.Refused, "--gateway-prefix", "10.0.0.0/8", "100.64.0.0/10")
}

// A cluster of a build without gateway prefixes has the default gateway prefixes, except those that overlap its base
// prefix.
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
			t.Errorf("base %s: plan %v, want gateway prefix %v", base, got, want6)
		}
		if _, err := etcd.Delete(t.Context(), "/", clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
	}
}
