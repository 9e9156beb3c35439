package control

import (
	"fmt"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
)

// egressOf describes what a node's packet path knows of a tenant's egress.
func (m *member) egressOf(tenant string) string {
	m.Driver.Mu.Lock()
	defer m.Driver.Mu.Unlock()
	t := m.Driver.Tenants[tenant]
	if len(t.IDs) == 0 {
		return "unknown"
	}
	text := fmt.Sprintf("%v%v", t.Nodes, t.Protected)
	for _, r := range t.Egress {
		text += fmt.Sprint(" ", r.To, " ", r.Allow)
		for _, g := range r.Via {
			text += fmt.Sprint(" ", g.Node, " ", g.Prefix, " ", g.Address)
		}
	}
	return text
}

// TestEgressOfATenant: the orchestrator sends a tenant's egress rules, nodes and protected prefixes to the nodes that
// host it and to gateways, also to one without containers, and to no others.
func TestEgressOfATenant(t *testing.T) {
	c := newCluster(t)
	c.createTenant("blue")
	host := c.boot(t.TempDir(), "n1", agenttest.NewDriver())
	gateDir, gateDriver := t.TempDir(), agenttest.NewDriver()
	gate := c.boot(gateDir, "n2", gateDriver)
	far := c.boot(t.TempDir(), "n3", agenttest.NewDriver())
	for _, m := range []*member{host, gate, far} {
		m.until(connected)
	}
	host.MustAdd("c1")
	until := func(atHost, atGate string) {
		t.Helper()
		agenttest.Eventually(t, func() error {
			got := [...]string{host.egressOf("blue"), gate.egressOf("blue"), far.egressOf("blue")}
			if want := [...]string{atHost, atGate, "unknown"}; got != want {
				return fmt.Errorf("the nodes know %q, want %q", got, want)
			}
			return nil
		})
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	until("[][]", "unknown")
	_, err := c.op.ChangeProtected(t.Context(), connect.NewRequest(&pilasterv1.ChangeProtectedRequest{
		Add: []string{"2001:db8:5::/48"},
	}))
	must(err)
	_, err = c.op.SetTenantNodes(t.Context(), connect.NewRequest(&pilasterv1.SetTenantNodesRequest{
		Tenant: "blue", All: true,
	}))
	must(err)
	until("[fd70:696c:6100::/40][]", "unknown")
	_, err = c.op.SetEgressRule(t.Context(), connect.NewRequest(&pilasterv1.SetEgressRuleRequest{
		Tenant: "blue", To: []string{"::/0"}, Allow: true, Gateways: []*pilasterv1.EgressGateway{{Node: "n2"}},
	}))
	must(err)
	rules := " ::/0 true n2 fd70:696c:6100:2::/64 fd70:696c:6100:2:0:ff:100:10"
	both := "[fd70:696c:6100::/40][2001:db8:5::/48]" + rules
	until(both, both)
	_, err = c.op.ChangeProtected(t.Context(), connect.NewRequest(&pilasterv1.ChangeProtectedRequest{
		Remove: []string{"2001:db8:5::/48"},
	}))
	must(err)
	both = "[fd70:696c:6100::/40][]" + rules
	until(both, both)
	gate.stop()
	gate = c.boot(gateDir, "n2", gateDriver)
	gate.until(connected)
	until(both, both)
	_, err = c.op.DeleteEgressRule(t.Context(), connect.NewRequest(&pilasterv1.DeleteEgressRuleRequest{
		Tenant: "blue", To: []string{"::/0"},
	}))
	must(err)
	until("[fd70:696c:6100::/40][]", "unknown")
}
