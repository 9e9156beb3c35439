package pipeline

import "net"

// What both switches write, so that nodes of either kind understand each other.
const (
	UDPPort = 4789 // VXLAN's (IANA)
	// Overhead is how much longer a container's packet is in the tunnel: IPv6, UDP, VXLAN, Ethernet.
	Overhead = 40 + 8 + 8 + 14
)

// MarkBits are those of a packet's mark that tunnels are known by on their node. Netfilter sees them on their way, and
// its rules have the others: kube-proxy 0xc000, the port map of CNI 0x2000, Cilium 0x0f00, Tailscale and Calico
// 0xff0000, the VPC CNI 0x80.
const MarkBits = 0xff00107f

// The bridge that a switch which ends tunnels outside the node's stack ends them at, and the pair of devices between it
// and the stack.
const (
	Underlay   = "pil-vtep"
	NodeSide   = Underlay + "0"
	SwitchSide = Underlay + "1"
)

// GatewayDevice and UnderlayDevice lead to the node's gateway: from the switch, and from the fabric.
const (
	GatewayDevice  = "pilgate0"
	UnderlayDevice = "pilgate1"
)

// Device is to be a port, by its name on the node. A container's has another end, in a namespace where it has another
// name.
type Device struct{ Name, Netns, Inside string }

// No packet is told by its MACs: whatever leaves the pipeline is for the one and from the other, and so is what is in a
// tunnel.
var (
	InsideMAC  = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
	OutsideMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
)
