package sharing

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// Apps of the containers.
const (
	clientApp = 1
	serverApp = 2
)

// ruleSet is a tenant's policies, which accept the clients' connections.
type ruleSet struct {
	name     string
	rules    int // or CIDRs of each direction
	policies []policy.Policy
	apps     map[address.AppID]map[string]string
}

func (s ruleSet) compile() (policy.Tables, error) {
	subjects := make([]address.AppID, 0, len(s.apps))
	for app := range s.apps {
		subjects = append(subjects, app)
	}
	t, err := policy.Compile(tenantName, s.policies, s.apps, subjects)
	if err == nil {
		t.HoldUnknown(s.policies) // as agents do where the receiver's node applies the rules of both ends
	}
	return t, err
}

// byBlocks has rules for prefixes, the last of which is the clients'. Without rules it denies everything.
func byBlocks(name string, n int) ruleSet {
	var blocks []netip.Prefix
	if n > 0 {
		blocks = scenario.RuleBlocks(n, subnetOf(sender))
	}
	return ruleSet{name, n, []policy.Policy{scenario.RulePolicy(blocks)}, bothApps()}
}

// byLabels has rules for labels, the last of which is the clients'.
func byLabels(name string, n int) ruleSet {
	p := scenario.RulePolicy(nil)
	apps := bothApps()
	for i := range n {
		app := fmt.Sprint("app-", i)
		if i == n-1 {
			app = "client"
		} else {
			apps[address.AppID(serverApp+1+i)] = map[string]string{"app": app}
		}
		p.Rules[policy.Ingress] = append(p.Rules[policy.Ingress], policy.Rule{
			Action: policy.Accept, Pods: []policy.Pods{{
				Namespace: p.Namespace,
				Labels:    policy.Selector{{Key: "app", Operator: policy.In, Values: []string{app}}},
			}},
		})
	}
	return ruleSet{name, n, []policy.Policy{p}, apps}
}

func bothApps() map[address.AppID]map[string]string {
	return map[address.AppID]map[string]string{clientApp: {"app": "client"}, serverApp: {"app": "server"}}
}

// wide accepts n random CIDRs in both directions, among them one for each of the containers, and has a policy in audit
// mode. The CIDRs are in the tenant's subnets, so that a lookup goes deep into the table.
func wide(name string, n int, containers []netip.Addr, random *rand.Rand) ruleSet {
	const shortest = 100 // so that hardly any is within another, which would need no entry
	known, blocks := map[netip.Prefix]bool{}, make([]policy.Block, 0, n)
	for i := 0; len(blocks) < n; i++ {
		var a netip.Addr
		if i < len(containers) {
			a = containers[i]
		} else {
			a = randomIn(subnetOf(random.IntN(nodes)), random)
		}
		p, _ := a.Prefix(shortest + random.IntN(128-shortest+1))
		if !known[p] {
			known[p] = true
			blocks = append(blocks, policy.Block{Prefix: p})
		}
	}
	rules := []policy.Rule{{Action: policy.Accept, Blocks: blocks}}
	both := policy.Policy{
		Tier: policy.NetworkPolicy, Namespace: tenant.DefaultNamespace, Name: "wide",
		Isolates: [2]bool{policy.Ingress: true, policy.Egress: true},
		Rules:    [2][]policy.Rule{policy.Ingress: rules, policy.Egress: rules},
	}
	audited := scenario.RulePolicy([]netip.Prefix{netip.MustParsePrefix("2001:db8:73::/64")})
	audited.Name, audited.Audit = "audited", true
	return ruleSet{name, n, []policy.Policy{both, audited}, bothApps()}
}

// randomIn returns a random address of a /64.
func randomIn(p netip.Prefix, random *rand.Rand) netip.Addr {
	a := p.Addr().As16()
	binary.BigEndian.PutUint64(a[8:], random.Uint64())
	return netip.AddrFrom16(a)
}
