package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// BenchmarkCompile compiles a large tenant as one node does: 5,000 policies, 1,000 apps in 100 namespaces, 50 of the
// apps on this node.
func BenchmarkCompile(b *testing.B) {
	policies, apps, subjects := largeTenant()
	b.ReportAllocs()
	var t policy.Tables
	for b.Loop() {
		var err error
		if t, err = policy.Compile("acme", policies, apps, subjects); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(t.Peers)+len(t.Blocks)+len(t.Ports)+len(t.Ranges)+len(t.Subjects)), "entries")
}

func BenchmarkDecide(b *testing.B) {
	policies, apps, subjects := largeTenant()
	t, err := policy.Compile("acme", policies, apps, subjects)
	if err != nil {
		b.Fatal(err)
	}
	addr := netip.MustParseAddr("fd00::1")
	for i := 0; b.Loop(); i++ {
		t.Decide(subjects[i%len(subjects)], policy.Ingress, address.AppID(i%1000+1), addr, policy.TCP, 80)
	}
}

func largeTenant() (policies []policy.Policy, apps map[address.AppID]map[string]string, subjects []address.AppID) {
	const namespaces, perNamespace = 100, 10
	r := rand.New(rand.NewPCG(1, 1))
	apps = map[address.AppID]map[string]string{}
	for i := range namespaces * perNamespace {
		ns := fmt.Sprintf("team-%d", i/perNamespace)
		port, number := tenant.NamedPort("http", uint16(8000+i%10), "TCP")
		apps[address.AppID(i+1)] = map[string]string{
			"app": fmt.Sprintf("app-%d", i%perNamespace), "tier": fmt.Sprintf("tier-%d", i%3),
			tenant.NamespaceKey: ns, tenant.NamespaceLabelKey("division"): fmt.Sprintf("division-%d", i/perNamespace%7),
			port: number,
		}
		if len(subjects) < 50 && i%19 == 0 {
			subjects = append(subjects, address.AppID(i+1))
		}
	}
	is := func(key, value string) policy.Selector {
		return policy.Selector{{Key: key, Operator: policy.In, Values: []string{value}}}
	}
	for i := range 4990 {
		ns := fmt.Sprintf("team-%d", i%namespaces)
		p := policy.Policy{
			Tier: policy.NetworkPolicy, Namespace: ns, Name: fmt.Sprintf("policy-%d", i),
			Isolates: [2]bool{true, i%2 == 0},
			Subject:  policy.Pods{Namespace: ns, Labels: is("app", fmt.Sprintf("app-%d", r.IntN(perNamespace)))},
		}
		for range 2 {
			p.Rules[policy.Ingress] = append(p.Rules[policy.Ingress], policy.Rule{
				Action: policy.Accept,
				Pods: []policy.Pods{
					{Namespace: ns, Labels: is("tier", fmt.Sprintf("tier-%d", r.IntN(3)))},
					{Namespaces: is("division", fmt.Sprintf("division-%d", r.IntN(7)))},
				},
				Ports: []policy.Port{
					{Protocol: policy.TCP, First: 8000, Last: 8000 + uint16(r.IntN(100))},
					{Protocol: policy.UDP, First: 53, Last: 53},
				},
			})
		}
		if i%2 == 0 {
			p.Rules[policy.Egress] = []policy.Rule{
				{
					Action:   policy.Accept,
					Everyone: true,
					Ports:    []policy.Port{{Protocol: policy.UDP, First: 53, Last: 53}},
				},
				{
					Action: policy.Accept,
					Pods:   []policy.Pods{{Namespaces: is("division", "division-1")}},
					Ports:  []policy.Port{{Protocol: policy.TCP, Name: "http"}},
				},
				{
					Action: policy.Accept,
					Blocks: []policy.Block{
						{
							Prefix: netip.MustParsePrefix("10.0.0.0/8"),
							Except: []netip.Prefix{
								netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(256)), 0, 0}), 16),
							},
						},
					},
				},
			}
		}
		policies = append(policies, p)
	}
	for i := range 10 {
		p := policy.Policy{
			Tier:     []policy.Tier{policy.Admin, policy.Baseline}[i%2],
			Name:     fmt.Sprintf("cluster-%d", i),
			Priority: i,
		}
		p.Rules[policy.Ingress] = []policy.Rule{
			{Action: policy.Pass, Pods: []policy.Pods{{Namespaces: is("division", fmt.Sprintf("division-%d", i%7))}}},
			{
				Action: policy.Deny,
				Pods:   []policy.Pods{{Namespaces: is("division", fmt.Sprintf("division-%d", (i+1)%7))}},
				Ports:  []policy.Port{{Protocol: policy.TCP, First: 22, Last: 22}},
			},
		}
		policies = append(policies, p)
	}
	return policies, apps, subjects
}
