package pipeline

import "net"

// What both switches write, so that nodes of either kind understand each other.
const (
	UDPPort = 4789 // VXLAN's (IANA)
	// Overhead is how much longer a container's packet is in the tunnel: IPv6, UDP, VXLAN, Ethernet.
	Overhead = 40 + 8 + 8 + 14
)

// The pair of devices between the node's stack and a switch that ends tunnels outside it.
const (
	NodeSide   = "pil-vtep0"
	SwitchSide = "pil-vtep1"
)

// Device is to be a port, by its name on the node. A container's has another end, in a namespace where it has another name.
type Device struct{ Name, Netns, Inside string }

// No packet is told by its MACs: whatever leaves the pipeline is for the one and from the other, and so is what is in a tunnel.
var (
	InsideMAC  = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
	OutsideMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
)
