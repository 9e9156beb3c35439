package oncache

import (
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
)

// Config describes a node's overlay and the sizes of the cache.
type Config struct {
	Uplink  string     // the Ethernet device of the tunnel's packets
	Device  string     // the VXLAN device
	Address netip.Addr // of this node's VTEP, IPv4 or IPv6
	VNI     uint32     // 24 bits
	Port    uint16
	// Bridged says that the VXLAN device is a port of the containers' bridge: the overlay keeps TTL, hop limit and
	// inner MACs. Otherwise the node routes between containers and the VXLAN device.
	Bridged bool
	// MarkMask has the bits of packet marks that the cache may use: contiguous, MarkBits or more, not those of
	// kube-proxy (0xc000) and of the CNI plugin portmap (0x2000). 0 means DefaultMarkMask.
	MarkMask uint32
	// TTL is how long a direction of a flow stays in the cache after the overlay last let a packet of it through: at
	// most a third of nf_conntrack_udp_timeout, or conntrack would forget the flow. 0 means DefaultTTL.
	TTL time.Duration
	// Tracks says that conntrack tracks the containers' packets: only flows that it has seen in both directions and
	// does not translate are learnt. See Tracking.
	Tracks bool
	// Maximum numbers of entries: connections (0 means 4,096), containers on other nodes, and containers on this node
	// (0 means 1,024). A full map evicts the least recently used entries.
	Flows, Remote, Local uint32
}

const (
	// DefaultMarkMask is outside of the bits of kube-proxy (0xc000), portmap (0x2000) and Calico (0xffff0000).
	DefaultMarkMask uint32 = 0x1ff0
	// MarkBits is the minimum of bits in Config.MarkMask: 2 for the direction, the rest for the generation.
	MarkBits = 6

	DefaultTTL = 10 * time.Second
	// LeaseTime is how long the programs use the cache after Renew.
	LeaseTime = 3 * time.Second

	masqueradeMarks = 0xe000
	wayBits         = 2 // as in bpf/oncache/state.h
)

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *uint32
		usual uint32
	}{{&c.MarkMask, DefaultMarkMask}, {&c.Flows, 4096}, {&c.Remote, 1024}, {&c.Local, 1024}} {
		if *d.field == 0 {
			*d.field = d.usual
		}
	}
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	return c
}

// CheckMarkMask refuses bits of marks that the cache cannot use.
func CheckMarkMask(mask uint32) error {
	width := bits.OnesCount32(mask)
	if bits.Len32(mask)-bits.TrailingZeros32(mask) != width || width < MarkBits {
		return fmt.Errorf("mark mask %#x: %d or more contiguous bits are needed", mask, MarkBits)
	}
	if mask&masqueradeMarks != 0 {
		return fmt.Errorf("mark mask %#x contains bits of kube-proxy or of the CNI plugin portmap (%#x); choose others",
			mask, masqueradeMarks)
	}
	return nil
}

// validate checks what needs no device.
func (c Config) validate() error {
	if err := CheckMarkMask(c.MarkMask); err != nil {
		return fmt.Errorf("oncache: %w", err)
	}
	if !c.Address.IsValid() || c.Address.Is4In6() {
		return fmt.Errorf("oncache: VTEP address %v is no IPv4 or IPv6 address", c.Address)
	}
	if c.VNI >= 1<<24 {
		return fmt.Errorf("oncache: VNI %d has more than 24 bits", c.VNI)
	}
	if c.TTL < time.Second {
		return fmt.Errorf("oncache: entries would be valid for %v; use 1s or more", c.TTL)
	}
	if !c.Tracks {
		return nil
	}
	timeout, err := udpTimeout()
	if err != nil {
		return err
	}
	if c.TTL > timeout/3 {
		return fmt.Errorf("oncache: entries would be valid for %v, over a third of nf_conntrack_udp_timeout (%v): "+
			"conntrack would forget the flows", c.TTL, timeout)
	}
	return nil
}

const conntrackSysctl = "/proc/sys/net/netfilter/nf_conntrack_"

func udpTimeout() (time.Duration, error) {
	n, err := readNumber(conntrackSysctl + "udp_timeout")
	return time.Duration(n) * time.Second, err
}

func readNumber(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("oncache: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("oncache: %s: %w", path, err)
	}
	return n, nil
}

// Tracking tells whether conntrack is active in the network namespace of the thread: a rule uses it. It sends a
// datagram over lo and looks for entries. Without conntrack in the kernel it returns false.
func Tracking() (bool, error) {
	const entries = conntrackSysctl + "count"
	if _, err := os.Stat(entries); os.IsNotExist(err) {
		return false, nil
	}
	if n, err := readNumber(entries); n > 0 || err != nil {
		return n > 0, err
	}
	to, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv6loopback})
	if err != nil {
		if to, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			return false, fmt.Errorf("oncache: test conntrack: %w", err)
		}
	}
	defer to.Close()
	if _, err := to.WriteTo([]byte{0}, to.LocalAddr()); err != nil {
		return false, fmt.Errorf("oncache: test conntrack: %w", err)
	}
	n, err := readNumber(entries)
	return n > 0, err
}

// Bridged tells whether a VXLAN device is a port of a bridge, for Config.Bridged.
func Bridged(device string) (bool, error) {
	link, err := linkByName(device)
	if err != nil {
		return false, err
	}
	return link.Attrs().MasterIndex != 0, nil
}

func linkByName(name string) (link netlink.Link, err error) {
	err = netns.Retry(func() error { link, err = netlink.LinkByName(name); return err })
	if err != nil {
		return nil, fmt.Errorf("oncache: %s: %w", name, err)
	}
	return link, nil
}

// checkDevice refuses settings with which outer headers depend on more than the VTEP.
func checkDevice(link netlink.Link) error {
	v, ok := link.(*netlink.Vxlan)
	if !ok {
		return nil
	}
	name := v.Name
	switch {
	case v.GBP:
		return fmt.Errorf("oncache: %s has group policies, which the cache would lose; it stays unused", name)
	case v.TOS == 1:
		return fmt.Errorf("oncache: %s inherits TOS from inner packets, which the cache cannot; set a fixed one", name)
	}
	return nil
}
