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

// Ends inside the namespace.
const (
	overlay  = "overlay"
	underlay = "underlay"
)

// carrierTimeout bounds how long a device may take to notice that the other end is up.
const carrierTimeout = 5 * time.Second

const minMTU = 1280 // RFC 8200 §5

// Config is what a Gateway is made of.
type Config struct {
	Path string // of the namespace

	// The node's ends of the devices.
	Switch, Fabric string

	Block   netip.Prefix // the node's virtual addresses
	Virtual netip.Addr   // the gateway's own of these, which containers see clients by
	Own     netip.Addr   // the gateway's own on the underlay, which services see containers by
	MTU     int          // of what leaves by the uplink
}

// Gateway is one node's.
type Gateway struct {
	config Config
	ns     *netns.Namespace
}

// Open makes the gateway, or sets right the one that is there, from the node's namespace. It translates nothing before
// Publish. A namespace that would end with this process is refused.
func Open(ctx context.Context, c Config) (*Gateway, error) {
	ns, err := netns.Open(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist),
		errors.Is(err, netns.ErrNone): // of a machine that started anew only the file is left
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

// outlives refuses a namespace whose mount the machine does not see. Where that cannot be told, nothing is said.
func outlives(ns *netns.Namespace) error {
	if kept, err := ns.IsPersistent(); err != nil || kept {
		return nil
	}
	return fmt.Errorf("the gateway's namespace at %s would end with the agent, whose mounts the machine does not see; "+
		"make one on the machine, with `ip netns add pilaster-gateway`, and name it with --gateway-netns "+
		"/run/netns/pilaster-gateway", ns.Path())
}

// Close leaves the gateway at work.
func (g *Gateway) Close() error { return g.ns.Close() }

// Device is the gateway's end at the switch.
func (g *Gateway) Device() pipeline.Device {
	return pipeline.Device{Name: g.config.Switch, Netns: g.config.Path, Inside: overlay}
}

// Addresses are the gateway's own: the one that services see, and the one that published containers do.
func (g *Gateway) Addresses() (own, virtual netip.Addr) { return g.config.Own, g.config.Virtual }

// Try makes a gateway's rules in a namespace of their own at a path, and takes both away: an error says what the kernel
// lacks.
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

// Remove takes the gateway at a path away; its devices go with it.
func Remove(path string) error { return netns.Remove(path) }

// Leftovers is the namespace at a path, or the file that a boot left of it.
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
	// Before any device: nothing is forwarded that the rules do not know.
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
				return fmt.Errorf("%s and %s: %w", side.near, side.far, err)
			}
		}
	}
	if err := g.setMTU(node, inside, c.MTU); err != nil {
		return err
	}
	return g.waitUp(ctx)
}

// SetMTU has the gateway take what leaves by the uplink, and for containers what leaves in tunnels.
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

// pair finds both ends, or makes them.
func (g *Gateway) pair(node, inside *netlink.Handle, near, far string) (at, other netlink.Link, err error) {
	at, err = node.LinkByName(near)
	if err == nil {
		if other, err = inside.LinkByName(far); err == nil {
			return at, other, nil
		}
		// Of another gateway, whose namespace is gone or elsewhere.
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

// setRouter has the calling thread's namespace forward, and its devices be silent: they ask for no router and have no
// address that nobody gave them.
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
