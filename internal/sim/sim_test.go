package sim

import (
	"flag"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/dpapi"
)

func TestMain(m *testing.M) {
	flag.Set("test.parallel", "8") // scenarios wait for time and disks, not for processors
	os.Exit(m.Run())
}

// play runs a scenario that must pass.
func play(t *testing.T, text string) *Result {
	t.Helper()
	r := run(t, text)
	if !r.Pass() {
		t.Fatalf("violations %q, exceeded %q", r.Violations, r.Exceeded)
	}
	return r
}

// run runs a scenario in its own folder.
func run(t *testing.T, text string) *Result {
	t.Helper()
	s, err := Parse("scenario.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sim") // short, for a socket
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(t.Context(), s, Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Progress: func(p Progress) { t.Log(p) }, Every: time.Second,
		Patience: 10 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestEvents: all invariants hold after each event, and every node follows the orchestrator again after one snapshot.
func TestEvents(t *testing.T) {
	t.Parallel()
	r := play(t, `
nodes: 20
containersPerNode: 3
tenants: 2
events:
- {do: grow, by: 10%}
- {do: crash, by: 3}
- {do: restart-job, by: 50%}
- {do: reconnect}
- {do: restart-orchestrator}
- {do: shrink, by: 2}
`)
	for i, want := range []struct {
		nodes, containers int
		snapshots         int64
	}{{20, 60, 20}, {22, 66, 2}, {22, 66, 3}, {22, 66, 0}, {22, 66, 0}, {22, 66, 22}, {20, 60, 0}} {
		s := r.Stages[i]
		if s.Nodes != want.nodes || s.Containers != want.containers || s.Counts[snapshots].Messages != want.snapshots {
			t.Errorf(
				"after %s there are %d nodes, %d containers and messages %+v; want %+v",
				s.Event,
				s.Nodes,
				s.Containers,
				s.Counts,
				want,
			)
		}
	}
	// The samples show that every node reconnected once after the restart.
	restart := r.Stages[5].Samples
	if first, last := restart[0], restart[len(restart)-1]; first.Streams != 22 || last.Streams != 22 ||
		last.Registered != 22 ||
		last.Snapshots != 22 ||
		last.Calls < 44 ||
		last.Calls-last.Missed > 2*22 {
		t.Errorf("unexpected samples of the restart: %+v", restart)
	}
	var page strings.Builder
	if err := r.Page(&page, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, s := range r.Stages {
		if !strings.Contains(page.String(), "<h2>"+s.Event+"</h2>") {
			t.Errorf("the page lacks %s", s.Event)
		}
	}
	want := []Entries{{"locals", 3, 3, 3}, {"sources", 3, 3, 3}, {"tenants", 2, 2, 2}, {"keys", 2, 2, 2}}
	for i := range r.Entries {
		r.Entries[i].Mean = math.Round(r.Entries[i].Mean) // rounding errors of a sum
	}
	if !slices.Equal(r.Entries, want) {
		t.Errorf("got entries %+v, want %+v", r.Entries, want)
	}
}

// TestLinear: the message cost of each new node is constant, whatever the size of the cluster (NP9). The numbers of
// hosting reports and deltas of a node depend on timing; the test checks upper bounds of both.
func TestLinear(t *testing.T) {
	t.Parallel()
	r := play(t, "{nodes: 10, containersPerNode: 31, events: [{do: grow, by: 10}, {do: grow, by: 20}]}")
	for i, n := range []int64{10, 10, 20} {
		c := r.Stages[i].Counts
		reports, deltas := c["Follow in report"].Messages, c["Follow out delta"].Messages
		if reports < 2*n || reports > 4*n || deltas < n || deltas > 2*n {
			t.Errorf("%d nodes sent %d hosting reports and received %d deltas", n, reports, deltas)
		}
		delete(c, "Follow in report")
		delete(c, "Follow out delta")
		delete(c, heartbeats)
		for kind, each := range map[string]int64{"Register in": 1, "Register out": 1, "Follow out snapshot": 1,
			"Resolve in": 1, "Resolve out": 1} {
			if c[kind].Messages != each*n {
				t.Errorf("%d nodes cost %d messages of kind %s, want %d per node", n, c[kind].Messages, kind, each)
			}
			delete(c, kind)
		}
		if len(c) > 0 {
			t.Errorf("%d nodes cost unexpected messages %+v", n, c)
		}
	}
}

// TestChangePolicy: each policy change costs one message to each node that hosts the tenant, and reaches the node's
// packet path; other nodes receive nothing. Nodes that join later, restart or get other containers enforce the policy
// if and only if they host the tenant.
func TestChangePolicy(t *testing.T) {
	for network, nodes := range map[string]int{"netpila": 200, "nimitz": 60} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			r := play(
				t,
				fmt.Sprintf(
					`{network: %s, nodes: %d, containersPerNode: 1, tenants: 2, events: [
				{do: change-policy, times: 20, within: 10s}, {do: grow, by: 4},
				{do: crash, by: 4}, {do: restart-job, by: 10}, {do: change-policy, times: 5}]}`,
					network,
					nodes,
				),
			)
			if p := r.Stages[1].Policies; p.Hosts != nodes/2 || p.Others != nodes/2 {
				t.Errorf("unexpected cost with %d nodes: %+v", nodes, *p)
			}
			for i, times := range map[int]int{1: 20, 5: 5} {
				s, n := r.Stages[i], int64(times)
				p := s.Policies
				if p.Changes != times || p.Least != n || p.Most != n || p.ToOthers != 0 || p.Node.N != p.Hosts*times ||
					p.Last.N != times ||
					s.Total.Messages != int64(p.Hosts*times) {
					t.Errorf("%d changes cost %+v, with result %+v", times, s.Counts, *p)
				}
				if p.Node.Median <= 0 || p.Node.P99 < p.Node.Median || p.Last.Median < p.Node.Median ||
					p.Last.P99 < p.Node.P99 {
					t.Errorf("changes took %+v on each node, and %+v until the last node", p.Node, p.Last)
				}
				t.Logf("%d nodes: each %+v, the last %+v", p.Hosts, p.Node, p.Last)
			}
			var shown, page strings.Builder
			r.Text(&shown)
			if want := fmt.Sprintf("a second: 20 to 20 to each of these nodes, 0 to the %d others together",
				nodes/2); !strings.Contains(
				shown.String(),
				want,
			) {
				t.Errorf("%q is not in\n%s", want, shown.String())
			}
			if err := r.Page(&page, time.Now()); err != nil || strings.Count(page.String(), "on the last node") != 2 {
				t.Errorf("%v: the page lacks one of the two lines", err)
			}
		})
	}
}

// TestChangePolicyLate: a run fails if changes take longer than their limit.
func TestChangePolicyLate(t *testing.T) {
	t.Parallel()
	r := run(t, "{nodes: 4, containersPerNode: 1, events: [{do: change-policy, times: 2, within: 1us}]}")
	if r.Pass() || len(r.Exceeded) != 2 || !strings.Contains(r.Exceeded[0], "in force on a node within") ||
		!strings.Contains(r.Exceeded[1], "in force on the last node within") {
		t.Errorf("got exceeded limits %q, want those of each node and of the last node", r.Exceeded)
	}
}

// TestChangePolicyOtherNodes: a run fails if a node that does not host the tenant receives a message, or if a hosting
// node receives more than one message per change.
func TestChangePolicyOtherNodes(t *testing.T) {
	for name, p := range map[string]Propagation{
		"to other nodes":        {of: policyChanges, Changes: 3, Hosts: 2, Least: 3, Most: 3, Others: 1, ToOthers: 1},
		"twice":                 {of: policyChanges, Changes: 3, Hosts: 2, Least: 3, Most: 4},
		"sent and not yet read": {of: policyChanges, Changes: 3, Hosts: 2, Least: 3, Most: 3, Others: 1},
	} {
		if len(append(p.violated(), p.exceeded(0, 7)...)) == 0 {
			t.Errorf("%s: no violation and no exceeded limit for %+v", name, p)
		}
	}
	p := Propagation{of: policyChanges, Changes: 3, Hosts: 2, Least: 3, Most: 3, Others: 1}
	if found := append(p.violated(), p.exceeded(time.Nanosecond, 6)...); len(found) != 0 {
		t.Errorf("unexpected findings for %+v: %q", p, found)
	}
}

// TestChangeEndpoint: each change of an endpoint costs at most one message to each node that hosts the tenant, and
// reaches the packet paths of all of them; other nodes receive nothing. Nodes that join later, restart, or get other
// containers have the services of the tenants that they host, with all ready endpoints, and no others.
func TestChangeEndpoint(t *testing.T) {
	t.Parallel()
	r := play(t, `{nodes: 30, containersPerNode: 2, tenants: 5, services: 3, events: [
		{do: change-endpoint, times: 21, within: 10s}, {do: grow, by: 4}, {do: crash, by: 4},
		{do: restart-job, by: 10}, {do: reconnect}, {do: shrink, by: 3},
		{do: change-endpoint, times: 60, perSecond: 100, within: 10s}]}`)
	for i, times := range map[int]int{1: 21, 7: 60} {
		s, p := r.Stages[i], r.Stages[i].Endpoints
		if p == nil || s.Policies != nil {
			t.Fatalf("%s has results %+v", s.Event, s)
		}
		if p.Hosts == 0 || p.Hosts+p.Others != s.Nodes || p.Others == 0 || p.Changes != times ||
			p.Node.N != p.Hosts*times || p.Last.N != times || p.ToOthers != 0 {
			t.Errorf("unexpected result of %s: %+v", s.Event, *p)
		}
		if p.Node.Median <= 0 || p.Node.P99 < p.Node.Median || p.Node.Max < p.Node.P99 || p.Last.Max != p.Node.Max {
			t.Errorf("%s took %+v on each node, and %+v until the last node", s.Event, p.Node, p.Last)
		}
		if n := s.Counts["PutEndpoints in"].Messages; n != int64(times) {
			t.Errorf("%d reports for %d changes", n, times)
		}
	}
	// One after the other, changes cannot be merged: each is a message of its own.
	if p := r.Stages[1].Endpoints; p.Hosts != 12 || p.Least != 21 || p.Most != 21 {
		t.Errorf("unexpected messages: %+v", *p)
	}
	if p := r.Stages[7].Endpoints; p.Least == 0 || p.PerSecond > 150 {
		t.Errorf("unexpected messages, or rate: %+v", *p)
	}
	var shown, page strings.Builder
	r.Text(&shown)
	if want := "a second: 21 to 21 to each of these nodes, 0 to the 18 others together"; !strings.Contains(
		shown.String(), want) {
		t.Errorf("%q is not in\n%s", want, shown.String())
	}
	if err := r.Page(&page, time.Now()); err != nil || strings.Count(page.String(), "on the last node") != 2 {
		t.Errorf("%v: the page lacks one of the two lines", err)
	}
}

// TestChangeEndpointLate: the limit is that of 99 of 100 changes on the last node.
func TestChangeEndpointLate(t *testing.T) {
	p := Propagation{of: endpointChanges, Changes: 3, Hosts: 2, Last: Quantiles{Median: 1, P99: 3}}
	if found := p.exceeded(2*time.Millisecond, 6); len(found) != 1 ||
		!strings.Contains(found[0], "on the last node within 3 ms in 99 of 100 cases; the limit is 2ms") {
		t.Errorf("got exceeded limits %q", found)
	}
	if found := p.exceeded(3*time.Millisecond, 6); len(found) != 0 {
		t.Errorf("unexpected exceeded limits %q", found)
	}
}

// TestTurn: every node changes in turn, and changes back before the next ones.
func TestTurn(t *testing.T) {
	for hosts, want := range map[int][]int{
		1: {0, 0, 0}, 2: {0, 0, 1, 1, 0}, 3: {0, 0, 1, 1, 2, 2, 0}, 5: {0, 1, 0, 1, 2, 3, 2, 3, 4, 0, 4, 0, 1},
	} {
		var at []int
		for i := range want {
			n, _ := turn(i, hosts)
			at = append(at, n)
		}
		if !slices.Equal(at, want) {
			t.Errorf("of %d nodes, %v change, want %v", hosts, at, want)
		}
	}
}

// TestServicesWhereTenantIsNot: checkServices finds packet paths with other services, or other endpoints, than those of
// the containers.
func TestServicesWhereTenantIsNot(t *testing.T) {
	ours := dpapi.FrontendKey{Address: netip.MustParseAddrPort("[fd00::1]:80"), Protocol: 6}
	theirs := dpapi.FrontendKey{Address: netip.MustParseAddrPort("[fd00:0:0:1::1]:80"), Protocol: 6}
	one, two := dpapi.Backend{Plain: netip.MustParseAddr("fd00::11"), Port: targetPort},
		dpapi.Backend{Plain: netip.MustParseAddr("fd00::12"), Port: targetPort}
	w := &world{
		scenario: Scenario{Services: 1},
		services: map[string][]dpapi.FrontendKey{"t1": {ours}, "t2": {theirs}},
	}
	has := map[string]*backends{"t1": {active: []dpapi.Backend{one}, draining: []dpapi.Backend{two}}}
	for name, c := range map[string]struct {
		key              dpapi.FrontendKey
		active, draining []dpapi.Backend
		violated         bool
	}{
		"right":                {ours, []dpapi.Backend{one}, []dpapi.Backend{two}, false},
		"one too many":         {ours, []dpapi.Backend{one, two}, nil, true},
		"none":                 {ours, nil, nil, true},
		"a service of another": {theirs, nil, nil, true},
	} {
		n := &node{driver: &driver{}, running: []container{{tenant: "t1"}}}
		n.driver.PutServices([]dpapi.Frontend{{FrontendKey: c.key, Backends: c.active, Draining: c.draining}})
		var v violations
		w.checkServicesOf(&v, n, has)
		if (len(v.seen) != 0) != c.violated {
			t.Errorf("%s: violations %q", name, v.list())
		}
		n.running = nil
		v = violations{}
		if w.checkServicesOf(&v, n, has); len(v.list()) != 1 {
			t.Errorf("%s, on a node without the tenant: violations %q", name, v.list())
		}
	}
}

// TestPolicyWhereTenantIsNot: checkPolicies finds packet paths that enforce another policy than the last change.
func TestPolicyWhereTenantIsNot(t *testing.T) {
	w := &world{tenants: []string{"t1", "t2"}, policyPort: 2}
	for i, ports := range []map[uint16]bool{{2: true}, {1: true}, nil, {1: true, 2: true}, {2: true}, nil} {
		w.nodes = append(
			w.nodes,
			&node{
				name:    fmt.Sprint("n", i),
				driver:  &driver{enforced: enforced{ports: ports}},
				running: []container{{tenant: w.tenants[i/4]}},
			},
		)
	}
	var v violations
	w.checkPolicies(&v)
	if v.seen["a changed policy is not in force"] != 3 || v.seen["a node without the tenant has its policy"] != 1 ||
		len(v.seen) != 2 {
		t.Errorf("got violations %q", v.list())
	}
}

// TestNimitz: after each event, every node has the mappings to all other nodes' containers.
func TestNimitz(t *testing.T) {
	for _, addresses := range []string{"cidr: 10.0.0.0/16, nodeBits: 26", "cidr: 10.0.0.0/16, noNodeCIDRs: true"} {
		t.Run(addresses, func(t *testing.T) {
			t.Parallel()
			r := play(t, `{network: nimitz, `+addresses+`, nodes: 10, containersPerNode: 3, tenants: 2, events: [
				{do: grow, by: 10%}, {do: restart-job, by: 5}, {do: crash, by: 3},
				{do: reconnect}, {do: restart-orchestrator}, {do: shrink, by: 2}]}`)
			others := 2 * 8 // of each tenant a subnet on each other node
			if strings.Contains(addresses, "noNodeCIDRs") {
				others = 3 * 8
			}
			forwarding := others + 2 + 3
			want := []Entries{{"nimitz-decap", 1, 1, 1}, {"nimitz-register", 3, 3, 3}, {"nimitz-nat", 0, 0, 0},
				{"nimitz-forwarding", forwarding, float64(forwarding), forwarding}, {"nimitz-sharing", 0, 0, 0}}
			for i := range r.Entries {
				r.Entries[i].Mean = math.Round(r.Entries[i].Mean)
			}
			slices.SortFunc(r.Entries, func(a, b Entries) int { return order(want, a) - order(want, b) })
			if !slices.Equal(r.Entries, want) {
				t.Errorf("got entries %+v, want %+v", r.Entries, want)
			}
		})
	}
}

// TestILA: a node of network ila has an entry for each of its containers, and a mapping for each container elsewhere of
// the tenants that it hosts: containers of a node times other nodes, which are 79,920 for 1,000 nodes with 80 each.
func TestILA(t *testing.T) {
	t.Parallel()
	r := play(t, `{network: ila, nodes: 10, containersPerNode: 3, tenants: 2, events: [
		{do: grow, by: 10%}, {do: restart-job, by: 5}, {do: crash, by: 3}, {do: reconnect},
		{do: restart-orchestrator}, {do: shrink, by: 2}]}`)
	const here, others = 3, 3 * 8
	want := []Entries{{"ila-locals", here, here, here}, {"ila-mappings", others, others, others}}
	if !slices.Equal(r.Entries, want) {
		t.Errorf("got entries %+v, want %+v", r.Entries, want)
	}
}

// TestILAPull: a node of network ila that subscribes to mappings has one for each container elsewhere that its own
// containers exchange packets with, however many the tenants have.
func TestILAPull(t *testing.T) {
	t.Parallel()
	r := play(t, `{network: ila, activePeers: 5, nodes: 10, containersPerNode: 3, tenants: 2, events: [
		{do: grow, by: 10%}, {do: restart-job, by: 5}, {do: crash, by: 3}, {do: reconnect},
		{do: restart-orchestrator}, {do: shrink, by: 2}]}`)
	for i := range r.Entries {
		r.Entries[i].Mean = math.Round(r.Entries[i].Mean)
	}
	const here, peers = 3, 5
	want := []Entries{{"ila-locals", here, here, here}, {"ila-mappings", peers, peers, peers}}
	if !slices.Equal(r.Entries, want) {
		t.Errorf("got entries %+v, want %+v", r.Entries, want)
	}
}

// TestTenantsMove: if a node's containers are replaced by containers of another tenant, the node no longer hosts the
// old tenant and releases its subnet.
func TestTenantsMove(t *testing.T) {
	t.Parallel()
	r := play(t, "{network: nimitz, nodes: 6, containersPerNode: 1, tenants: 2, events: [{do: restart-job, by: 3}]}")
	if n := r.Stages[1].Counts["Allocate in"].Messages; n != 3 {
		t.Errorf("%d nodes allocated a subnet of their new tenant, want 3", n)
	}
}

func order(of []Entries, e Entries) int {
	return slices.IndexFunc(of, func(o Entries) bool { return o.Table == e.Table })
}

// TestSeed: with sequential events, two runs of a scenario with the same seed have equal calls and snapshots, and equal
// addresses, unless addresses depend on a key. Times, UUIDs and keys differ.
func TestSeed(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"addressing: clear", "network: nimitz"} {
		text := "{" + network + ", seed: 5, atOnce: 1, nodes: 6, containersPerNode: 2, events: [{do: restart-job, " +
			"by: 3}]}"
		one, again, other := play(t, text), play(t, text), play(t, strings.Replace(text, "seed: 5", "seed: 6", 1))
		if one.Addresses != again.Addresses || one.Addresses == other.Addresses {
			t.Errorf(
				"%s: digests of addresses are %s and %s, and with another seed %s",
				network,
				one.Addresses,
				again.Addresses,
				other.Addresses,
			)
		}
		for i := range one.Stages {
			for kind, n := range one.Stages[i].Counts {
				// These counts depend on timing: if a tenant leaves a node and returns, the node may receive and list
				// the tenant once more.
				if slices.Contains(
					[]string{heartbeats, "Follow in report", "Follow out delta", "ListMappings in", pagesListed},
					kind,
				) {
					continue
				}
				if n.Messages != again.Stages[i].Counts[kind].Messages {
					t.Errorf(
						"%s, %s: got %d messages of kind %s in the first run, and %d in the second",
						network,
						one.Stages[i].Event,
						n.Messages,
						kind,
						again.Stages[i].Counts[kind].Messages,
					)
				}
			}
		}
	}
}

// TestInMemory: inMemory distinguishes a folder on a tmpfs from others.
func TestInMemory(t *testing.T) {
	for dir, want := range map[string]bool{"/dev/shm": true, "/proc": false, "/nonexistent": false} {
		if got := inMemory(dir); got != want {
			t.Errorf("%s is in memory: %v, want %v", dir, got, want)
		}
	}
}
