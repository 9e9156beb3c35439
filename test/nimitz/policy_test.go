package nimitz_test

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

const mutedDB = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"db"},
	"spec":{"podSelector":{"matchLabels":{"app":"db"}},"policyTypes":["Egress"]}}`

// TestPoliciesOnOpenVSwitch: if a tenant gets a policy, a node whose switch does not enforce policies isolates the
// tenant's containers, also after its agent was killed, and rejects new containers of the tenant, until the tenant has
// no policies.
func TestPoliciesOnOpenVSwitch(t *testing.T) {
	l := labtest.New(t, lab.Spec{
		Name: fmt.Sprintf("tpolicy-ovs-%d", os.Getpid()), Nodes: []string{"n1", "n2"},
		LabKeys: labtest.Switch("", lab.Switches{"n1": lab.EBPF, "n2": lab.OVS}),
		Tenants: []lab.Tenant{{Name: "green", Network: tenant.Nimitz, CIDRs: []netip.Prefix{own4, own6}}},
		Containers: []lab.Container{{Name: "web", Node: "n1", Tenant: "green"},
			{Name: "front", Node: "n1", Tenant: "green"}, {Name: "far", Node: "n2", Tenant: "green"}},
	})
	ctx := labtest.Context(t)
	reaches := func(when, from, to string, want bool) {
		t.Helper()
		for start := time.Now(); ; {
			e, err := l.Ping(ctx, from, to, packet.PingOptions{Timeout: 300 * time.Millisecond})
			must(t, err)
			if e.Reached() == want {
				return
			}
			if time.Since(start) > 20*time.Second {
				t.Fatalf("%s: %s reaches %s: %v", when, from, to, e.Reached())
			}
		}
	}
	reaches("without policies", "web", "far", true)
	apply := &pilasterv1.ApplyPoliciesRequest{Tenant: "green", Documents: []string{mutedDB}}
	if _, err := l.Operator().ApplyPolicies(ctx, connect.NewRequest(apply)); err == nil ||
		!strings.Contains(err.Error(), "n2 (build") {
		t.Errorf("applying a policy of a tenant with such a node: %v", err)
	}
	apply.Force = true
	_, err := l.Operator().ApplyPolicies(ctx, connect.NewRequest(apply))
	must(t, err)
	reaches("with a policy", "web", "far", false)
	reaches("with a policy", "far", "web", false)
	reaches("with a policy", "web", "front", true)
	_, err = l.Kill(ctx, lab.AgentProcess("n2"))
	must(t, err)
	reaches("with a policy, its agent killed", "far", "web", false)
	if err := l.AddContainer(ctx, lab.Container{Name: "more", Node: "n2", Tenant: "green"}); err == nil ||
		!strings.Contains(err.Error(), "Open vSwitch forwards its packets") {
		t.Errorf("adding a container: got error %v", err)
	}
	must(t, l.AddContainer(ctx,
		lab.Container{Name: "db", Node: "n1", Tenant: "green", Labels: map[string]string{"app": "db"}}))
	reaches("with a policy", "db", "web", false)
	reaches("with a policy", "web", "db", true)
	why := func(from, to string, peerApp uint32) ([]*pilasterv1.Reason, error) {
		source, err := l.Container(from)
		must(t, err)
		destination, err := l.Container(to)
		must(t, err)
		resp, err := l.Agent("n1").Why(ctx,
			connect.NewRequest(&pilasterv1.WhyRequest{Source: source.Address.String(),
				Destination: destination.Address.String(), Protocol: 6, Port: 80, PeerApp: peerApp}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.Reasons, nil
	}
	asked, err := why("db", "web", 0)
	if must(t, err); len(asked) != 2 || asked[0].Allowed || asked[0].Rule.GetPolicy() != "NetworkPolicy default/db" ||
		!asked[1].Allowed {
		t.Errorf("unexpected reason why db cannot reach web: %v", asked)
	}
	if _, err := why("web", "far", 0); err == nil || !strings.Contains(err.Error(), "--peer-app") {
		t.Errorf("policy query for an unknown container without an app: got error %v", err)
	}
	asked, err = why("far", "web", asked[0].App) // with the app of db
	if must(t, err); len(asked) != 2 || asked[0].Allowed || asked[0].Endpoint != nil || !asked[1].Allowed {
		t.Errorf("unexpected reason why far could not reach web: %v", asked)
	}
	_, err = l.Operator().DeletePolicies(ctx,
		connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "green",
			Policies: []*pilasterv1.Policy{{Kind: "NetworkPolicy", Namespace: "default", Name: "db"}}}))
	must(t, err)
	reaches("without policies any more", "web", "far", true)
	reaches("without policies any more", "db", "far", true)
}
