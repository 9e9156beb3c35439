package policies_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/policy/policytest"
	"pilaster.io/pilaster/internal/tenant"
)

// networks are the networks that enforce policies.
var networks = []struct {
	name     string
	tenant   lab.Tenant
	families []int // lengths of addresses in bits
	offload  bool  // frontends look up the rules
}{
	{"netpila", lab.Tenant{}, []int{128}, false},
	{"netpila-clear", lab.Tenant{Addressing: "clear"}, []int{128}, false},
	{"nimitz", lab.Tenant{Network: "nimitz", CIDRs: own}, []int{32, 128}, false},
	{"nimitz-offloaded", lab.Tenant{Network: "nimitz", CIDRs: own}, []int{32, 128}, true},
	{"ila", lab.Tenant{Network: "ila"}, []int{128}, false},
	{"evpn", lab.Tenant{Network: "evpn", CIDRs: own}, []int{32, 128}, false},
}

var own = []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd12:3456::/48")}

// TestPacketsAgainstCyclonus runs all cases of cyclonus that only change policies. TCP and UDP packets must arrive and
// get a response if and only if cyclonus's matcher allows them. The long run has all cases on each network; the short
// run divides the cases among the networks.
func TestPacketsAgainstCyclonus(t *testing.T) {
	part := 0
	for _, network := range networks {
		t.Run(network.name, func(t *testing.T) {
			spec := podsOn(network.tenant)
			if network.offload {
				spec.Nodes, spec.MTUReserve = slices.Concat(nodes, frontends), tenant.OffloadOverhead
			}
			l := labtest.New(t, spec)
			if network.offload {
				offload(t, l)
			}
			for _, bits := range network.families {
				t.Run(fmt.Sprintf("IPv%d", map[int]int{32: 4, 128: 6}[bits]),
					func(t *testing.T) { compare(t, l, bits, part, network.offload) })
				part++
			}
		})
	}
}

// parts is the total number of families of the networks.
const parts = 9

var nodes = []string{"n1", "n2"}

// podsOn returns a lab with cyclonus's pods, distributed over two nodes, and with a tenant without policies.
func podsOn(network lab.Tenant) lab.Spec {
	of := func(name string) lab.Tenant {
		network.Name = name
		return network
	}
	s := lab.Spec{Nodes: nodes, Tenants: []lab.Tenant{of("blue"), of("calm")}}
	pods := policytest.Pods()
	for i, name := range slices.Sorted(maps.Keys(pods)) {
		s.Containers = append(s.Containers,
			lab.Container{Name: name, Node: s.Nodes[i%2], Tenant: "blue", Labels: pods[name]})
	}
	for i, name := range calm {
		s.Containers = append(s.Containers, lab.Container{Name: name, Node: s.Nodes[i%2], Tenant: "calm"})
	}
	return s
}

var calm = []string{"c1", "c2", "c3", "c4"}

func compare(t *testing.T, l *lab.Lab, bits, part int, offloaded bool) {
	address := func(c lab.ContainerStatus) netip.Addr {
		i := slices.IndexFunc(c.Attachments, func(a lab.Attachment) bool { return a.Address.BitLen() == bits })
		if i < 0 {
			t.Fatalf("%s has no address of %d bits", c.Name, bits)
		}
		return c.Attachments[i].Address
	}
	pods := slices.Sorted(maps.Keys(policytest.Pods()))
	canonical := map[string]netip.Addr{}
	for _, name := range pods {
		c, err := l.Container(name)
		if err != nil {
			t.Fatal(err)
		}
		if canonical[name] = c.Plaintext; !c.Plaintext.IsValid() {
			canonical[name] = address(c)
		}
	}
	trials, err := policytest.Trials(canonical)
	if err != nil {
		t.Fatal(err)
	}
	all := len(trials)
	if !long() {
		var some []policytest.Trial
		for i := part; i < all; i += parts {
			some = append(some, trials[i])
		}
		trials = some
	}
	p, in := newProber(t, l, pods, calm, address), nodes
	var before uint64
	if offloaded {
		p.legs, in = legs, slices.Concat(nodes, frontends)
		before = judged(t, l)
	}
	ctx := labtest.Context(t)
	begun, count, arrive, wrong := time.Now(), 0, 0, 0
	var applying time.Duration
	for i, trial := range trials {
		started := time.Now()
		apply(ctx, t, l, i, trial.Documents, in)
		applying += time.Since(started)
		dropped := drops(ctx, t, l)
		came, err := p.try(trial.Probes)
		if err != nil {
			t.Fatalf("%s: %v", trial.Name, err)
		}
		many := map[string]int{}
		for k, probe := range trial.Probes {
			count++
			if probe.Arrives {
				arrive++
			}
			if want := (arrived{probe.Arrives, probe.Arrives}); came[k] != want {
				wrong++
				many[fmt.Sprintf("from %s, protocol %d, should %v, %v", probe.From, probe.Protocol, probe.Arrives,
					came[k])]++
			}
		}
		if len(many) > 0 {
			t.Errorf("%s (%d): %v; before %v, after %v\n%s", trial.Name, i, many, dropped, drops(ctx, t, l),
				trial.Documents)
		}
	}
	t.Logf("%d cases, %d packets and their answers, %d of them allowed; %d differ from cyclonus; %v, %v of it "+
		"until policies were in force", len(trials), count, arrive, wrong, time.Since(begun), applying)
	if offloaded {
		// Each of these packets needs a frontend's lookup, and there is no other way to its rules.
		n := judged(t, l) - before
		t.Logf("frontends looked up the rules for %d packets", n)
		if n < uint64(count) {
			t.Errorf("frontends looked up the rules for %d packets, want all %d", n, count)
		}
	}
	if all < 200 || count < 60_000/parts || arrive < count/10 || arrive > count*9/10 {
		t.Error("too few cases or packets")
	}
}

// apply replaces the tenant's policies, and waits until they are in force on nodes. The last policy selects no pod
// and has a new name each time. So there is always a change, whose revision the nodes report.
func apply(ctx context.Context, t *testing.T, l *lab.Lab, number int, documents, nodes []string) {
	t.Helper()
	wanted := map[[2]string]bool{{nowhere, marker}: true}
	for _, d := range documents {
		parsed, err := policy.Parse([]byte(d))
		if err != nil {
			t.Fatal(err)
		}
		wanted[[2]string{parsed[0].Namespace, parsed[0].Name}] = true
	}
	surplus := slices.DeleteFunc(policiesOf(ctx, t, l),
		func(p *pilasterv1.Policy) bool { return wanted[[2]string{p.Namespace, p.Name}] })
	if len(surplus) > 0 {
		if _, err := l.Operator().DeletePolicies(ctx,
			connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue", Policies: surplus})); err != nil {
			t.Fatal(err)
		}
	}
	last := fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": %q,
		"namespace": %q},
		"spec": {"podSelector": {}, "ingress": [{"ports": [{"port": %d}]}]}}`, marker, nowhere, number+1)
	if _, err := l.Operator().ApplyPolicies(ctx,
		connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue",
			Documents: append(slices.Clone(documents), last)})); err != nil {
		t.Fatal(err)
	}
	newest := slices.MaxFunc(policiesOf(ctx, t, l), newer)
	for _, node := range nodes {
		untilInForce(ctx, t, l, node, newest.Revision)
	}
}

func newer(a, b *pilasterv1.Policy) int { return cmp.Compare(a.Revision, b.Revision) }

func policiesOf(ctx context.Context, t *testing.T, l *lab.Lab) []*pilasterv1.Policy {
	t.Helper()
	list, err := l.Operator().ListPolicies(ctx, connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: "blue"}))
	if err != nil {
		t.Fatal(err)
	}
	return list.Msg.Policies
}

// Name and namespace of the policy that selects no pod.
const (
	marker  = "marker"
	nowhere = "nowhere"
)

// untilInForce waits until a node enforces the policies of a revision.
func untilInForce(ctx context.Context, t *testing.T, l *lab.Lab, node string, revision int64) {
	t.Helper()
	for again := time.Tick(5 * time.Millisecond); ; {
		status, err := l.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		if !status.Msg.Ready {
			t.Fatalf("%s is not ready: %v", node, status.Msg.Problems)
		}
		if status.Msg.GetOrchestrator().GetRevision() >= revision {
			return
		}
		select {
		case <-again:
		case <-ctx.Done():
			t.Fatalf("%s has not received revision %d", node, revision)
		}
	}
}

// drops returns the drop counters of each node, by reason.
func drops(ctx context.Context, t *testing.T, l *lab.Lab) (all []map[string]uint64) {
	for _, node := range nodes {
		d, err := l.Drops(ctx, node)
		if err != nil {
			t.Fatal(err)
		}
		delete(d, dropreason.MldIgnored.String()) // kernels send listener reports at any time
		all = append(all, d)
	}
	return all
}
