package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// nimitzWire is two nodes with switches, and containers of tenants with the same addresses.
type nimitzWire struct {
	*wire
	switches [2]*Nimitz
}

// directTunnel reports whether network nimitz's tests run with --accelerate oncache.
func directTunnel() bool { return os.Getenv("PILASTER_TEST_ACCELERATE") == "oncache" }

func newNimitzWire(t testing.TB) *nimitzWire { return nimitzWireOf(t, directTunnel()) }

func nimitzWireOf(t testing.TB, direct bool) *nimitzWire {
	w := &nimitzWire{wire: newWireWith(t, endpoint.Veth, direct)}
	w.mesh(t)
	return w
}

// mesh gives the nodes their switches.
func (w *nimitzWire) mesh(t testing.TB) {
	t.Helper()
	for i, n := range w.nodes {
		var err error
		w.switches[i], err = n.datapath.Nimitz()
		must(t, err)
		peer := w.nodes[1-i]
		entries := []pipeline.Entry{pipeline.Peer{Nodes: peer.prefix}}
		for _, vni := range []pipeline.VNI{7, 8} {
			for _, to := range overlay(2 - i) {
				entries = append(
					entries,
					pipeline.Forward{VNI: vni, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(peer.prefix)},
				)
			}
		}
		must(t, w.switches[i].Apply(t.Context(), nil, entries))
	}
}

// overlay is the subnets of a node, 1 or 2, which both tenants have there.
func overlay(node int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(
			fmt.Sprintf("10.0.%d.0/24", node),
		), netip.MustParsePrefix(fmt.Sprintf("fd10:0:0:%d::/64", node)),
	}
}

// add makes a container with the node's host-th address of each family.
func (w *nimitzWire) add(t testing.TB, node int, vni pipeline.VNI, hostLink byte) *testContainer {
	t.Helper()
	return w.nodes[node-1].addOverlay(t, w.switches[node-1], node, vni, hostLink)
}

// addOverlay makes a container on the node with a number.
func (n *testNode) addOverlay(t testing.TB, s *Nimitz, node int, vni pipeline.VNI, hostLink byte) *testContainer {
	t.Helper()
	n.ids++
	c := &testContainer{node: n, ns: namespace(t, fmt.Sprint("container", n.ids))}
	c.record = endpoint.Record{ID: n.ids, State: endpoint.Active, Interface: "eth0", Netns: c.ns.Path()}
	port := pipeline.Port(n.ids)
	var entries []pipeline.Entry
	for i, subnet := range overlay(node) {
		b := subnet.Addr().AsSlice()
		b[len(b)-1] = hostLink
		a, _ := netip.AddrFromSlice(b)
		c.record.Attachments = append(c.record.Attachments, endpoint.Attachment{
			Network: "nimitz", Address: a, Gateway: []netip.Addr{netip.MustParseAddr("169.254.1.1"),
				netip.MustParseAddr("fe80::1")}[i],
			Routes: []netip.Prefix{
				[]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}[i],
			}, Overhead: pipeline.Overhead,
		})
		entries = append(entries, pipeline.Sender{Port: port, Address: a, VNI: vni, Identity: uint16(vni) * 10},
			pipeline.Forward{VNI: vni, To: netip.PrefixFrom(a, a.BitLen()), Port: port})
	}
	var err error
	c.record.Device, err = n.datapath.CreateDevice(t.Context(), c.record)
	must(t, err)
	for i, e := range entries {
		if f, ok := e.(pipeline.Forward); ok {
			f.MAC = pipeline.NewMAC(c.record.Device.ContainerMAC)
			entries[i] = f
		}
	}
	must(t, n.datapath.Attach(c.record))
	must(t, s.Plug(t.Context(), port, pipeline.Device{Name: c.record.Device.HostName}))
	must(t, s.Apply(t.Context(), nil, entries))
	must(t, n.datapath.Check(t.Context(), c.record))
	return c
}

// of returns the container with the attachments of a family first.
func (c *testContainer) of(family int) *testContainer {
	other := *c
	other.record.Attachments = slices.Clone(c.record.Attachments[family:])
	return &other
}

// TestNimitzWire: containers communicate over real devices, in both families, and never with another tenant that has
// the same addresses. tshark reads VXLAN with the tenant's VNI and identity on the fabric (NM2).
func TestNimitzWire(t *testing.T) {
	t.Run("VXLAN device", func(t *testing.T) { testNimitzWire(t, nimitzWireOf(t, false)) })
	t.Run("oncache", func(t *testing.T) {
		w := nimitzWireOf(t, true)
		testNimitzWire(t, w)
		w.checkDirect(t)
	})
}

// checkDirect checks that packets pass the VXLAN devices only to look up the next hop: about once a second for each of
// the paths to a node.
func (w *nimitzWire) checkDirect(t *testing.T) {
	t.Helper()
	near, far := w.add(t, 1, 7, 9), w.add(t, 2, 7, 9)
	for family := range 2 {
		from, to := near.of(family), far.of(family)
		datagram(t, from, to, 100)
		sent, received := w.nodes[0].tunnelPackets(t)
		const n, lookups = 100, 50 // more on a machine that is slow for the time
		for range n {
			datagram(t, from, to, 100)
		}
		s, r := w.nodes[0].tunnelPackets(t)
		if s-sent > lookups || r-received > lookups {
			t.Errorf("of %d datagrams and their echoes the VXLAN device sent %d and received %d, want at most %d", n,
				s-sent, r-received, lookups)
		}
	}
}

func testNimitzWire(t *testing.T, w *nimitzWire) {
	near, far, beside := w.add(t, 1, 7, 2), w.add(t, 2, 7, 2), w.add(t, 1, 7, 3)
	other := w.add(t, 1, 8, 2)
	w.add(t, 2, 8, 3)
	fabric := capture(t, w.nodes[1].ns)
	for family := range 2 {
		for _, pair := range [][2]*testContainer{{near, far}, {far, near}, {near, beside}} {
			from, to := pair[0].of(family), pair[1].of(family)
			transfer(t, from, to, 8<<20)
			datagram(t, from, to, 100)
			datagram(t, from, to, 20000)
		}
	}
	// Tenant 8 has no container at far's address, but has one at an address that tenant 7 does not use.
	for _, c := range []*testContainer{other, near} {
		to := far.record.Attachments[1].Address
		if c == near {
			to = netip.MustParseAddr("fd10:0:0:2::3")
		}
		if r := c.ping(t, to, 56, impatience); r.Received != 0 {
			t.Errorf("%v of another tenant answers", to)
		}
	}
	if r := other.ping(t, netip.MustParseAddr("fd10:0:0:2::3"), 56, patience); r.Received != r.Sent {
		t.Errorf("%d of %d answered within tenant 8", r.Received, r.Sent)
	}

	by := pipeline.VTEP(w.nodes[0].prefix).String()
	lines := readByTshark(t, fabric, w.nodes[1].prefix)
	for _, want := range []string{by + "|7|70|10.0.1.2", by + "|7|70|fd10:0:0:1::2", by + "|8|80|fd10:0:0:1::2"} {
		if !slices.Contains(lines, want) {
			t.Errorf("tshark sees no %s among\n%s", want, strings.Join(lines, "\n"))
		}
	}
	for _, line := range lines {
		if strings.HasPrefix(line, by+"|7|70|") || strings.HasPrefix(line, by+"|8|80|") {
			continue
		}
		t.Errorf("tshark sees %s", line)
	}
	for i, n := range w.nodes {
		got := n.counted(t, nil)
		delete(got, "no-route")
		delete(got, "no-endpoint")
		if len(got) != 0 {
			t.Errorf("node %d dropped %v", i+1, got)
		}
	}
}

// tunnelPackets returns how many packets have passed the node's VXLAN device.
func (n *testNode) tunnelPackets(t *testing.T) (sent, received uint64) {
	t.Helper()
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName(hook.TunnelDevice)
	must(t, err)
	return l.Attrs().Statistics.TxPackets, l.Attrs().Statistics.RxPackets
}

// readByTshark returns the tunnel packets to a node's tunnel address that a capture has until now, each once: sender,
// VNI, identity and inner destination.
func readByTshark(t *testing.T, c *packet.Capture, node netip.Prefix) []string {
	t.Helper()
	file := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4) // pcap
	for _, v := range []uint32{2 | 4<<16, 0, 0, 1 << 18, 1} {
		file = binary.LittleEndian.AppendUint32(file, v)
	}
	deadline, stop := context.WithTimeout(t.Context(), impatience)
	defer stop()
	for {
		got, err := c.Next(deadline)
		if err != nil {
			break
		}
		vtep := pipeline.VTEP(node).As16()
		if len(got.Frame) < 54 || !bytes.Equal(got.Frame[38:54], vtep[:]) {
			continue
		}
		n := uint32(min(len(got.Frame), 256))
		for _, v := range []uint32{0, 0, n, uint32(len(got.Frame))} {
			file = binary.LittleEndian.AppendUint32(file, v)
		}
		file = append(file, got.Frame[:n]...)
	}
	path := filepath.Join(t.TempDir(), "fabric.pcap")
	must(t, os.WriteFile(path, file, 0o600))
	out, err := exec.Command("tshark", "-n", "-r", path, "-Y", "vxlan && (ip || ipv6)", "-T", "fields", "-E",
		"separator=|", "-E", "occurrence=a",
		"-e", "ipv6.src", "-e", "vxlan.vni", "-e", "vxlan.gbp", "-e", "ip.src").
		Output()
	must(t, err)
	var lines []string
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		// The outer header is of IPv6, the inner one of either family.
		if fields := strings.Split(line, "|"); len(fields) == 4 {
			outer, inner, _ := strings.Cut(fields[0], ",")
			line = strings.Join([]string{outer, fields[1], fields[2], inner + fields[3]}, "|")
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
