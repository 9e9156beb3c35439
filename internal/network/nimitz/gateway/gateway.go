package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// The devices inside the namespace.
const (
	overlay  = "overlay"
	underlay = "underlay"
)

// carrierTimeout limits how long Open waits until a device has carrier.
const carrierTimeout = 5 * time.Second

const minMTU = 1280 // RFC 8200 §5

// Config configures a Gateway.
type Config struct {
	Path string // of the namespace

	// The devices' names on the node's side.
	Switch, Fabric string

	Block   netip.Prefix // the node's virtual addresses
	Virtual netip.Addr   // the gateway's own address in Block, which containers see as the source of clients
	Own     netip.Addr   // the gateway's own address on the underlay, which services see as the source of containers
	MTU     int          // of packets on the uplink
}

// Gateway is the gateway of one node.
type Gateway struct {
	config Config
	ns     *netns.Namespace
}

// Open creates the gateway, or repairs the existing one, from the node's namespace. It translates nothing before
// Publish. It rejects a namespace that would end with this process.
func Open(ctx context.Context, c Config) (*Gateway, error) {
	ns, err := netns.Open(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist),
		errors.Is(err, netns.ErrNone): // after a boot only the file is left
		if err := netns.Remove(c.Path); err != nil {
			return nil, err
		}
		if ns, err = netns.Create(c.Path); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	}
	if err := outlives(ns); err != nil {
		return nil, errors.Join(err, ns.Close(), netns.Remove(c.Path))
	}
	g := &Gateway{c, ns}
	if err := g.setUp(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the gateway in %s: %w", c.Path, err), ns.Close())
	}
	return g, nil
}

// outlives rejects a namespace whose mount is not visible to the whole machine. It returns nil if it cannot find out.
func outlives(ns *netns.Namespace) error {
	if kept, err := ns.IsPersistent(); err != nil || kept {
		return nil
	}
	return fmt.Errorf("the gateway's namespace at %s would end with the agent, because the machine does not see the "+
		"agent's mounts; create one on the machine with `ip netns add pilaster-gateway`, and name it with "+
		"--gateway-netns /run/netns/pilaster-gateway", ns.Path())
}

// Close releases the handle; the gateway stays in operation.
func (g *Gateway) Close() error { return g.ns.Close() }

// Device returns the gateway's device at the switch.
func (g *Gateway) Device() pipeline.Device {
	return pipeline.Device{Name: g.config.Switch, Netns: g.config.Path, Inside: overlay}
}

// Addresses returns the gateway's own addresses: the one that services see, and the one that published containers see.
func (g *Gateway) Addresses() (own, virtual netip.Addr) { return g.config.Own, g.config.Virtual }

// Try creates a gateway's rules in a new namespace at path, and removes both. Its error names the missing kernel
// feature.
func Try(path string) error {
	ns, err := netns.Create(path)
	if err != nil {
		return err
	}
	g := &Gateway{
		Config{
			Block:   netip.MustParsePrefix("fd00::/80"),
			Virtual: netip.MustParseAddr("fd00::1"),
			Own:     netip.MustParseAddr("fd01::1"),
		},
		ns,
	}
	return errors.Join(g.keepRules(), ns.Close(), netns.Remove(path))
}

// Remove removes the gateway at path with its devices.
func Remove(path string) error { return netns.Remove(path) }

// Leftovers returns the namespace at path, or the file that is left of it after a boot.
func Leftovers(path string) []network.StaleState {
	if _, err := os.Lstat(path); err != nil {
		return nil
	}
	kind := "file"
	if ns, err := netns.Open(path); err == nil {
		ns.Close()
		kind = "namespace"
	}
	return []network.StaleState{{Kind: kind, Name: filepath.Clean(path), Remove: func() error { return Remove(path) }}}
}

func (g *Gateway) setUp(ctx context.Context) error {
	node, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer node.Close()
	inside, err := g.ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	// Before any device exists, so that nothing is forwarded without rules.
	if err := g.keepRules(); err != nil {
		return err
	}
	if err := g.ns.Do(setRouter); err != nil {
		return err
	}
	c := g.config
	for _, side := range []struct {
		near, far string
		addr      netip.Addr
		route     netip.Prefix
	}{
		{c.Switch, overlay, c.Virtual, c.Block},
		{c.Fabric, underlay, c.Own, netip.PrefixFrom(netip.IPv6Unspecified(), 0)},
	} {
		near, far, err := g.pair(node, inside, side.near, side.far)
		if err != nil {
			return err
		}
		for _, step := range []func() error{
			func() error { return node.LinkSetARPOff(near) },
			func() error { return inside.LinkSetARPOff(far) },
			func() error { return node.LinkSetUp(near) },
			func() error { return inside.LinkSetUp(far) },
			func() error {
				return inside.AddrReplace(far,
					&netlink.Addr{IPNet: ipNet(netip.PrefixFrom(side.addr, 128)), Flags: unix.IFA_F_NODAD})
			},
			func() error {
				return inside.RouteReplace(&netlink.Route{LinkIndex: far.Attrs().Index, Dst: ipNet(side.route)})
			},
		} {
			if err := netns.Retry(step); err != nil {
				return fmt.Errorf("create %s and %s: %w", side.near, side.far, err)
			}
		}
	}
	if err := g.setMTU(node, inside, c.MTU); err != nil {
		return err
	}
	return g.waitUp(ctx)
}

// SetMTU adapts the gateway's devices to the MTU of the uplink, and towards containers to that of tunnels.
func (g *Gateway) SetMTU(mtu int) error {
	node, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer node.Close()
	inside, err := g.ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	return g.setMTU(node, inside, mtu)
}

func (g *Gateway) setMTU(node, inside *netlink.Handle, mtu int) error {
	if mtu-pipeline.Overhead < minMTU {
		return fmt.Errorf(
			"an MTU of %d, what the uplink leaves beside a tunnel's %d bytes, is under IPv6's %d; raise the uplink's",
			mtu-pipeline.Overhead,
			pipeline.Overhead,
			minMTU,
		)
	}
	for _, end := range []struct {
		h    *netlink.Handle
		name string
		mtu  int
	}{
		{node, g.config.Switch, mtu - pipeline.Overhead}, {inside, overlay, mtu - pipeline.Overhead},
		{node, g.config.Fabric, mtu}, {inside, underlay, mtu},
	} {
		l, err := end.h.LinkByName(end.name)
		if err == nil && l.Attrs().MTU != end.mtu {
			err = netns.Retry(func() error { return end.h.LinkSetMTU(l, end.mtu) })
		}
		if err != nil {
			return fmt.Errorf("MTU of the gateway's %s: %w", end.name, err)
		}
	}
	return nil
}

// pair finds or creates both devices of a pair.
func (g *Gateway) pair(node, inside *netlink.Handle, near, far string) (at, other netlink.Link, err error) {
	at, err = node.LinkByName(near)
	if err == nil {
		if other, err = inside.LinkByName(far); err == nil {
			return at, other, nil
		}
		// The device belongs to another gateway, whose namespace is gone or elsewhere.
		if err := netns.Retry(func() error { return node.LinkDel(at) }); err != nil {
			return nil, nil, fmt.Errorf("remove %s, which leads elsewhere: %w", near, err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = near, pipeline.OutsideMAC
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerNamespace = far, pipeline.InsideMAC, netlink.NsFd(g.ns.FD())
	if err := netns.Retry(func() error { return node.LinkAdd(veth) }); err != nil {
		return nil, nil, fmt.Errorf("make %s: %w", near, err)
	}
	if at, err = node.LinkByName(near); err != nil {
		return nil, nil, fmt.Errorf("find %s: %w", near, err)
	}
	if other, err = inside.LinkByName(far); err != nil {
		return nil, nil, fmt.Errorf("find %s: %w", far, err)
	}
	return at, other, nil
}

func (g *Gateway) waitUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, carrierTimeout)
	defer cancel()
	for _, device := range []string{overlay, underlay} {
		if err := g.ns.WaitUp(ctx, device); err != nil {
			return err
		}
	}
	return nil
}

// setRouter enables forwarding in the calling thread's namespace. It also stops its devices from soliciting routers and
// from generating addresses of their own.
func setRouter() error {
	for _, s := range [][2]string{
		{"default/addr_gen_mode", "1"}, {"default/accept_ra", "0"}, {"default/accept_dad", "0"},
		{"all/forwarding", "1"},
	} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", s[0]), []byte(s[1]), 0); err != nil {
			return fmt.Errorf("set %s: %w", s[0], err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
