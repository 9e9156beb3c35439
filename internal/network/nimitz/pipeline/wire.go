package pipeline

import (
	"bytes"
	"net"
)

// Fields that both switches write alike, so that nodes of either kind understand each other.
const (
	UDPPort     = 4789 // VXLAN's (IANA)
	OffloadPort = 4790 // VXLAN-GPE's (IANA), of messages between frontends and backends
	// Overhead is how many bytes the tunnel adds to a container's packet: IPv6, UDP, VXLAN, Ethernet.
	Overhead = 40 + 8 + 8 + 14
)

// MarkBits is the mask of the packet mark that identifies tunnel packets on their node. Netfilter sees them, and its
// rules use the other bits: kube-proxy 0xc000, the CNI portmap plugin 0x2000, Cilium 0x0f00, Tailscale and Calico
// 0xff0000, the VPC CNI 0x80.
const MarkBits = 0xff00107f

// The bridge at which a switch outside the node's stack ends its tunnels, and the pair of devices between bridge and
// stack.
const (
	Underlay   = "pil-vtep"
	NodeSide   = Underlay + "0"
	SwitchSide = Underlay + "1"
)

// GatewayDevice and UnderlayDevice are the node's ends of the gateway's devices: for packets from the switch, and from
// the fabric.
const (
	GatewayDevice  = "pilgate0"
	UnderlayDevice = "pilgate1"
)

// Device names a device that becomes a port: Name is its name on the node. The peer of a container's device is in the
// namespace Netns and has the name Inside there.
type Device struct{ Name, Netns, Inside string }

// MACs identify no packet: every packet that leaves the pipeline, also in a tunnel, has this destination and this
// source. A packet to a container has the container's MAC as its destination, if that differs.
var (
	InsideMAC  = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
	OutsideMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
)

// MAC is the MAC of a container; zeros stand for InsideMAC, which older builds gave to all of them.
type MAC [6]byte

// NewMAC returns a device's MAC.
func NewMAC(a net.HardwareAddr) (m MAC) {
	if !bytes.Equal(a, InsideMAC) {
		copy(m[:], a)
	}
	return m
}

// Addr returns the destination of packets.
func (m MAC) Addr() net.HardwareAddr {
	if m == (MAC{}) {
		return InsideMAC
	}
	return m[:]
}
