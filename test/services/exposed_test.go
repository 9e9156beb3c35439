package services_test

import (
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const internet = "internet" // a host outside

// TestExposed: a host outside reaches a service at an external address and at node ports, by nodes with and without an
// endpoint, and with policy Local only by those with one. An agent that is dead does not count.
func TestExposed(t *testing.T) {
	spec := labSpec()
	spec.Nodes = append(spec.Nodes, "n4")
	spec.Outside = []lab.OutsideHost{{Name: internet}}
	spec.Containers = append(spec.Containers,
		lab.Container{Name: "c4", Node: "n4", Tenant: shop, Labels: map[string]string{"app": "client"}})
	b := startBed(t, spec)
	external := netip.MustParseAddr("2001:db8:7::9")
	must(t, b.Route(external, "n1"))
	made := b.create(&pilasterv1.Service{Name: "web", ExternalIps: []string{external.String()}, NodePorts: true})

	outside := netip.AddrPortFrom(external, servicePort)
	b.to = outside
	b.settles(internet, web...)
	_, kept, err := b.reach(internet)
	must(t, err)
	t.Cleanup(func() { kept.Close() })
	must(t, b.Route(external, "n4"))
	if err := echo(kept); err != nil {
		t.Errorf("a connection ended when the fabric used another node: %v", err)
	}
	b.settles(internet, web...)
	must(t, b.KillNoRestart(t.Context(), lab.AgentProcess("n4")))
	b.settles(internet, web...)
	must(t, b.Start(t.Context(), lab.AgentProcess("n4")))

	n2, err := b.Address("n2")
	must(t, err)
	b.to = netip.AddrPortFrom(n2, uint16(made.Ports[0].NodePort))
	b.settles(internet, web...)

	made.TrafficPolicy = "Local"
	_, err = b.Operator().ApplyServices(t.Context(), connect.NewRequest(&pilasterv1.ApplyServicesRequest{
		Tenant: shop, Services: []*pilasterv1.Service{made},
	}))
	must(t, err)
	b.settles(internet, "w2")
	b.to = outside
	labtest.Until(t, patience, "n4, which has no endpoint, refuses connections", func() bool {
		_, _, err := b.reach(internet)
		return err != nil
	})
	must(t, b.Route(external, "n3"))
	b.settles(internet, "w3")

	_, err = b.Operator().DeleteService(t.Context(), connect.NewRequest(&pilasterv1.DeleteServiceRequest{
		Tenant: shop, Name: "web",
	}))
	must(t, err)
	labtest.Until(t, patience, "connections to a deleted service fail", func() bool {
		_, _, err := b.reach(internet)
		return err != nil
	})
}
