package services_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// serveDatagrams runs a server in a container, which answers each datagram with the container's name.
func (b *bed) serveDatagrams(container string) {
	b.Helper()
	ns, err := b.Namespace(container)
	must(b.T, err)
	defer ns.Close()
	var l *net.UDPConn
	must(b.T, ns.Do(func() (err error) {
		l, err = net.ListenUDP("udp6", &net.UDPAddr{Port: backendPort})
		return err
	}))
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			_, from, err := l.ReadFromUDPAddrPort(make([]byte, 100))
			if err != nil {
				return
			}
			l.WriteToUDPAddrPort([]byte(container+"\n"), from)
		}
	}()
}

// TestHostClients: processes of a node reach a service over TCP and UDP at its address, at an external one, and at a
// node port of the node and of ::1, also while the agent is dead; without endpoints they are refused at once.
func TestHostClients(t *testing.T) {
	spec := labSpec()
	spec.Tenants[0].Nodes = "allow"
	b := startBed(t, spec)
	for _, name := range web {
		b.serveDatagrams(name)
	}
	external := netip.MustParseAddr("2001:db8:7::9")
	made, err := b.Operator().CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{
		Service: &pilasterv1.Service{
			Tenant: shop, Name: "web", Selector: map[string]string{"app": "web"}, NodePorts: true,
			ExternalIps: []string{external.String()},
			Ports: []*pilasterv1.ServicePort{
				{Name: "tcp", Protocol: "TCP", Port: servicePort, Target: backendPort, NodePort: 30080},
				{Name: "udp", Protocol: "UDP", Port: servicePort, Target: backendPort, NodePort: 30080},
			},
		},
	}))
	must(t, err)
	at, err := netip.ParseAddr(made.Msg.Service.Address)
	must(t, err)
	node, err := b.Address("n1")
	must(t, err)
	all := []netip.AddrPort{
		netip.AddrPortFrom(at, servicePort), netip.AddrPortFrom(external, servicePort),
		netip.AddrPortFrom(node, 30080), netip.MustParseAddrPort("[::1]:30080"),
	}
	var wrong []string // what processes of the last call have printed, where it is not right
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(strings.Join(wrong, "\n"))
		}
	})
	each := func(right func(to netip.AddrPort, printed map[string]int) bool) bool {
		wrong = nil
		for _, to := range all {
			for _, network := range []string{"tcp6", "udp6", "udp6 unconnected"} {
				if printed := b.processOf("n1", network, to); !right(to, printed) {
					wrong = append(wrong, fmt.Sprint(network, " ", to, ": ", printed))
				}
			}
		}
		return len(wrong) == 0
	}
	reached := func(to netip.AddrPort, printed map[string]int) bool {
		return len(printed) == len(web) && !slices.ContainsFunc(web, func(name string) bool {
			return printed[fmt.Sprint(to, " ", name)] == 0
		})
	}
	labtest.Until(t, patience, "processes of n1 reach all endpoints", func() bool { return each(reached) })
	must(t, b.KillNoRestart(t.Context(), lab.AgentProcess("n1")))
	if !each(reached) {
		t.Error("without the agent, processes of n1 do not reach all endpoints")
	}
	must(t, b.Start(t.Context(), lab.AgentProcess("n1")))
	for _, name := range web {
		must(t, b.RemoveContainer(labtest.Context(t), name))
	}
	labtest.Until(t, patience, "processes of n1 are refused", func() bool {
		return each(func(_ netip.AddrPort, printed map[string]int) bool {
			for line := range printed {
				if !strings.Contains(line, "connection refused") {
					return false
				}
			}
			return true
		})
	})
}
