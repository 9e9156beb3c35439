package bench

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
)

// wire is two nodes on one veth link, the shortest network there is: nothing between them takes
// part of the time that a scenario is to be blamed for.
type wire struct {
	dir        string
	nodes      [2]*node
	namespaces []*netns.Namespace // of nodes and containers
	links      int
	closes     []func() error
}

type node struct {
	wire      *wire
	name      string
	ns        *netns.Namespace
	prefix    netip.Prefix
	underlay  netip.Addr
	underlay4 netip.Addr // for those who speak IPv4 only
}

func newWire(dir string) (_ *wire, err error) {
	w := &wire{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("two nodes on a wire: %w", err), w.Close())
		}
	}()
	for i := range w.nodes {
		n := &node{
			wire:      w,
			name:      fmt.Sprint("n", i+1),
			prefix:    address.DefaultPlan().Node(uint64(i + 1)),
			underlay:  netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
			underlay4: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}),
		}
		if n.ns, err = w.namespace(n.name); err != nil {
			return nil, err
		}
		w.nodes[i] = n
	}
	a, b := w.nodes[0], w.nodes[1]
	if err := w.link(a.ns, "eth0", b.ns, "eth0"); err != nil {
		return nil, err
	}
	return w, errors.Join(a.configure(b), b.configure(a))
}

func (n *node) configure(peer *node) error {
	return onDevice(n.ns, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
		return errors.Join(
			addAddress(h, eth0, netip.PrefixFrom(n.underlay, 64)),
			addAddress(h, eth0, netip.PrefixFrom(n.underlay4, 24)),
			h.LinkSetUp(eth0),
			h.RouteAdd(&netlink.Route{Dst: ipNet(peer.prefix), Gw: peer.underlay.AsSlice()}),
		)
	})
}

// containers adds one container to each node in the given way and pairs them.
func (w *wire) containers(add func(*node) (*netns.Namespace, netip.Addr, error)) (Pair, error) {
	client, _, err := add(w.nodes[0])
	if err != nil {
		return Pair{}, err
	}
	server, target, err := add(w.nodes[1])
	return Pair{Client: client, Server: server, Target: target}, err
}

// namespace makes one whose addresses need not wait for duplicate address detection, and whose connections begin
// without the pacing that BBR would bring as a machine's default: that stays with a connection which iperf3 has use
// another algorithm only when it stands, and halves its speed.
func (w *wire) namespace(name string) (*netns.Namespace, error) {
	ns, err := netns.Create(filepath.Join(w.dir, name))
	if err != nil {
		return nil, err
	}
	w.closing(func() error { return errors.Join(ns.Close(), netns.Remove(ns.Path())) })
	w.namespaces = append(w.namespaces, ns)
	return ns, ns.Do(func() error {
		return errors.Join(
			sysctl("net/ipv6/conf/default/accept_dad", "0"),
			sysctl("net/ipv4/tcp_congestion_control", "reno"),
		)
	})
}

func (w *wire) closing(f func() error) { w.closes = append(w.closes, f) }

func (w *wire) Close() error {
	var errs []error
	for _, f := range slices.Backward(w.closes) {
		errs = append(errs, f())
	}
	w.closes = nil
	return errors.Join(append(errs, os.RemoveAll(w.dir))...)
}

// firstIndex keeps device indexes of the two sides apart: the kernel takes a veth whose peer has the
// same index for one without a peer, and lets no packet through for up to a second.
const firstIndex = 100

// link joins two namespaces by a veth pair.
func (w *wire) link(a *netns.Namespace, inA string, b *netns.Namespace, inB string) error {
	h, err := a.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = inA, firstIndex+w.links
	w.links++
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = inB, netlink.NsFd(b.FD())
	return netns.Retry(func() error { return h.LinkAdd(pair) })
}

func onDevice(ns *netns.Namespace, name string, do func(*netlink.Handle, netlink.Link) error) error {
	h, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	device, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s in %s: %w", name, ns.Path(), err)
	}
	if err := do(h, device); err != nil {
		return fmt.Errorf("%s in %s: %w", name, ns.Path(), err)
	}
	return nil
}

func addAddress(h *netlink.Handle, device netlink.Link, p netip.Prefix) error {
	return h.AddrAdd(device, &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func sysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
}
