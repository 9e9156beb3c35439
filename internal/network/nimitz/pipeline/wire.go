package pipeline

import "net"

// What both switches write, so that nodes of either kind understand each other.
const (
	UDPPort = 4789 // VXLAN's (IANA)
	// Overhead is how much longer a container's packet is in the tunnel: IPv6, UDP, VXLAN, Ethernet.
	Overhead = 40 + 8 + 8 + 14
)

// No packet is told by its MACs: whatever leaves the pipeline is for the one and from the other, and so is what is in a tunnel.
var (
	InsideMAC  = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
	OutsideMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
)
