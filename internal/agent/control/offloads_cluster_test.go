package control

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/policy"
)

// rulesOf describes the tables of a tenant in a node's packet path: none, rules, or those that only deny.
func (m *member) rulesOf(tenant string) string {
	m.Driver.Mu.Lock()
	defer m.Driver.Mu.Unlock()
	switch subjects := m.Driver.Policies[tenant].Tables.Subjects; {
	case len(subjects) == 0:
		return "none"
	case len(subjects) == 1 && subjects[policy.AnyApp] == policy.Isolating().Subjects[policy.AnyApp]:
		return "denies"
	}
	return "rules"
}

// TestOffloadOfANode (Nezha §4.2): the orchestrator and the agents of three nodes bring an offload to phase active and
// back, by the agents' acknowledgements only. The frontend without containers has the rules meanwhile, also after a
// restart, and knows the backend's containers.
func TestOffloadOfANode(t *testing.T) {
	c := newCluster(t)
	c.createNimitz("green", 24)
	frontDir, frontDriver := t.TempDir(), agenttest.NewDriver()
	back := c.boot(t.TempDir(), "n1", agenttest.NewDriver())
	front := c.boot(frontDir, "n2", frontDriver)
	far := c.boot(t.TempDir(), "n3", agenttest.NewDriver())
	for _, m := range []*member{back, front, far} {
		m.until(connected)
	}
	own := back.addOf("green", "c1")
	far.addOf("green", "c2")
	if _, err := c.op.ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
		Tenant: "green", Documents: []string{agenttest.WebFromDB},
	})); err != nil {
		t.Fatal(err)
	}
	phase := func() pilasterv1.OffloadPhase {
		t.Helper()
		resp, err := c.op.ListOffloads(t.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Msg.Offloads) == 0 {
			return pilasterv1.OffloadPhase_OFFLOAD_PHASE_UNSPECIFIED
		}
		return resp.Msg.Offloads[0].Offload.Phase
	}
	until := func(want pilasterv1.OffloadPhase, atBack, atFront, atFar string) {
		t.Helper()
		agenttest.Eventually(t, func() error {
			got := fmt.Sprint(phase(), " ", back.rulesOf("green"), " ", front.rulesOf("green"), " ",
				far.rulesOf("green"))
			if got != fmt.Sprint(want, " ", atBack, " ", atFront, " ", atFar) {
				return fmt.Errorf("phase and rules are %s, want %v %s %s %s", got, want, atBack, atFront, atFar)
			}
			return nil
		})
	}
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_UNSPECIFIED, "rules", "none", "rules")
	if _, err := c.op.StartOffload(t.Context(), connect.NewRequest(&pilasterv1.StartOffloadRequest{
		Tenant: "green", Node: "n1", Frontends: []string{"n2"}, Force: true,
	})); err != nil {
		t.Fatal(err)
	}
	back.Core.SetFrontends("green", nil, []string{"n2"})
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, "denies", "rules", "rules")
	knows := func(want ...string) {
		t.Helper()
		agenttest.Eventually(t, func() error {
			known, _, _ := front.Tenants.Get("green")
			var got []string
			for _, o := range known.Tenant.Offloads {
				for _, e := range o.Endpoints {
					got = append(got, fmt.Sprint(e.Address, " ", e.App))
				}
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("the frontend knows %q, want %q", got, want)
			}
			return nil
		})
	}
	first := fmt.Sprint(own.Attachments[0].Address, " ", own.App)
	knows(first)

	front.stop()
	front = c.boot(frontDir, "n2", frontDriver)
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, "denies", "rules", "rules")
	front.until(connected)
	second := back.addOf("green", "c3")
	knows(first, fmt.Sprint(second.Attachments[0].Address, " ", second.App))

	if _, err := c.op.StopOffload(t.Context(), connect.NewRequest(&pilasterv1.StopOffloadRequest{
		Tenant: "green", Node: "n1",
	})); err != nil {
		t.Fatal(err)
	}
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_UNSPECIFIED, "rules", "none", "rules")
	agenttest.Eventually(t, func() error {
		if names := front.Tenants.Names(); len(names) > 0 {
			return fmt.Errorf("the frontend still knows %q", names)
		}
		return nil
	})
}

// TestOffloadOfAFullNode: a node without room for a tenant's rules gets an offload, and with it the
// policies that it could not enforce are in force. It does not get the rules back while it has no room.
func TestOffloadOfAFullNode(t *testing.T) {
	c := newCluster(t)
	c.createNimitz("green", 24)
	driver := agenttest.NewDriver()
	driver.RuleRoom = 1
	back, front := c.boot(t.TempDir(), "n1", driver), c.boot(t.TempDir(), "n2", agenttest.NewDriver())
	for _, m := range []*member{back, front} {
		m.until(connected)
	}
	back.addOf("green", "c1")
	if _, err := c.op.ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
		Tenant: "green", Documents: []string{agenttest.WebFromDB},
	})); err != nil {
		t.Fatal(err)
	}
	until := func(phase pilasterv1.OffloadPhase, atBack string, refused bool) {
		t.Helper()
		agenttest.Eventually(t, func() error {
			resp, err := c.op.ListOffloads(t.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
			if err != nil {
				return err
			}
			var is pilasterv1.OffloadPhase
			for _, o := range resp.Msg.Offloads {
				is = o.Offload.Phase
			}
			without := func(problem string) bool { return strings.Contains(problem, "is not in force") }
			if is != phase || back.rulesOf("green") != atBack ||
				slices.ContainsFunc(back.Problems(), without) != refused {
				return fmt.Errorf("phase %v, rules %s, problems %q; want %v, %s, refused %v", is, back.rulesOf("green"),
					back.Problems(), phase, atBack, refused)
			}
			return nil
		})
	}
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_UNSPECIFIED, "none", true)
	if _, err := c.op.StartOffload(t.Context(), connect.NewRequest(&pilasterv1.StartOffloadRequest{
		Tenant: "green", Node: "n1", Frontends: []string{"n2"}, Force: true,
	})); err != nil {
		t.Fatal(err)
	}
	back.Core.SetFrontends("green", nil, []string{"n2"})
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, "denies", false)
	if _, err := c.op.StopOffload(t.Context(), connect.NewRequest(&pilasterv1.StopOffloadRequest{
		Tenant: "green", Node: "n1",
	})); err != nil {
		t.Fatal(err)
	}
	until(pilasterv1.OffloadPhase_OFFLOAD_PHASE_RETURNING, "denies", true)
}
