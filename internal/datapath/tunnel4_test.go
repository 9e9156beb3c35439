package datapath

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestForgedTunnels4: tunnel packets over IPv4 that are not from our tunnel device are dropped.
func TestForgedTunnels4(t *testing.T) {
	n := newLink(t).nodes[0]
	n.vtep4 = netip.MustParsePrefix("192.0.2.0/24")
	n.open(t, endpoint.Veth)
	b := &progBench{testNode: n}
	devices := b.edgeDevices(t)
	uplink := uint32(n.datapath.Uplinks[0].Attrs().Index)

	pool, other := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("198.51.100.7")
	udp := func(from, to netip.Addr, port uint16) packet.Packet {
		body := packet.UDP{SourcePort: 55555, DestinationPort: port, Payload: make([]byte, 30)}
		return packet.Packet{Source: from, Destination: to, Body: body}
	}
	frame := func(p packet.Packet) []byte { return p.Frame(broadcastMAC, broadcastMAC) }
	fragment := func(offset byte) []byte {
		f := frame(udp(other, pool, 53))
		f[14+7] = offset
		return f[:14+20+8] // shorter than the headers of IPv6
	}
	other17 := frame(udp(pool, other, pipeline.UDPPort))
	other17[14+9] = packet.ProtocolTCP
	for _, c := range []struct {
		name   string
		frame  []byte
		forged bool
	}{
		{"from a tunnel address", frame(udp(pool, other, pipeline.UDPPort)), true},
		{"to a tunnel address", frame(udp(other, pool, pipeline.UDPPort)), true},
		{"a later fragment", fragment(1), true},
		{"a first fragment to another port", fragment(0), false},
		{"to another port", frame(udp(pool, pool, 53)), false},
		{"other addresses", frame(udp(other, other, pipeline.UDPPort)), false},
		{"another protocol", other17, false},
	} {
		for _, hook := range []struct {
			name    string
			program *ebpf.Program
			ctx     skb
			reason  string
		}{
			{"edge in", n.datapath.Objects.PilEdgeIn, skb{Ifindex: devices["eth1"]}, "peer-unknown"},
			{"edge out", n.datapath.Objects.PilEdgeOut, skb{Ifindex: devices["eth1"]}, "tunnel-forged"},
			{"uplink out", n.datapath.Objects.PilUplinkOut, skb{Ifindex: uplink}, "tunnel-forged"},
		} {
			want := progCase{name: fmt.Sprint(c.name, ", ", hook.name), frame: c.frame, next: !c.forged}
			if c.forged {
				want.reason = hook.reason
			}
			b.check(t, hook.program, hook.ctx, want)
		}
	}
}
