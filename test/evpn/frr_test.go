package evpn_test

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// Addresses of FRR's side.
const (
	frrASN       = 65002
	frrAddress   = "2001:db8:99::2" // of its BGP sessions
	frrRouter    = "2001:db8:99::1" // the fabric's side of the link
	frrVTEP      = "10.2.0.7"
	frrVTEPs     = "10.2.0.0/24"
	switchedHost = "10.0.200.22" // in the tenant's segment
	switchedMAC  = "02:00:00:00:02:22"
	segmentSide  = "10.0.200.1" // FRR's own address there
	routedHost   = "172.20.1.9" // behind FRR's router
	routedSide   = "172.20.1.1"
	routed       = "172.20.1.0/24"
)

// frrNode is a router with FRR, a kernel VXLAN, a host in the tenant's segment and one behind the router.
type frrNode struct {
	*bgptest.FRR
	t                *testing.T
	ns               *netns.Namespace
	kern             *netlink.Handle
	switched, routed *netns.Namespace
	segment          uint32 // VNI
}

func namespace(t *testing.T, name string) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), name))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	return ns
}

func handle(t *testing.T, ns *netns.Namespace) *netlink.Handle {
	t.Helper()
	h, err := ns.Netlink()
	must(t, err)
	t.Cleanup(h.Close)
	return h
}

func up(t *testing.T, h *netlink.Handle, device string, addresses ...string) netlink.Link {
	t.Helper()
	l, err := h.LinkByName(device)
	must(t, err)
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		must(t, err)
		a.Flags = unix.IFA_F_NODAD
		must(t, h.AddrAdd(l, a))
	}
	must(t, h.LinkSetUp(l))
	return l
}

// wire connects two namespaces.
func wire(t *testing.T, h *netlink.Handle, device string, to *netns.Namespace, there string, mac string) {
	t.Helper()
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: there, PeerNamespace: netlink.NsFd(to.FD()),
	}
	if mac != "" {
		hw, err := net.ParseMAC(mac)
		must(t, err)
		pair.PeerHardwareAddr = hw
	}
	must(t, h.LinkAdd(pair))
}

func routeVia(t *testing.T, h *netlink.Handle, device, to string, via string) {
	t.Helper()
	l, err := h.LinkByName(device)
	must(t, err)
	prefix := netip.MustParsePrefix(to)
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{
		IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}}
	hop := netip.MustParseAddr(via)
	if prefix.Addr().Is4() && hop.Is6() {
		r.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: hop.AsSlice()}
	} else {
		r.Gw = hop.AsSlice()
	}
	must(t, h.RouteReplace(r))
}

// newFRRNode connects a router to a lab's fabric. Its peers have one AS.
func newFRRNode(t *testing.T, l *lab.Lab, tenantID uint32, peerASN int, peers ...string) *frrNode {
	t.Helper()
	n := &frrNode{
		t: t, ns: namespace(t, "frr"), switched: namespace(t, "switched"), routed: namespace(t, "routed"),
	}
	n.kern = handle(t, n.ns)
	fabric, err := l.Namespace(lab.Router)
	must(t, err)
	t.Cleanup(func() { fabric.Close() })
	router := handle(t, fabric)
	wire(t, router, "frr", n.ns, "fabric", "")
	up(t, router, "frr", frrRouter+"/64", "192.168.99.1/30")
	up(t, n.kern, "lo")
	up(t, n.kern, "fabric", frrAddress+"/64", "192.168.99.2/30")
	routeVia(t, n.kern, "fabric", "2001:db8::/32", frrRouter)
	routeVia(t, n.kern, "fabric", pool, "192.168.99.1")
	routeVia(t, router, "frr", frrVTEPs, "192.168.99.2")
	for i, node := range []string{"n1", "n2"} {
		ns, err := l.Namespace(node)
		must(t, err)
		h, err := ns.Netlink()
		must(t, err)
		routeVia(t, h, lab.Uplink, frrVTEPs, fmt.Sprintf("2001:db8:70:%x::1", i+1))
		h.Close()
		ns.Close()
	}
	n.segment = evpn.SegmentVNI(tenantID)
	page := readHowTo(t)
	page.run(n.ns, "ip address add")
	n.plug(n.switched, "to-switched", switchedMAC)
	inside := handle(t, n.switched)
	up(t, inside, "lo")
	up(t, inside, "eth0", switchedHost+"/16")

	wire(t, n.kern, "to-routed", n.routed, "eth0", "")
	up(t, n.kern, "to-routed", routedSide+"/24")
	beyond := handle(t, n.routed)
	up(t, beyond, "lo")
	up(t, beyond, "eth0", routedHost+"/24")
	routeVia(t, beyond, "eth0", "10.0.0.0/16", routedSide)

	n.FRR = bgptest.StartFRR(t, n.ns, withPeers(page.block("vni 1"), peerASN, peers...))
	return n
}

// plug connects a namespace to the tenant's segment. Its device has a MAC.
func (n *frrNode) plug(ns *netns.Namespace, port, mac string) {
	n.t.Helper()
	wire(n.t, n.kern, port, ns, "eth0", mac)
	bridge, err := n.kern.LinkByName("br-l2")
	must(n.t, err)
	must(n.t, n.kern.LinkSetMaster(up(n.t, n.kern, port), bridge))
}

// until waits for what the daemons reach in their own time.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	labtest.Until(t, patience, what, ok)
}
