package ovs

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func limit(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// bed is a node with its own Open vSwitch. The namespace beyond has the far ends of the node's devices: eth0 is the
// fabric's end, the others have the names of their ports.
type bed struct {
	node, beyond *netns.Namespace
	config       Config
	daemons      *Daemons
	s            *Switch
	programs     *datapath.Datapath // nil: no programs on containers' devices
}

var (
	fabricMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}
	uplinkMAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	gateway   = netip.MustParseAddr("fe80::9")
)

// folder returns a temporary folder whose path is short enough for sockets.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "ovs")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// newBed returns a node; the test holds the far end of its uplink.
func newBed(t testing.TB) *bed {
	t.Helper()
	b := newNode(t, packettest.Here)
	b.link(t, "eth0", fabricMAC, uplinkMAC)
	b.routes(t, fabricMAC, packettest.There, packettest.Stranger, packettest.Abroad, packettest.Farther)
	b.wire(t)
	b.tap(t)
	b.start(t)
	return b
}

// tap attaches the node's own programs to the devices at which the switch's packets come out.
func (b *bed) tap(t testing.TB) {
	t.Helper()
	pins := filepath.Join(folder(t), "bpf")
	t.Cleanup(func() { unix.Unmount(pins, unix.MNT_DETACH) })
	plan := address.DefaultPlan()
	plan.Base = packettest.Region
	must(t, b.node.Do(func() (err error) {
		b.programs, err = datapath.Open(datapath.Config{
			Uplinks: b.config.Uplinks, NodePrefix: b.config.Node, Plan: plan, BPFFS: pins, MaxEndpoints: 100,
			Device: endpoint.Veth, Log: slog.New(slog.DiscardHandler),
		})
		return err
	}))
	t.Cleanup(func() { b.programs.Close() })
	taps, err := b.programs.OVSPorts()
	must(t, err)
	b.config.OVSPorts = taps
}

// newNode creates the two namespaces of a node.
func newNode(t testing.TB, node netip.Prefix) *bed {
	t.Helper()
	dir := folder(t)
	space := func(name string) *netns.Namespace {
		ns, err := netns.Create(filepath.Join(dir, name))
		must(t, err)
		t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
		must(t, sysctl(ns, "default/accept_dad", "0"))
		return ns
	}
	b := &bed{node: space("node"), beyond: space("beyond")}
	must(t, sysctl(b.beyond, "default/disable_ipv6", "1"))
	b.config = Config{
		RunDir: filepath.Join(
			dir,
			"ovs",
		), Netns: b.node, Uplinks: []string{"eth0"}, Node: node, Region: packettest.Region,
		Others:   []netip.Prefix{netip.MustParsePrefix("fc00::/8")},
		Datapath: Datapath(os.Getenv("PILASTER_TEST_OVS")),
	}
	return b
}

func sysctl(ns *netns.Namespace, name, value string) error {
	return ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/"+name, []byte(value), 0) })
}

// routes adds routes to other nodes, by a router with that MAC.
func (b *bed) routes(t testing.TB, mac net.HardwareAddr, to ...netip.Prefix) {
	t.Helper()
	must(t, sysctl(b.node, "eth0/router_solicitations", "0"))
	h, err := b.node.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	neighbour(t, h, eth0, gateway, mac)
	for _, p := range to {
		must(t, h.RouteReplace(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: ipNet(p), Gw: gateway.AsSlice()}))
	}
}

func neighbour(t testing.TB, h *netlink.Handle, l netlink.Link, a netip.Addr, mac net.HardwareAddr) {
	t.Helper()
	family := unix.AF_INET6
	if a.Is4() {
		family = unix.AF_INET
	}
	must(
		t,
		h.NeighSet(
			&netlink.Neigh{
				LinkIndex:    l.Attrs().Index,
				Family:       family,
				State:        netlink.NUD_PERMANENT,
				IP:           a.AsSlice(),
				HardwareAddr: mac,
			},
		),
	)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (b *bed) start(t testing.TB) {
	t.Helper()
	if b.config.Datapath == Kernel {
		booted(t)
	}
	var err error
	b.daemons, err = Start(limit(t), b.node, b.config.RunDir)
	must(t, err)
	t.Cleanup(func() {
		if err := b.daemons.Stop(); err != nil {
			t.Error(err)
		}
	})
	if b.config.Datapath == Kernel {
		b.offload(t)
	}
	b.open(t)
}

func (b *bed) open(t testing.TB) {
	t.Helper()
	var err error
	b.s, err = Open(limit(t), b.config)
	must(t, err)
}

// link creates a device on the node whose peer, in beyond, has the same name.
func (b *bed) link(t testing.TB, name string, far, near net.HardwareAddr) {
	t.Helper()
	join(t, name, b.beyond, b.node, far, near)
}

// join creates a pair of devices of one name.
func join(t testing.TB, name string, one, other *netns.Namespace, oneMAC, otherMAC net.HardwareAddr) {
	t.Helper()
	h, err := one.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = name, oneMAC
	links, err := netns.List(h.LinkList)
	must(t, err)
	attrs.Index = 1000 + len(links) // the kernel reports carrier late if both ends have the same index
	must(
		t,
		h.LinkAdd(
			&netlink.Veth{
				LinkAttrs:        attrs,
				PeerName:         name,
				PeerHardwareAddr: otherMAC,
				PeerNamespace:    netlink.NsFd(other.FD()),
			},
		),
	)
	for _, ns := range []*netns.Namespace{one, other} {
		h, err := ns.Netlink()
		must(t, err)
		defer h.Close()
		l, err := h.LinkByName(name)
		must(t, err)
		must(t, h.LinkSetUp(l))
	}
	must(t, one.WaitUp(limit(t), name))
	must(t, other.WaitUp(limit(t), name))
}

func deviceOf(p pipeline.Port) string {
	switch p {
	case pipeline.VXLAN:
		return "eth0"
	case pipeline.Gateway:
		return "gw"
	}
	return fmt.Sprintf("c%d", uint32(p))
}

// plug creates devices for all ports of the packet tests.
func (b *bed) plug(t testing.TB) {
	t.Helper()
	for _, p := range append(packettest.Ports, pipeline.Gateway) {
		b.link(t, deviceOf(p), nil, nil)
		must(t, sysctl(b.node, deviceOf(p)+"/disable_ipv6", "1"))
		must(t, b.s.Plug(limit(t), p, pipeline.Device{Name: deviceOf(p)}))
	}
}

// end is the far end of a device.
type end struct {
	*packet.Injector
	*packet.Capture
}

func (b *bed) end(t testing.TB, p pipeline.Port) end {
	t.Helper()
	i, err := packet.NewInjector(b.beyond, deviceOf(p))
	must(t, err)
	t.Cleanup(func() { i.Close() })
	c, err := packet.NewCapture(b.beyond, deviceOf(p), packet.IncomingOnly)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return end{i, c}
}

// drops reads the counters, also those of the programs, after the switch's datapath has flushed its own.
func (b *bed) drops(t testing.TB, ctx context.Context) map[string]uint64 {
	t.Helper()
	_, err := b.s.control(ctx, "revalidator/purge")
	must(t, err)
	counts, err := b.s.Drops(ctx)
	must(t, err)
	all := map[string]uint64{}
	for why, n := range counts {
		all[why.String()] = n
	}
	if b.programs != nil {
		status, err := b.programs.Status()
		must(t, err)
		for _, d := range status.Drops {
			if d.Packets > 0 {
				all[d.Reason] += d.Packets
			}
		}
	}
	return all
}

const limitOfPacket = 10 * time.Second

// past returns a context that has ended.
func past() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// encapsulate wraps a frame in VXLAN with the group policy extension.
func encapsulate(from, to netip.Addr, vni pipeline.VNI, identity uint16, frame []byte) []byte {
	head := []byte{0x88, 0, byte(identity >> 8), byte(identity), byte(vni >> 16), byte(vni >> 8), byte(vni), 0}
	return packet.Packet{
		Source:      from,
		Destination: to,
		Body:        packet.UDP{SourcePort: 5000, DestinationPort: outerUDP, Payload: append(head, frame...)},
	}.
		Frame(
			uplinkMAC,
			fabricMAC,
		)
}

// next returns the next frame, without the kernel's own neighbour and router discovery.
func (e end) next(ctx context.Context) ([]byte, error) {
	for {
		got, err := e.Next(ctx)
		if err != nil || got.Frame[0]&1 == 0 {
			return got.Frame, err
		}
	}
}
