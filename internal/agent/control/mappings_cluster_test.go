package control

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// createNimitz makes a tenant with CIDR 10.0.0.0/16; nodeBits 0 means that nodes have no subnets.
func (c *cluster) createNimitz(name string, nodeBits uint32) uint32 {
	c.t.Helper()
	resp, err := c.op.CreateTenant(c.t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{
		Name: name, Network: tenant.Nimitz, Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: nodeBits}},
	}))
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.Msg.Tenant.Ids[0].Id
}

// given is the number of allocations of a tenant, as shown to operators.
func (c *cluster) given(name string) uint64 {
	c.t.Helper()
	resp, err := c.op.GetTenant(c.t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.Msg.Tenant.Overlays[0].Given
}

func (m *member) addOf(tenant, container string) endpoint.Record {
	m.T.Helper()
	q := m.Request(container)
	q.Tenant = tenant
	r, err := m.Add(m.T.Context(), q)
	if err != nil {
		m.T.Fatal(err)
	}
	return r
}

// leads waits until a node's switch has these mappings for a VNI.
func (m *member) leads(vni uint32, want string) {
	m.T.Helper()
	agenttest.Eventually(m.T, func() error {
		if got := m.Driver.VXLAN.Remote(vni); got != want {
			return fmt.Errorf("the switch leads to %q, want %q", got, want)
		}
		return nil
	})
}

const vtep = "fd70:696c:6100:%d::2"

func at(prefix string, node int) string { return prefix + " " + fmt.Sprintf(vtep, node) }

// Nodes that host a tenant receive the mappings of this tenant's subnets, and of no other tenant. Each node keeps its
// own subnet, even without the orchestrator.
func TestSubnetsOfNodes(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	c := newCluster(t)
	green, lime := c.createNimitz("green", 24), c.createNimitz("lime", 24)
	dirs := []string{t.TempDir(), t.TempDir()}
	drivers := []*agenttest.Driver{agenttest.NewDriver(), agenttest.NewDriver()}
	n1, n2 := c.boot(dirs[0], "n1", drivers[0]), c.boot(dirs[1], "n2", drivers[1])
	n1.until(connected)
	n2.until(connected)
	if a := n1.addOf("green", "c1").Attachments[0]; a.Subnet.String() != "10.0.1.0/24" ||
		!a.Subnet.Contains(a.Address) {
		t.Errorf("a container of n1 has %+v", a)
	}
	n2.addOf("lime", "c1")
	if n2.Driver.VXLAN.Remote(green) != "" {
		t.Error("n2 knows green")
	}
	n2.addOf("green", "c2")
	n1.leads(green, at("10.0.2.0/24", 2))
	if got := n1.Driver.VXLAN.Remote(lime); got != "" {
		t.Errorf("n1 does not host lime, and knows %s", got)
	}
	if c.given("green") != 2 || c.given("lime") != 1 {
		t.Errorf("%d and %d are given", c.given("green"), c.given("lime"))
	}

	// With the orchestrator away, and over a restart.
	n1.stop()
	listen := c.Addr().String()
	c.Close()
	n1 = c.boot(dirs[0], "n1", drivers[0])
	if a := n1.addOf("green", "c3").Attachments[0]; a.Subnet.String() != "10.0.1.0/24" {
		t.Errorf("without the orchestrator a container has %+v", a)
	}
	if got := n1.Driver.VXLAN.Remote(green); got != at("10.0.2.0/24", 2) {
		t.Errorf("without the orchestrator the switch leads to %q", got)
	}
	c.start(listen, 0)
	n1.until(connected)
	n2.until(connected)

	// When the last container of a tenant ends, the node releases its subnet.
	if err := n2.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	n1.leads(green, "")
	n2.addOf("green", "c4")
	n1.leads(green, at("10.0.2.0/24", 2)) // it gets the same again
	n2.leads(green, at("10.0.1.0/24", 1))
}

// Without subnets every address has a mapping. It ends with its endpoint, even if the orchestrator is unreachable then.
func TestAddressesOneByOne(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	c := newCluster(t)
	green := c.createNimitz("green", 0)
	dir, driver := t.TempDir(), agenttest.NewDriver()
	n1, n2 := c.boot(dir, "n1", driver), c.boot(t.TempDir(), "n2", agenttest.NewDriver())
	n1.until(connected)
	n2.until(connected)
	n2.addOf("green", "c9")
	for _, name := range []string{"c1", "c2", "c3"} {
		n1.addOf("green", name)
	}
	n2.leads(green, strings.Join([]string{at("10.0.0.3/32", 1), at("10.0.0.4/32", 1), at("10.0.0.5/32", 1)}, ", "))
	if err := n1.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	n2.leads(green, strings.Join([]string{at("10.0.0.4/32", 1), at("10.0.0.5/32", 1)}, ", "))

	listen := c.Addr().String()
	c.Close()
	n1.until(func(s agent.LinkStatus) bool { return !s.Connected })
	if err := n1.Delete(t.Context(), "c2", "eth0"); err != nil { // no orchestrator
		t.Fatal(err)
	}
	c.start(listen, 0)
	n2.leads(green, at("10.0.0.5/32", 1))

	// An agent stops before it has released an address: the next agent finds that no endpoint has the address.
	n1.addOf("green", "c4")
	n2.leads(green, strings.Join([]string{at("10.0.0.5/32", 1), at("10.0.0.6/32", 1)}, ", "))
	c.Close()
	if err := n1.Delete(t.Context(), "c4", "eth0"); err != nil {
		t.Fatal(err)
	}
	n1.stop()
	c.start(listen, 1) // nodes wait for their turn
	n1 = c.boot(dir, "n1", driver)
	n1.until(connected)
	n2.leads(green, at("10.0.0.5/32", 1))
	if c.given("green") != 2 {
		t.Errorf("%d are given", c.given("green"))
	}
}
