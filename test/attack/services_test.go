package attack_test

import (
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

var web = map[string]string{"app": "web"}

// internet is the host outside that policies admit to an exposed port; notAdmitted is one that they do not.
const internet = "internet"

var exposedAt, notAdmitted = netip.MustParseAddr("2001:db8:7::9"), netip.MustParseAddr("2001:db8:bad::2")

const admitOne = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {}}, {ipBlock: {cidr: "2001:db8:f00d::2/128"}}]
`

var servicesSpec = lab.Spec{
	Nodes:   []string{"n1", "n2"},
	Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}},
	Outside: []lab.OutsideHost{{Name: internet}},
	Containers: []lab.Container{
		{Name: "mallory", Node: "n1", Tenant: "blue"},
		{Name: "b1", Node: "n1", Tenant: "blue", Labels: web}, {Name: "b2", Node: "n2", Tenant: "blue", Labels: web},
		{Name: "r1", Node: "n1", Tenant: "red", Labels: web}, {Name: "r2", Node: "n2", Tenant: "red", Labels: web},
	},
}

// TestServiceAttacks makes backends answer victims that have asked nothing: by packets to a service with the address of
// a victim, and by packets to a victim with the address of a service. The servers of the services answer all datagrams
// that reach them.
func TestServiceAttacks(t *testing.T) {
	t.Parallel()
	b := newBed(t, servicesSpec, [][2]string{{"mallory", "b1"}, {"mallory", "b2"}, {"r2", "r1"}, {"r1", "r2"}})
	for _, c := range []string{"b1", "b2", "r1", "r2"} {
		b.echoServer(t, c)
	}
	blues, reds := b.echoService(t, "blue", "mallory"), b.echoService(t, "red", "r1")
	b.openAgain(t)
	for _, a := range b.services(t, blues, reds) {
		t.Run(a.name, func(t *testing.T) { b.try(t, a) })
	}
}

// TestExposedAttacks sends packets to an exposed port whose policy admits one host outside: from hosts that it does not
// admit, and from what no host outside can be. The host that it admits has answers before and after that.
func TestExposedAttacks(t *testing.T) {
	t.Parallel()
	b := newBed(t, servicesSpec, [][2]string{{"mallory", "b1"}, {"mallory", "b2"}, {"r2", "r1"}, {"r1", "r2"}})
	for _, c := range []string{"b1", "b2"} {
		b.echoServer(t, c)
	}
	if err := b.Route(exposedAt, "n1"); err != nil {
		t.Fatal(err)
	}
	blues := b.echoService(t, "blue", "mallory", exposedAt.String())
	b.apply(t, "blue", admitOne)
	b.untilReceived(t, "n1", "blue")
	admitted := func() {
		t.Helper()
		labtest.Until(t, labtest.Patience, "an exposed port answers the host that it admits", func() bool {
			return b.ask(t, internet, netip.AddrPortFrom(exposedAt, echoPort)) == batch
		})
	}
	admitted()
	b.openAgain(t)
	b1, b2 := b.container(t, "b1"), b.container(t, "b2")
	r1, r2 := b.container(t, "r1"), b.container(t, "r2")
	denied := b.routed("n1", "a host that the policy denies", dropreason.PolicyDenied, datagram(notAdmitted, exposedAt))
	denied.ports = 0 // only frames of containers are counted
	for _, a := range []attack{
		denied,
		b.routed("n1", "containers of the node as hosts outside", dropreason.OwnSource,
			datagram(b1.Plaintext, exposedAt), datagram(r1.Plaintext, exposedAt)),
		b.routed("n1", "containers as hosts outside", dropreason.TenantToNode,
			datagram(b2.Plaintext, exposedAt), datagram(r2.Plaintext, exposedAt)),
		b.routed("n1", "a service as a host outside", dropreason.ExposedSource, datagram(blues, exposedAt)),
	} {
		t.Run(a.name, func(t *testing.T) { b.try(t, a) })
	}
	admitted()
}

// echoService makes a service of a tenant's echo servers, and returns its address when a container has had an answer.
func (b *bed) echoService(t *testing.T, tenant, client string, external ...string) netip.Addr {
	t.Helper()
	is := &pilasterv1.Service{Tenant: tenant, Name: "web", Selector: web, ExternalIps: external,
		Ports: []*pilasterv1.ServicePort{{Protocol: "UDP", Port: echoPort, Target: echoPort}}}
	if len(external) > 0 {
		is.TrafficPolicy = "Local"
	}
	made, err := b.Operator().CreateService(b.ctx, connect.NewRequest(&pilasterv1.CreateServiceRequest{Service: is}))
	if err != nil {
		t.Fatal(err)
	}
	at, err := netip.ParseAddr(made.Msg.Service.Address)
	if err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, labtest.Patience, "a service answers "+client, func() bool {
		return b.ask(t, client, netip.AddrPortFrom(at, echoPort)) == batch
	})
	return at
}

// services returns the attacks.
func (b *bed) services(t *testing.T, blues, reds netip.Addr) []attack {
	b1, b2 := b.container(t, "b1"), b.container(t, "b2")
	r1, r2 := b.container(t, "r1"), b.container(t, "r2")
	bytes := blues.As16()
	clear(bytes[8:])
	alias := netip.AddrFrom16(bytes) // the source of connections of a container to itself
	return []attack{
		from("victims as clients", "mallory", dropreason.SrcNotOwn, "n1", 0,
			datagram(b1.Address, blues), datagram(b2.Address, blues), datagram(r1.Address, blues),
			datagram(r1.Address, reds), datagram(r2.Address, reds)),
		from("services as sources", "mallory", dropreason.SrcNotOwn, "n1", 0,
			datagram(blues, b1.Address), datagram(blues, b2.Address), datagram(blues, blues),
			datagram(alias, b1.Address), datagram(alias, blues), datagram(reds, b1.Address)),
		b.hosted("n1", "victims as clients, from a host process", dropreason.HostClaimsTenant,
			datagram(b1.Plaintext, blues), datagram(b2.Plaintext, blues)),
		b.routed("n1", "victims as clients, from the fabric", dropreason.TenantToNode, datagram(b2.Plaintext, blues)),
		b.routed("n1", "services as sources, from the fabric", dropreason.TenantMismatch,
			datagram(blues, b1.Plaintext), datagram(alias, b1.Plaintext)),
	}
}
