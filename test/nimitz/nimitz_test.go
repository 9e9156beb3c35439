// Package nimitz_test tests tenants of network nimitz in a lab together with one of netpila (NIMITZ §3; NM1, NM3):
// containers reach only containers of their own tenant, even if tenants have the same addresses, and stay connected
// while no agent and no orchestrator runs.
package nimitz_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

var ten = netip.MustParsePrefix("10.0.0.0/16")

// Blue and red have the same CIDR; red's addresses are allocated one by one.
var spec = lab.Spec{
	Nodes: []string{"n1", "n2"},
	Tenants: []lab.Tenant{
		{Name: "blue", Network: "nimitz", CIDRs: []netip.Prefix{ten, netip.MustParsePrefix("fd12:3456::/48")},
			NodeBits: lab.NodeBits{IPv4: 26, IPv6: 96}},
		{Name: "red", Network: "nimitz", CIDRs: []netip.Prefix{ten}, NoNodeCIDRs: true},
		{Name: "green"},
	},
	Containers: []lab.Container{
		{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"},
		{Name: "b3", Node: "n1", Tenant: "blue"},
		{Name: "r1", Node: "n1", Tenant: "red"}, {Name: "r2", Node: "n2", Tenant: "red"},
		{Name: "r3", Node: "n2", Tenant: "red"},
		{Name: "g1", Node: "n1", Tenant: "green"}, {Name: "g2", Node: "n2", Tenant: "green"},
	},
}

type bed struct {
	*lab.Lab
	*testing.T
}

// isolated pings from every container to every container.
func (b bed) isolated(when string) { b.Helper(); labtest.Isolated(b.T, b.Lab, when) }

// entries returns the sizes of the switch's tables.
func (b bed) entries(node string) map[string]uint32 {
	b.Helper()
	s, err := b.Agent(node).Status(labtest.Context(b.T), connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		b.Fatal(err)
	}
	used := map[string]uint32{}
	for _, e := range s.Msg.Datapath.GetEntries() {
		used[strings.TrimPrefix(e.Table, "nimitz-")] = e.Used
	}
	if !s.Msg.Ready {
		b.Errorf("%s is not ready: %v", node, s.Msg.Problems)
	}
	return used
}

// Entries of n1. Senders: an address per family for each of b1 and b3, and one for r1. Forwards: these addresses, 3
// CIDRs, n2's 2 subnets of blue, and the addresses of r2 and r3.
const (
	senders  = 2*2 + 1
	forwards = senders + 3 + 2 + 2
)

func (b bed) counted(when string) {
	b.Helper()
	if e := b.entries("n1"); e["register"] != senders || e["forwarding"] != forwards || e["decap"] != 1 ||
		e["locals"] != 1 || e["tenants"] != 1 {
		b.Errorf("%s: n1 has %v; want %d senders and %d forwarding entries, and one container and tenant on netpila",
			when, e, senders, forwards)
	}
}

func TestTenantsSideBySide(t *testing.T) {
	b := bed{labtest.New(t, spec), t}
	ctx := labtest.Context(t)
	blue, err := b.Operator().GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"}))
	if err != nil {
		t.Fatal(err)
	}
	for i, bits := range []uint32{26, 96} {
		if got := blue.Msg.Tenant.Overlays[i]; got.NodeBits != bits {
			t.Errorf("unexpected subnets of nodes: %v", got)
		}
	}
	b.isolated("at first")
	b.counted("at first")

	// A flow loses no packets meanwhile, because the agent is not on the packet path, and a starting agent keeps the
	// switch's entries.
	lost := make(chan packet.PingResult, 1)
	ns, err := b.Namespace("b1")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	far, err := b.Container("b2")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Stop(ctx, lab.Orchestrator); err != nil {
		t.Fatal(err)
	}
	go func() {
		r, err := packet.Ping(ctx, ns, far.Address, packet.PingOptions{Count: 60, Interval: 25 * time.Millisecond})
		if err != nil {
			t.Error(err)
		}
		lost <- r
	}()
	for _, node := range spec.Nodes {
		if _, err := b.Kill(ctx, lab.AgentProcess(node)); err != nil {
			t.Fatal(err)
		}
	}
	if r := <-lost; r.Sent != 60 || r.Received != r.Sent {
		t.Errorf("%d of %d packets arrived while agents were killed", r.Received, r.Sent)
	}
	b.isolated("after agents were killed, without an orchestrator")
	b.counted("after agents were killed, without an orchestrator")
	// The node has a subnet of blue, but it would have to request an address of red from the orchestrator.
	if err := b.AddContainer(ctx, lab.Container{Name: "b4", Node: "n1", Tenant: "blue"}); err != nil {
		t.Error(err)
	}
	if err := b.AddContainer(ctx, lab.Container{Name: "r4", Node: "n1", Tenant: "red"}); err == nil ||
		!strings.Contains(err.Error(), "orchestrator") {
		t.Errorf("adding a container that needs an address, without an orchestrator: got error %v", err)
	}
	if err := b.Start(ctx, lab.Orchestrator); err != nil {
		t.Fatal(err)
	}
	b.isolated("with the orchestrator again")

	for _, c := range b.Containers() {
		if err := b.RemoveContainer(ctx, c.Name); err != nil {
			t.Error(err)
		}
	}
	for _, node := range spec.Nodes {
		if e := b.entries(node); e["register"]+e["forwarding"]+e["nat"]+e["locals"] > 0 {
			t.Errorf("%s without containers has %v", node, e)
		}
	}
}
