package chaos_test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// network is a switch with two segments. One connects etcd and orchestrators, the other connects orchestrators and
// nodes.
type network struct {
	t       *testing.T
	dir     string
	handle  *netlink.Handle // in the switch's namespace
	bridges map[string]netlink.Link
}

const (
	storeSide = "store"
	nodeSide  = "nodes"
)

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{t: t, dir: t.TempDir(), bridges: map[string]netlink.Link{}}
	var err error
	if n.handle, err = n.namespace("switch").Netlink(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.handle.Close)
	for i, side := range []string{storeSide, nodeSide} {
		// These indexes differ from the device indexes in the hosts' namespaces: see connect.
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: side, Index: 100 + i}}
		n.must(n.handle.LinkAdd(bridge))
		n.must(n.handle.LinkSetUp(bridge))
		n.bridges[side] = bridge
	}
	return n
}

func (n *network) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) namespace(name string) *netns.Namespace {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	ns, err := netns.Create(path)
	n.must(err)
	n.t.Cleanup(func() {
		if err := errors.Join(ns.Close(), netns.Remove(path)); err != nil {
			n.t.Error(err)
		}
	})
	return ns
}

// host is a machine: a namespace, and a thread in it that starts the machine's processes. The thread must run until the
// test ends, because the kernel kills a child when the thread that started it ends (Pdeathsig).
type host struct {
	network *network
	name    string
	number  int
	ns      *netns.Namespace
	work    chan func()
}

func (n *network) host(name string, number int, sides ...string) *host {
	n.t.Helper()
	h := &host{network: n, name: name, number: number, ns: n.namespace(name), work: make(chan func())}
	ended := make(chan error, 1)
	go func() {
		ended <- h.ns.Do(func() error {
			for f := range h.work {
				f()
			}
			return nil
		})
	}()
	n.t.Cleanup(func() {
		close(h.work)
		if err := <-ended; err != nil {
			n.t.Error(err)
		}
	})
	for i, side := range sides {
		n.connect(h, side, 200+10*number+i)
	}
	return h
}

// connect connects a host. The two devices get different indexes: if a veth device and its peer had the same index, the
// kernel would assume that there is no peer, and delay the first packets.
func (n *network) connect(h *host, side string, index int) {
	n.t.Helper()
	port := h.port(side)
	n.must(n.handle.LinkAdd(&netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: port, Index: index, MasterIndex: n.bridges[side].Attrs().Index},
		PeerName:      side,
		PeerNamespace: netlink.NsFd(h.ns.FD()),
	}))
	link, err := n.handle.LinkByName(port)
	n.must(err)
	n.must(n.handle.LinkSetUp(link))
	inside, err := h.ns.Netlink()
	n.must(err)
	defer inside.Close()
	device, err := inside.LinkByName(side)
	n.must(err)
	address := &net.IPNet{IP: net.ParseIP(h.address(side)), Mask: net.CIDRMask(64, 128)}
	n.must(inside.AddrAdd(device, &netlink.Addr{IPNet: address, Flags: unix.IFA_F_NODAD}))
	n.must(inside.LinkSetUp(device))
}

func (h *host) port(side string) string { return h.name + "-" + side }

func (h *host) address(side string) string {
	return fmt.Sprintf("2001:db8:%s::%x", map[string]string{storeSide: "1", nodeSide: "2"}[side], h.number)
}

func (h *host) endpoint(scheme, side string, port int) string {
	return fmt.Sprintf("%s://[%s]:%d", scheme, h.address(side), port)
}

// cut disconnects the host's device from the switch. Packets from both sides are then lost without an error.
func (h *host) cut(side string) error {
	return h.plug(side, h.network.handle.LinkSetNoMaster)
}

func (h *host) heal(side string) error {
	return h.plug(side, func(port netlink.Link) error {
		return h.network.handle.LinkSetMaster(port, h.network.bridges[side])
	})
}

func (h *host) plug(side string, change func(netlink.Link) error) error {
	port, err := h.network.handle.LinkByName(h.port(side))
	if err != nil {
		return err
	}
	return netns.Retry(func() error { return change(port) })
}
