package routing_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// place is a namespace with a netlink handle.
type place struct {
	*netlink.Handle
	ns *netns.Namespace
}

func (p place) link(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := p.LinkByName(name)
	must(t, err)
	return l
}

func (p place) up(t *testing.T, device string) {
	t.Helper()
	retry(t, func() error { return p.LinkSetUp(p.link(t, device)) })
}

// ready waits until packets pass a device.
func (p place) ready(t *testing.T, device string) {
	t.Helper()
	must(t, p.ns.WaitUp(labtest.Context(t), device))
}

func (p place) down(t *testing.T, device string) {
	t.Helper()
	retry(t, func() error { return p.LinkSetDown(p.link(t, device)) })
}

// give assigns an address that works immediately.
func (p place) give(t *testing.T, device string, a netip.Addr) {
	t.Helper()
	retry(t, func() error {
		return p.AddrReplace(p.link(t, device),
			&netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, 64)), Flags: unix.IFA_F_NODAD})
	})
}

func (p place) route(t *testing.T, r *netlink.Route) {
	t.Helper()
	retry(t, func() error { return p.RouteReplace(r) })
}

// sysctl writes a value below /proc/sys/net/ipv6.
func (p place) sysctl(t *testing.T, name, value string) {
	t.Helper()
	must(t, p.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/"+name, []byte(value), 0) }))
}

// fabric is a lab whose n1 is attached to the switch and the two routers.
type fabric struct {
	lab              *lab.Lab
	node, core, wire place // n1, the lab's router, the switch
	routers          [2]router
}

// router is r1 or r2. Its device "lan" connects it to the switch, and its device "wan" to the lab's router.
type router struct {
	place
	name    string
	address netip.Addr // on the switch
	wan     netip.Addr // on the link to the lab's router
}

var nodeSide = netip.MustParseAddr("2001:db8:70:1::2") // address of n1 on the lab's second link

// First device indexes at the switch and at the lab's router. They differ from the indexes at the other ends of the
// links, as in package lab.
const switchIndex, wanIndex = 200, 300

// flush removes n1's next hops and default routes.
const flush = "nexthop flush; -6 route flush default"

// newFabric brings the lab up with containers c0, c1 … on n1 and "far" on n2, stops both agents, and inserts the switch
// and routers between n1 and the lab's router. n1 has no default route yet.
func newFabric(t *testing.T, containers int) *fabric {
	spec := lab.Spec{
		Nodes: []string{"n1", "n2"}, Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{{Name: "far", Node: "n2", Tenant: "blue"}},
	}
	for i := range containers {
		spec.Containers = append(spec.Containers, lab.Container{Name: fmt.Sprint("c", i), Node: "n1", Tenant: "blue"})
	}
	f := &fabric{lab: labtest.New(t, spec)}
	for _, node := range spec.Nodes {
		must(t, f.lab.KillNoRestart(labtest.Context(t), lab.AgentProcess(node)))
	}
	f.node, f.core = f.open(t, "n1"), f.open(t, lab.Router)
	f.wire = create(t, "switch")
	retry(t, func() error { return f.wire.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bridge"}}) })
	f.wire.up(t, "bridge")
	retry(t, func() error { return f.core.LinkSetNsFd(f.core.link(t, "n1"), f.wire.ns.FD()) })
	f.plug(t, "n1")
	for i := range f.routers {
		f.routers[i] = f.newRouter(t, i)
	}
	f.wire.ready(t, "n1")
	f.node.ready(t, lab.Uplink)
	f.ip(t, flush)
	// Shorten the neighbour unreachability detection, which takes half a minute by default.
	for name, value := range nudSettings {
		f.node.sysctl(t, "neigh/"+lab.Uplink+"/"+name, value)
	}
	f.back(t, &f.routers[1])
	return f
}

func (f *fabric) open(t *testing.T, name string) place {
	t.Helper()
	ns, err := f.lab.Namespace(name)
	must(t, err)
	return handleIn(t, ns)
}

func create(t *testing.T, name string) place {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	ns, err := netns.Create(path)
	must(t, err)
	t.Cleanup(func() {
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	})
	p := handleIn(t, ns)
	for _, name := range []string{"conf/all/accept_dad", "conf/default/accept_dad"} {
		p.sysctl(t, name, "0")
	}
	return p
}

func handleIn(t *testing.T, ns *netns.Namespace) place {
	t.Helper()
	t.Cleanup(func() { ns.Close() })
	h, err := ns.Netlink()
	must(t, err)
	t.Cleanup(h.Close)
	return place{h, ns}
}

// plug makes a device a port of the switch and sets it up.
func (f *fabric) plug(t *testing.T, port string) {
	t.Helper()
	retry(t, func() error { return f.wire.LinkSetMaster(f.wire.link(t, port), f.wire.link(t, "bridge")) })
	f.wire.up(t, port)
}

func (f *fabric) newRouter(t *testing.T, i int) router {
	t.Helper()
	name := fmt.Sprint("r", i+1)
	wan := netip.MustParseAddr(fmt.Sprintf("2001:db8:71:%d::1", i+1))
	r := router{create(t, name), name, netip.MustParseAddr(fmt.Sprint("2001:db8:70:1::a", i+1)), wan.Next()}
	r.sysctl(t, "conf/all/forwarding", "1")
	connect(t, f.wire, name, switchIndex+i, r.place, "lan")
	f.plug(t, name)
	connect(t, f.core, name, wanIndex+i, r.place, "wan")
	f.core.give(t, name, wan)
	r.give(t, "wan", r.wan)
	r.give(t, "lan", r.address)
	f.core.up(t, name)
	r.up(t, "lan")
	r.up(t, "wan")
	for _, device := range []string{"lan", "wan"} {
		r.ready(t, device)
	}
	f.wire.ready(t, name)
	f.core.ready(t, name)
	r.route(t, &netlink.Route{Family: unix.AF_INET6, Gw: wan.AsSlice()})
	r.route(t, &netlink.Route{Dst: ipNet(f.prefix(t)), Gw: nodeSide.AsSlice()})
	return r
}

func connect(t *testing.T, outer place, name string, index int, inner place, peer string) {
	t.Helper()
	retry(t, func() error {
		return outer.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: name, Index: index}, PeerName: peer,
			PeerNamespace: netlink.NsFd(inner.ns.FD()),
		})
	})
}

func (f *fabric) prefix(t *testing.T) netip.Prefix {
	t.Helper()
	p, err := f.lab.Prefix("n1")
	must(t, err)
	return p
}

// back makes the fabric route packets to n1 through a router, as a routing protocol would.
func (f *fabric) back(t *testing.T, r *router) {
	t.Helper()
	link := f.core.link(t, r.name).Attrs().Index
	f.core.route(t, &netlink.Route{LinkIndex: link, Dst: ipNet(f.prefix(t)), Gw: r.wan.AsSlice()})
}

// dies disconnects a router from the switch without notice. Only the router's own link goes down.
func (f *fabric) dies(t *testing.T, r *router) { f.wire.down(t, r.name) }

// returns connects a router again, and removes the node's neighbour entry of this router.
func (f *fabric) returns(t *testing.T, r *router) {
	t.Helper()
	f.wire.up(t, r.name)
	f.wire.ready(t, r.name)
	r.ready(t, "lan")
	neighbour := &netlink.Neigh{LinkIndex: f.node.link(t, lab.Uplink).Attrs().Index, Family: unix.AF_INET6,
		IP: r.address.AsSlice()}
	if err := netns.Retry(func() error { return f.node.NeighDel(neighbour) }); err != nil &&
		!errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
}

// ip runs iproute2 on n1, as administrators and routing daemons do. R1 and R2 stand for the routers. A semicolon
// separates commands.
func (f *fabric) ip(t *testing.T, commands string) {
	t.Helper()
	routers := strings.NewReplacer("R1", f.routers[0].address.String()+" dev eth0", "R2",
		f.routers[1].address.String()+" dev eth0")
	for command := range strings.SplitSeq(commands, "; ") {
		_, err := f.lab.Output(t.Context(), "n1",
			append([]string{"ip"}, strings.Fields(routers.Replace(command))...)...)
		must(t, err)
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)}
}
