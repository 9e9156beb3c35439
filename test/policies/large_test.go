package policies_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	manyPods     = 50
	manyPolicies = 5_000
	atOnce       = 100 // policies per call

	maxPeak  = 60 << 20        // maximum memory of the agent without mapped files, in bytes
	maxStart = 2 * time.Second // until it is ready, without an orchestrator
)

// TestManyPolicies: a node has 50 containers with different labels. Their tenant has 5,000 policies, and each policy
// selects some of the containers. The test limits the agent's memory while it receives the policies, and the memory and
// time of its start from its own disk without an orchestrator.
func TestManyPolicies(t *testing.T) {
	spec := lab.Spec{Nodes: []string{"n1"}, Tenants: []lab.Tenant{{Name: "blue"}}}
	for i := range manyPods {
		spec.Containers = append(spec.Containers,
			lab.Container{Name: fmt.Sprint("pod", i), Node: "n1", Tenant: "blue", Labels: manyLabels(i)})
	}
	l, ctx := labtest.New(t, spec), labtest.Context(t)
	begun := time.Now()
	var documents []string
	r := rand.New(rand.NewPCG(1, 1))
	for i := range manyPolicies {
		documents = append(documents, manyDocument(r, i))
	}
	for some := range slices.Chunk(documents, atOnce) {
		if _, err := l.Operator().ApplyPolicies(ctx,
			connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: some})); err != nil {
			t.Fatal(err)
		}
	}
	accepted := time.Since(begun)
	all := policiesOf(ctx, t, l)
	if len(all) != manyPolicies {
		t.Fatalf("unexpected number of policies in the cluster: %d", len(all))
	}
	newest := slices.MaxFunc(all, newer)
	untilInForce(ctx, t, l, "n1", newest.Revision)
	t.Logf("%d policies accepted within %v, in force after %v", manyPolicies, accepted, time.Since(begun))
	// The delay of garbage collections depends on other load, so only the long run checks the memory here.
	peak(ctx, t, l, "while policies came", long())

	if err := l.Stop(ctx, lab.Orchestrator); err != nil {
		t.Fatal(err)
	}
	if err := l.KillNoRestart(ctx, lab.AgentProcess("n1")); err != nil {
		t.Fatal(err)
	}
	begun = time.Now()
	if err := l.Start(ctx, lab.AgentProcess("n1")); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begun)
	t.Logf("ready from its own disk within %v", took)
	if took > maxStart && long() {
		t.Errorf("the agent took %v to be ready; the limit is %v", took, maxStart)
	}
	status, err := l.Agent("n1").Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if status.Msg.GetOrchestrator().GetConnected() {
		t.Error("the agent did not start from its own disk: an orchestrator runs")
	}
	peak(ctx, t, l, "from its start", true)
}

// manyLabels returns labels of one of 10 namespaces with 5 apps each.
func manyLabels(i int) map[string]string {
	namespace, app := i/5, i%5
	port, number := tenant.NamedPort("http", uint16(8000+i%10), "TCP")
	return map[string]string{
		"app": fmt.Sprint("app-", app), "tier": fmt.Sprint("tier-", i%3),
		tenant.NamespaceKey:                  fmt.Sprint("team-", namespace),
		tenant.NamespaceLabelKey("division"): fmt.Sprint("division-", namespace%7), port: number,
	}
}

// manyDocument returns a policy as in the benchmark of package policy: it allows ingress by labels, to port ranges and
// to a single port; half of the policies also allow egress, to a named port and to CIDRs.
func manyDocument(r *rand.Rand, i int) string {
	rule := func() string {
		return fmt.Sprintf(`{"from": [{"podSelector": {"matchLabels": {"tier": "tier-%d"}}},
			{"namespaceSelector": {"matchLabels": {"division": "division-%d"}}}],
			"ports": [{"port": 8000, "endPort": %d}, {"port": 53,
				"protocol": "UDP"}]}`, r.IntN(3), r.IntN(7), 8000+r.IntN(100))
	}
	egress := ""
	if i%2 == 0 {
		egress = fmt.Sprintf(`, "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]},
			{"to": [{"namespaceSelector": {"matchLabels": {"division": "division-1"}}}], "ports": [{"port": "http"}]},
			{"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.%d.0.0/16"]}}]}]`, r.IntN(256))
	}
	return fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
		"metadata": {"name": "policy-%d", "namespace": "team-%d"},
		"spec": {"podSelector": {"matchLabels": {"app": "app-%d"}},
			"ingress": [%s, %s]%s}}`, i, i%10, r.IntN(5), rule(), rule(), egress)
}

// agentFile reads a file of the agent's process in /proc.
func agentFile(ctx context.Context, t *testing.T, l *lab.Lab, name string) string {
	t.Helper()
	states, err := l.Processes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(states, func(s lab.ProcessState) bool { return s.Name == lab.AgentProcess("n1") })
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", states[i].PID, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// peak checks the maximum memory of the agent so far. Mapped files do not count: they are the program's pages in the
// page cache, which the kernel can drop. How many it maps at a page fault depends on the state of the page cache: the
// same program had 12 MiB more in its first run after the build than in later ones.
func peak(ctx context.Context, t *testing.T, l *lab.Lab, when string, limited bool) {
	t.Helper()
	status := agentFile(ctx, t, l, "status")
	kb := statusKB(t, status, "VmHWM:") - statusKB(t, status, "RssFile:")
	t.Logf("%s: at most %d MiB without mapped files", when, kb>>10)
	if kb<<10 > maxPeak && limited {
		t.Errorf("%s the agent had %d MiB without mapped files; the limit is %d", when, kb>>10, maxPeak>>20)
	}
}

// statusKB returns a field of /proc/PID/status in kB.
func statusKB(t *testing.T, status, name string) int {
	t.Helper()
	_, rest, found := strings.Cut(status, name)
	kb, err := strconv.Atoi(strings.TrimSpace(strings.Split(rest, "kB")[0]))
	if !found || err != nil {
		t.Fatalf("read %s of the agent's memory: %v", name, err)
	}
	return kb
}
