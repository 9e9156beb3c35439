// Package evpn_test tests tenants of network evpn in a lab (EV1): containers of two tenants with the same addresses,
// beside a router with FRR, whose hosts are in a tenant's Ethernet segment and behind the router.
package evpn_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/modules/evpn"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	pool     = "10.71.0.0/16"
	ourASN   = 65001
	patience = 90 * time.Second // for what takes a second on an idle machine
	stale    = 6 * time.Second
)

var spec = lab.Spec{
	Nodes:   []string{"n1", "n2"},
	LabKeys: modules.LabKeys{Pool: evpn.Pool{EVPN: pool}},
	Tenants: []lab.Tenant{
		{Name: "bronze", Network: tenant.EVPN, NoNodeCIDRs: true, CIDRs: prefixes("10.0.0.0/16", "fd12::/48")},
		{Name: "brass", Network: tenant.EVPN, CIDRs: prefixes("10.0.0.0/16")},
		{Name: "green"},
	},
	Containers: []lab.Container{
		{Name: "c1", Node: "n1", Tenant: "bronze"}, {Name: "c2", Node: "n2", Tenant: "bronze"},
		{Name: "c3", Node: "n1", Tenant: "bronze"}, {Name: "d1", Node: "n1", Tenant: "brass"},
		{Name: "d2", Node: "n2", Tenant: "brass"}, {Name: "g1", Node: "n1", Tenant: "green"},
	},
}

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeSysctl(name, value string) error {
	return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)
}

type bed struct {
	*lab.Lab
	*testing.T
	id uint32 // of tenant bronze
}

// bgpFlags are those of an orchestrator with a peer.
func bgpFlags(peer string) []string {
	return []string{
		"--evpn-peer", fmt.Sprintf("%s=%d", peer, frrASN), "--evpn-asn", fmt.Sprint(ourASN),
		"--evpn-vtep-pool", pool, "--evpn-allow-vtep", frrVTEPs,
		"--evpn-allow", "bronze=172.20.0.0/16", "--evpn-stale", stale.String(),
	}
}

func bgpArguments(peer string) func(*lab.Options) {
	return func(o *lab.Options) { o.OrchestratorArgs = append(o.OrchestratorArgs, bgpFlags(peer)...) }
}

func newBed(t *testing.T, options ...func(*lab.Options)) bed {
	t.Helper()
	b := bed{Lab: labtest.New(t, spec, options...), T: t}
	resp, err := b.OperatorOf("").ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	must(t, err)
	for _, is := range resp.Msg.Tenants {
		if is.Name == "bronze" {
			b.id = is.Ids[0].Id
		}
	}
	return b
}

// isolated pings from every container to every container.
func (b bed) isolated(when string) { b.Helper(); labtest.Isolated(b.T, b.Lab, when) }

// pings reports whether one of three echo requests from a namespace is answered.
func pings(ns *netns.Namespace, to string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	few := packet.PingOptions{Count: 3, Timeout: 300 * time.Millisecond}
	r, err := packet.Ping(ctx, ns, netip.MustParseAddr(to), few)
	return err == nil && r.Received > 0
}

func (b bed) reaches(container, to string) bool { return pings(b.namespace(container), to) }

// namespace returns a namespace of the lab, open until the end of the test.
func (b bed) namespace(name string) *netns.Namespace {
	b.Helper()
	ns, err := b.Namespace(name)
	must(b.T, err)
	b.Cleanup(func() { ns.Close() })
	return ns
}

func (b bed) address(name string) string {
	b.Helper()
	c, err := b.Container(name)
	must(b.T, err)
	return c.Address.String()
}

// TestTenants has one lab for all tests, because most of them change nothing.
func TestTenants(t *testing.T) {
	b := newBed(t, bgpArguments(frrAddress))
	b.isolated("at first")
	n := newFRRNode(t, b.Lab, b.id, ourASN, orchestratorAt)
	t.Run("both ways", func(t *testing.T) { b.with(t).bothWays(n) })
	t.Run("questions of hosts", func(t *testing.T) { b.with(t).questionsOfHosts(n) })
	t.Run("questions of containers", func(t *testing.T) { b.with(t).questionsOfContainers(n) })
	t.Run("how-to", func(t *testing.T) { b.with(t).followed(n) })
	t.Run("other tenant", func(t *testing.T) { b.with(t).otherTenant(n) })
	t.Run("withdrawal", func(t *testing.T) { b.with(t).withdrawn(n) })
	t.Run("move", func(t *testing.T) { b.with(t).moved(n) })
	t.Run("stale", func(t *testing.T) { b.with(t).lost(n) })
}

// orchestratorAt is the address of the lab's orchestrator.
const orchestratorAt = "2001:db8:70::2"

func (b bed) with(t *testing.T) bed { return bed{b.Lab, t, b.id} }

// bothWays sends to and from the hosts of FRR's kernel.
func (b bed) bothWays(n *frrNode) {
	c1, c2 := b.address("c1"), b.address("c2")
	pings(n.switched, segmentSide) // so that FRR knows the host
	for _, c := range []string{"c1", "c2"} {
		until(b.T, c+" reaches the routed host", func() bool { return b.reaches(c, routedHost) })
		until(b.T, c+" reaches the switched host", func() bool { return b.reaches(c, switchedHost) })
	}
	for _, to := range []string{c1, c2} {
		until(b.T, "the routed host reaches "+to, func() bool { return pings(n.routed, to) })
		until(b.T, "the switched host reaches "+to, func() bool { return pings(n.switched, to) })
	}
}

// otherTenant checks that a tenant with the same addresses reaches none of the hosts.
func (b bed) otherTenant(*frrNode) {
	for _, to := range []string{routedHost, switchedHost} {
		if b.reaches("d1", to) || b.reaches("g1", to) {
			b.Errorf("a container of another tenant reaches %s", to)
		}
	}
	b.isolated("with a router")
}

// withdrawn has FRR withdraw a prefix and announce it again.
func (b bed) withdrawn(n *frrNode) {
	family := []string{"configure terminal", fmt.Sprintf("router bgp %d", frrASN), "address-family ipv4 unicast"}
	n.Run(append(family, "no network "+routed)...)
	until(b.T, "without the routed host", func() bool { return !b.reaches("c1", routedHost) })
	n.Run(append(family, "network "+routed)...)
	until(b.T, "with the routed host again", func() bool { return b.reaches("c1", routedHost) })
}

// lost kills FRR's bgpd. Its zebra then removes FRR's routes to us, but its kernel still forwards what we send, which
// we do for --evpn-stale, without a gap.
func (b bed) lost(n *frrNode) {
	arrived := make(chan int, 1<<16)
	closed := receive(b.T, n.routed, arrived)
	defer closed()
	stop := send(b.T, b.namespace("c1"), routedHost, 20*time.Millisecond)
	defer stop()
	first := <-arrived
	began := time.Now()
	n.Kill("bgpd")
	last, at := first, time.Now()
	for end := time.Now().Add(patience); time.Since(at) < 2*time.Second && time.Now().Before(end); {
		select {
		case number := <-arrived:
			if number != last+1 {
				b.Errorf("datagram %d came after %d, %v after the loss of the peer", number, last, time.Since(began))
			}
			last, at = number, time.Now()
		case <-time.After(100 * time.Millisecond):
		}
	}
	if took := at.Sub(began); took < stale || took > patience/2 {
		b.Errorf("the routes of a lost peer went after %v, want %v or little more", took, stale)
	}
	n.Start("bgpd")
	until(b.T, "with the routed host after FRR's restart", func() bool { return b.reaches("c1", routedHost) })
	until(b.T, "with the switched host after FRR's restart", func() bool { return b.reaches("c1", switchedHost) })
}
