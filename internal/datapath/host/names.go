package host

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
)

const DevicePrefix = "pil"

// DeviceName returns the name of the host side: at most 3+5 of the 15 characters that Linux allows.
func DeviceName(id endpoint.ID) string { return DevicePrefix + strconv.Itoa(int(id)) }

// DeviceID returns the endpoint whose host side a link is. A name such as pil007 is not ours.
func DeviceID(l netlink.Link) (endpoint.ID, bool) {
	name := l.Attrs().Name
	number, ours := strings.CutPrefix(name, DevicePrefix)
	id, err := strconv.ParseUint(number, 10, 16)
	ours = ours && (l.Type() == endpoint.Veth || l.Type() == endpoint.Netkit)
	return endpoint.ID(id), ours && err == nil && name == DeviceName(endpoint.ID(id))
}

// Constant MACs, which bpf/common/packet.h has too. The pair is a point-to-point link, so the node's end may have the
// same MAC on all of them, which tells a container nothing. Containers of older builds have ContainerMAC; others have
// one of their own (address.MAC).
var (
	GatewayMAC   = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x01}
	ContainerMAC = net.HardwareAddr{0x02, 0x70, 0x69, 0x6c, 0x00, 0x02}
)

func IPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func HostNet(a netip.Addr) *net.IPNet { return IPNet(netip.PrefixFrom(a, a.BitLen())) }

// PrefixOf reverses IPNet. It returns the zero Prefix for nil, as a default route has.
func PrefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a, ones)
}
