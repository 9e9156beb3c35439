package datapath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
)

// TestUplinks: a node's programs are on all of its uplinks, whichever is named first, and are not replaced when the
// order changes. An uplink that is no longer named is guarded like any other interface.
func TestUplinks(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, b := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	must(t, n.datapath.Netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "peer1"}))
	eth1, err := n.datapath.Netlink.LinkByName("eth1")
	must(t, err)
	config := n.datapath.config
	start := func(uplinks ...string) {
		t.Helper()
		config.Uplinks = uplinks
		n.reopen(t, config)
		n.restore(t, a)
		if s, err := n.datapath.Status(); err != nil || !s.Healthy || !s.FirstInChain ||
			slices.Contains(s.Guarded, "eth1") == slices.Contains(uplinks, "eth1") {
			t.Errorf("uplinks %v: %+v, %v", uplinks, s, err)
		}
	}
	// The links by their pins, and the device of each.
	links := func() map[link.ID]uint32 {
		t.Helper()
		all := map[link.ID]uint32{}
		for _, h := range n.datapath.UplinkHooks() {
			l, err := link.LoadPinnedLink(filepath.Join(n.datapath.LinksDir(), h.Pin()), nil)
			must(t, err)
			info, err := l.Info()
			must(t, err)
			must(t, l.Close())
			all[info.ID] = info.TCX().Ifindex
		}
		return all
	}
	start("eth0", "eth1")
	before := links()
	if len(before) != 4 {
		t.Errorf("links %v, want one for each direction of two uplinks", before)
	}
	start("eth1", "eth0")
	after := links()
	for id, device := range before {
		if after[id] != device {
			t.Errorf("link %d of device %d was replaced by another: %v", id, device, after)
		}
	}
	mustReach(t, a, b, "with two uplinks")

	second := config
	second.BPFFS, second.Uplinks = bpffs(t), []string{"eth1"}
	if err := n.ns.Do(func() error { return CheckUplink(second) }); err == nil ||
		!strings.Contains(err.Error(), "eth1 carries the packet path of another agent") {
		t.Errorf("another agent on the second uplink: %v", err)
	}

	start("eth1")
	for id, device := range links() {
		if before[id] != device {
			t.Errorf("link %d of device %d was replaced by another, after eth0 was omitted", id, device)
		}
	}
	start("eth0")
	pin := filepath.Join(n.datapath.LinksDir(), hook.Numbered("uplink_in", eth1.Attrs().Index))
	if _, err := os.Stat(pin); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", pin, err)
	}
	mustReach(t, a, b, "with one uplink")
}

// TestUplinksMTU: containers have the lowest MTU of the uplinks.
func TestUplinksMTU(t *testing.T) {
	n := newWire(t).nodes[0]
	must(t, n.datapath.Netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1", MTU: 1400},
		PeerName: "peer1"}))
	config := n.datapath.config
	config.Uplinks = []string{"eth0", "eth1"}
	n.reopen(t, config)
	if mtu, err := n.datapath.MTU(); err != nil || mtu != 1400 {
		t.Errorf("MTU %d, %v; want 1400", mtu, err)
	}
	eth1, err := n.datapath.Netlink.LinkByName("eth1")
	must(t, err)
	must(t, n.datapath.Netlink.LinkSetMTU(eth1, 1279))
	if _, err := n.datapath.MTU(); err == nil || !strings.Contains(err.Error(), "uplink eth1 has an MTU of 1279") {
		t.Errorf("an uplink narrower than IPv6 allows: %v", err)
	}
}

func TestCheckUplinkNames(t *testing.T) {
	nine := strings.Split("a b c d e f g h i", " ")
	for _, c := range []struct {
		names []string
		kind  string
		says  string // empty: no error
	}{
		{[]string{"eth0"}, endpoint.Macvlan, ""},
		{[]string{"eth0", "eth1"}, endpoint.Veth, ""},
		{nine[:MaxUplinks], endpoint.Netkit, ""},
		{nil, endpoint.Veth, "there is no uplink"},
		{[]string{"eth0", "eth0"}, endpoint.Veth, "names a device twice"},
		{nine, endpoint.Veth, "at most 8"},
		{[]string{"eth0", "eth1"}, endpoint.Macvlan, "a macvlan is on top of one device"},
	} {
		err := CheckUplinkNames(c.names, c.kind)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v with %s: %v, want %q", c.names, c.kind, err, c.says)
		}
	}
}
