package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// Wire has two nodes on one veth link. This is the shortest possible network, so that it adds little to the time of a
// scenario.
type Wire struct {
	Dir        string
	Nodes      [2]*Node
	namespaces []*netns.Namespace // namespaces of nodes and containers
	links      int
	closes     []func() error
}

type Node struct {
	Wire      *Wire
	name      string
	NS        *netns.Namespace
	Prefix    netip.Prefix
	Underlay  netip.Addr
	Underlay4 netip.Addr // for tools that support only IPv4
}

func NewWire(dir string) (_ *Wire, err error) {
	w := &Wire{Dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("create two nodes: %w", err), w.Close())
		}
	}()
	for i := range w.Nodes {
		n := &Node{
			Wire:      w,
			name:      fmt.Sprint("n", i+1),
			Prefix:    address.DefaultPlan().Node(uint64(i + 1)),
			Underlay:  netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
			Underlay4: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}),
		}
		if n.NS, err = w.Namespace(n.name); err != nil {
			return nil, err
		}
		w.Nodes[i] = n
	}
	a, b := w.Nodes[0], w.Nodes[1]
	if err := w.Link(a.NS, "eth0", b.NS, "eth0"); err != nil {
		return nil, err
	}
	return w, errors.Join(a.configure(b), b.configure(a))
}

func (n *Node) configure(peer *Node) error {
	return OnDevice(n.NS, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
		return errors.Join(
			addAddress(h, eth0, netip.PrefixFrom(n.Underlay, 64)),
			addAddress(h, eth0, netip.PrefixFrom(n.Underlay4, 24)),
			h.LinkSetUp(eth0),
			h.RouteAdd(&netlink.Route{Dst: IPNet(peer.Prefix), Gw: peer.Underlay.AsSlice()}),
		)
	})
}

// containers adds one container to each node with add, and pairs them.
func (w *Wire) containers(add func(*Node) (*netns.Namespace, netip.Addr, error)) (Pair, error) {
	client, _, err := add(w.Nodes[0])
	if err != nil {
		return Pair{}, err
	}
	server, target, err := add(w.Nodes[1])
	return Pair{Client: client, Server: server, Target: target}, err
}

// Namespace creates a namespace without duplicate address detection, and with reno as congestion control. If BBR is the
// machine's default, a connection keeps BBR's pacing and loses half its speed, even if iperf3 selects another algorithm
// later.
func (w *Wire) Namespace(name string) (*netns.Namespace, error) {
	ns, err := netns.Create(filepath.Join(w.Dir, name))
	if err != nil {
		return nil, err
	}
	w.OnClose(func() error { return errors.Join(ns.Close(), netns.Remove(ns.Path())) })
	w.namespaces = append(w.namespaces, ns)
	return ns, ns.Do(func() error {
		return errors.Join(
			sysctl("net/ipv6/conf/default/accept_dad", "0"),
			sysctl("net/ipv4/tcp_congestion_control", "reno"),
		)
	})
}

func (w *Wire) OnClose(f func() error) { w.closes = append(w.closes, f) }

func (w *Wire) Close() error {
	var errs []error
	for _, f := range slices.Backward(w.closes) {
		errs = append(errs, f())
	}
	w.closes = nil
	return errors.Join(append(errs, os.RemoveAll(w.Dir))...)
}

// firstIndex keeps the device indexes of the two sides distinct. If a veth device and its peer had the same index, the
// kernel would assume that there is no peer and pass no packets for up to a second.
const firstIndex = 100

// Link joins two namespaces by a veth pair.
func (w *Wire) Link(a *netns.Namespace, inA string, b *netns.Namespace, inB string) error {
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

func OnDevice(ns *netns.Namespace, name string, do func(*netlink.Handle, netlink.Link) error) error {
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
	return h.AddrAdd(device, &netlink.Addr{IPNet: IPNet(p), Flags: unix.IFA_F_NODAD})
}

func IPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func sysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
}

// Once builds a scenario over two nodes in dir, which must not exist, calls use with its pair, and removes everything.
// It measures nothing.
func Once(dir string, s Scenario, use func(Pair) error) (err error) {
	w, err := NewWire(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	pair, err := s.Build(w)
	if err != nil {
		return err
	}
	return use(pair)
}

// Claim locks a folder for one run, and removes what a killed run left in it.
func Claim(dir string) (release func() error, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the folder for namespaces: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("create the folder for namespaces: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w; is another bench running? "+
			"Concurrent runs would disturb each other", dir, err)
	}
	wires, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, wire := range wires {
		err = errors.Join(err, clearWire(wire))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("clean up after an earlier bench: %w", err)
	}
	return func() error { return errors.Join(os.Remove(dir), f.Close()) }, nil
}

func clearWire(dir string) error {
	mounts, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, folder := range mounts { // daemons may run in these
		if strings.HasSuffix(folder, "ovs") {
			err = errors.Join(err, ovs.StopIn(folder))
		}
	}
	for _, mount := range mounts {
		err = errors.Join(err, Unmount(mount))
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// interruptDelay is how long Interrupted waits for the signal to this process. If a signal goes to a whole process
// group, a child may end before this process gets the signal.
const interruptDelay = 200 * time.Millisecond

// Interrupted returns an error that names the interrupt if ctx was cancelled, instead of the error that the interrupt
// caused.
func Interrupted(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-ctx.Done():
	case <-time.After(interruptDelay):
		return err
	}
	return fmt.Errorf("interrupted: %w; nothing was kept: only a complete run has a report", context.Cause(ctx))
}
