package ovs

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/ovn-kubernetes/libovsdb/ovsdb"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// booted returns when the machine has been up for 10 s. Before, Open vSwitch 3.1.0 counts no CPUs, and a kernel
// datapath that it creates then never gets handlers: packets that miss the flow cache are lost.
func booted(t testing.TB) {
	t.Helper()
	for {
		var up unix.Timespec
		must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &up)) // which Open vSwitch reads
		left := 10*time.Second - time.Duration(up.Nano())
		if left <= 0 {
			return
		}
		time.Sleep(left)
	}
}

// offload makes Open vSwitch offload its flows to tc, as on a machine whose NIC supports it. This machine's devices do
// not, so the flows stay in tc.
func (b *bed) offload(t testing.TB) {
	t.Helper()
	d, err := openDatabase(limit(t), b.config.RunDir)
	must(t, err)
	defer d.close()
	root, err := d.root(limit(t))
	must(t, err)
	must(t, d.change(limit(t), ovsdb.Operation{
		Op: ovsdb.OperationUpdate, Table: tableRoot, Where: []ovsdb.Condition{where("_uuid", root["_uuid"])},
		Row: ovsdb.Row{"other_config": options(map[string]string{"hw-offload": "true", "tc-policy": "skip_hw"})},
	}))
}

// wire makes the uplink fill in checksums, which the tests check.
func (b *bed) wire(t testing.TB) {
	t.Helper()
	must(t, b.node.Do(func() error { return NoOffload("eth0") }))
}

// isTranslated reports whether the packet leaves with another address.
func isTranslated(c packettest.Case, want packettest.Result) bool {
	return want.Src != c.Packet.Source || want.Dst != c.Packet.Destination
}

// unsummed removes the checksum that tc writes where IPv6 has none: tc recomputes the checksum of what it changes.
func unsummed(t *testing.T, c packettest.Case, want packettest.Result, frame []byte) []byte {
	const sum = 14 + 40 + 6
	raw, ok := c.Packet.Body.(packet.Raw)
	if !ok || raw.Proto != packet.ProtocolUDP || want.Src.Is4() || !isTranslated(c, want) ||
		len(c.Packet.Extensions) > 0 {
		return frame
	}
	if !bytes.Equal(frame[sum:sum+2], []byte{0, 0}) && !packet.ChecksumOK(frame[14:]) {
		t.Errorf("%s: a wrong checksum in %x", c.Name, frame)
	}
	frame = bytes.Clone(frame)
	copy(frame[sum:], []byte{0, 0})
	return frame
}

// fits reports whether Open vSwitch 3.1 offloads the packet's flow to tc. It does not for fragments of IPv6, and for
// translated packets only if it knows the protocol's checksum.
func fits(c packettest.Case, want packettest.Result) bool {
	raw, other := c.Packet.Body.(packet.Raw)
	other = other && raw.Proto != packet.ProtocolUDP
	return !(isTranslated(c, want) && other) && !(want.Src.Is6() && len(c.Packet.Extensions) > 0)
}

// purge removes all flows of the datapath.
func (b *bed) purge(t *testing.T) {
	t.Helper()
	for flows := "all"; flows != ""; {
		_, err := b.s.control(limit(t), "revalidator/purge")
		must(t, err)
		flows, err = b.s.control(limit(t), "dpctl/dump-flows")
		must(t, err)
		flows = strings.TrimSpace(flows)
	}
}

// offloaded sends each packet that is forwarded twice, so that the second one meets the flow of the first. Except for
// tunnels, that flow is a tc rule and counts the packet.
func (b *bed) offloaded(t *testing.T, ends map[pipeline.Port]end) {
	t.Helper()
	places := map[string]int{}
	for _, c := range packettest.Cases() {
		want := judge(c)
		if want.Drop != 0 {
			continue
		}
		b.purge(t)
		frame := c.In()
		if c.From == pipeline.VXLAN {
			frame = encapsulate(c.Outer, pipeline.VTEP(packettest.Here), c.VNI, c.Identity, frame)
		}
		for range 2 {
			must(t, ends[c.From].Send(frame))
			got, err := ends[want.To].next(limit(t))
			must(t, err)
			if want.To == pipeline.VXLAN {
				got = b.tunnelled(t, got, want)
			}
			if !bytes.Equal(unsummed(t, c, want, got), want.Frame) {
				t.Errorf("%s: it came out as\n%x, want\n%x", c.Name, got, want.Frame)
			}
		}
		flows, err := b.s.control(limit(t), "dpctl/dump-flows", "-m", "type=tc")
		must(t, err)
		switch hit := strings.Contains(flows, "packets:1,"); {
		case c.From == pipeline.VXLAN || want.To == pipeline.VXLAN:
			if hit {
				places["tunnels in tc"]++
			} else {
				places["tunnels in the datapath itself"]++
			}
		case hit:
			places["in tc"]++
		case !fits(c, want):
			places["in the datapath itself"]++
		default:
			all, err := b.s.control(limit(t), "dpctl/dump-flows", "-m")
			t.Errorf("%s: no tc rule has counted the packet: %s, %v", c.Name, all, err)
		}
	}
	if places["in tc"] == 0 {
		t.Error("no case forwards between two ports of this node in tc")
	}
	t.Logf("packets went by flows %v", places)
}
