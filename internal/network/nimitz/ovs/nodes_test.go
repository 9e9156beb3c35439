package ovs

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// container is a container of tenant 7, port 2 of its node.
type container struct {
	ns        *netns.Namespace
	addresses []netip.Addr
}

// contain creates the container of a node: addresses, and a gateway with a static neighbour entry.
func (b *bed) contain(t *testing.T, addresses ...netip.Addr) container {
	t.Helper()
	must(t, sysctl(b.beyond, "default/disable_ipv6", "0"))
	b.link(t, "c2", pipeline.InsideMAC, pipeline.OutsideMAC)
	h, err := b.beyond.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName("c2")
	must(t, err)
	must(t, h.LinkSetMTU(l, 1500-70))
	for _, a := range addresses {
		gateway := netip.MustParseAddr("fe80::1")
		if a.Is4() {
			gateway = netip.MustParseAddr("169.254.1.1")
		}
		must(t, h.AddrAdd(l, &netlink.Addr{IPNet: single(a), Flags: unix.IFA_F_NODAD}))
		neighbour(t, h, l, gateway, pipeline.OutsideMAC)
		must(
			t,
			h.RouteAdd(
				&netlink.Route{
					LinkIndex: l.Attrs().Index,
					Dst:       ipNet(netip.PrefixFrom(a, 8).Masked()),
					Gw:        gateway.AsSlice(),
					Flags:     int(netlink.FLAG_ONLINK),
				},
			),
		)
	}
	must(t, b.s.Plug(limit(t), 2, pipeline.Device{Name: "c2", Netns: b.beyond.Path(), Inside: "c2"}))
	return container{b.beyond, addresses}
}

// entries returns the entries by which c reaches the other container.
func (c container) entries(other container, node netip.Prefix) []pipeline.Entry {
	all := []pipeline.Entry{pipeline.Peer{Nodes: netip.MustParsePrefix("fd70:696c:6100::/40")}}
	for i, a := range c.addresses {
		far := other.addresses[i]
		all = append(
			all,
			pipeline.Sender{Port: 2, Address: a, VNI: 7, Identity: 70},
			pipeline.Forward{VNI: 7, To: netip.PrefixFrom(a, a.BitLen()), Port: 2},
			pipeline.Forward{
				VNI:  7,
				To:   netip.PrefixFrom(far, far.BitLen()),
				Port: pipeline.VXLAN,
				VTEP: pipeline.VTEP(node),
			},
		)
	}
	return all
}

// twoNodes returns two nodes whose uplinks are connected, each with an Open vSwitch.
func twoNodes(t *testing.T) (one, two *bed) {
	t.Helper()
	one, two = newNode(t, packettest.Here), newNode(t, packettest.There)
	join(t, "eth0", one.node, two.node, uplinkMAC, fabricMAC)
	one.routes(t, fabricMAC, packettest.There)
	two.routes(t, uplinkMAC, packettest.Here)
	one.start(t)
	two.start(t)
	return one, two
}

// TestTwoNodes: containers of two nodes, each with an Open vSwitch, exchange data by their kernels' TCP, also after
// Open vSwitch has lost the node's MAC.
func TestTwoNodes(t *testing.T) {
	one, two := twoNodes(t)
	a := one.contain(t, netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("fd10:0:0:1::2"))
	b := two.contain(t, netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("fd10:0:0:2::2"))
	must(t, one.s.Apply(limit(t), nil, a.entries(b, packettest.There)))
	must(t, two.s.Apply(limit(t), nil, b.entries(a, packettest.Here)))
	for i := range a.addresses {
		transfer(t, a, b, b.addresses[i])
		transfer(t, b, a, a.addresses[i])
	}
	for _, node := range []*bed{one, two} {
		_, err := node.s.control(limit(t), "tnl/neigh/flush")
		must(t, err)
	}
	transfer(t, a, b, b.addresses[0])
}

// TestOpenedAgain: no packet between containers of two nodes is lost while a switch is opened repeatedly, as each agent
// start does.
func TestOpenedAgain(t *testing.T) {
	one, two := twoNodes(t)
	a, b := one.contain(t, netip.MustParseAddr("fd10:0:0:1::2")), two.contain(t, netip.MustParseAddr("fd10:0:0:2::2"))
	must(t, one.s.Apply(limit(t), nil, a.entries(b, packettest.There)))
	must(t, two.s.Apply(limit(t), nil, b.entries(a, packettest.Here)))
	sent := make(chan packet.PingResult)
	go func() {
		r, err := packet.Ping(
			limit(t),
			a.ns,
			b.addresses[0],
			packet.PingOptions{Count: 5000, Interval: 500 * time.Microsecond},
		)
		if err != nil {
			t.Error(err)
		}
		sent <- r
	}()
	for opened := 0; ; opened++ {
		select {
		case r := <-sent:
			t.Logf("opened %d times", opened)
			if opened == 0 || r.Sent == 0 || r.Received != r.Sent {
				t.Errorf("%d of %d replies arrived while the switch was opened %d times", r.Received, r.Sent, opened)
			}
			return
		default:
			one.open(t)
		}
	}
}

// transfer sends data from one container to the other, which sends it back.
func transfer(t *testing.T, from, to container, address netip.Addr) {
	t.Helper()
	var listener net.Listener
	at := net.JoinHostPort(address.String(), "0")
	must(t, to.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", at)
		return err
	}))
	defer listener.Close()
	echoed := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			_, err = io.Copy(conn, conn)
			err = errors.Join(err, conn.Close())
		}
		echoed <- err
	}()
	var conn net.Conn
	must(t, from.ns.Do(func() (err error) {
		conn, err = (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp", listener.Addr().String())
		return err
	}))
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	sent := make([]byte, 2<<20)
	rand.NewChaCha8([32]byte{}).Read(sent)
	go func() {
		conn.Write(sent)
		conn.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if errors.Is(err, os.ErrDeadlineExceeded) || err != nil {
		t.Fatalf("%v: %d of %d bytes, %v", address, len(got), len(sent), err)
	}
	if !bytes.Equal(got, sent) {
		t.Errorf("%v: the received bytes differ", address)
	}
	must(t, <-echoed)
}

// TestKernelVXLAN: a container exchanges data with a node that uses the kernel's VXLAN, which leaves checksums and
// segmentation to the next device. Received packets have the identity of the group policy field.
func TestKernelVXLAN(t *testing.T) {
	one, two := newNode(t, packettest.Here), newNode(t, packettest.There)
	join(t, "eth0", one.node, two.node, uplinkMAC, fabricMAC)
	one.routes(t, fabricMAC, packettest.There)
	two.routes(t, uplinkMAC, packettest.Here)
	one.start(t)
	a := one.contain(t, netip.MustParseAddr("10.0.1.2"), netip.MustParseAddr("fd10:0:0:1::2"))
	b := container{two.node, []netip.Addr{netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("fd10:0:0:2::2")}}
	must(t, one.s.Apply(limit(t), nil, a.entries(b, packettest.There)))
	h, err := two.node.Netlink()
	must(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(t, err)
	must(t, h.AddrAdd(lo, &netlink.Addr{IPNet: single(pipeline.VTEP(packettest.There)), Flags: unix.IFA_F_NODAD}))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = "overlay", pipeline.InsideMAC, 1500-70
	must(t, h.LinkAdd(&netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 7, Port: outerUDP, GBP: true, UDP6ZeroCSumRx: false, UDPCSum: true,
		SrcAddr: pipeline.VTEP(packettest.There).AsSlice(), Group: pipeline.VTEP(packettest.Here).AsSlice(),
	}))
	l, err := h.LinkByName("overlay")
	must(t, err)
	must(t, h.LinkSetUp(l))
	for i, address := range b.addresses {
		must(t, h.AddrAdd(l, &netlink.Addr{IPNet: single(address), Flags: unix.IFA_F_NODAD}))
		must(t, h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: single(a.addresses[i])}))
		neighbour(t, h, l, a.addresses[i], pipeline.OutsideMAC)
	}
	for i := range a.addresses {
		transfer(t, a, b, b.addresses[i])
		transfer(t, b, a, a.addresses[i])
	}
}
