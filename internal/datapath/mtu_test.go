package datapath

import (
	"bytes"
	"cmp"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
)

// TestUplinkTooNarrow: containers under IPv6's least MTU would lose their addresses.
func TestUplinkTooNarrow(t *testing.T) {
	n := newWire(t).nodes[0]
	must(t, n.datapath.Close())
	n.setUplink(t, func(h *netlink.Handle, eth0 netlink.Link) error { return h.LinkSetMTU(eth0, 1300) })
	config := n.datapath.config
	config.MTUReserve, config.BPFFS = 21, bpffs(t)
	must(t, n.ns.Do(func() error {
		d, err := Open(config)
		if err == nil {
			t.Errorf("a packet path was opened: %v", d.Close())
		} else if !strings.Contains(err.Error(), "below IPv6's minimum of 1280") || !strings.Contains(err.Error(),
			"nothing was changed") {
			t.Error(err)
		}
		return nil
	}))
	if _, err := os.Stat(config.BPFFS); !os.IsNotExist(err) {
		t.Errorf("%s was made: %v", config.BPFFS, err)
	}
}

// TestMTUOfALiveDevice: both sides change, down and up, and packets of the new length fit.
func TestMTUOfALiveDevice(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	for _, mtu := range []int{1400, 1500, 1280} {
		must(t, a.node.datapath.SetMTU(a.record, mtu))
		changed := a.record
		changed.Device.MTU = mtu
		if err := a.node.datapath.checkEndpoint(t.Context(), changed); err != nil {
			t.Errorf("after a change to %d: %v", mtu, err)
		}
		if r := a.ping(t, b.seen(), mtu-48, patience); r.Received != r.Sent {
			t.Errorf("%d of %d packets of %d bytes came back", r.Received, r.Sent, mtu)
		}
	}
}

// TestMTUOfAnotherNamespace: a recorded path may lead to another namespace by now, as /proc/<pid>/ns/net does when
// another process has the PID. The devices in that namespace keep their MTU.
func TestMTUOfAnotherNamespace(t *testing.T) {
	n := newWire(t).nodes[0]
	r := n.add(t, blue, 1).record
	r.Netns = n.ns.Path()
	if err := n.datapath.SetMTU(r, 1400); err == nil || !strings.Contains(err.Error(), n.ns.Path()) {
		t.Error(err)
	}
	for _, device := range []string{"eth0", cmp.Or(r.Device.HostName, "eth0")} {
		link, err := n.datapath.Netlink.LinkByName(device)
		must(t, err)
		if got := link.Attrs().MTU; got != 1500 {
			t.Errorf("%s has an MTU of %d", device, got)
		}
	}
}

// TestMTUOfADeadAgent: the uplink's MTU was reduced while no agent ran. Check and Restore neither report nor change the
// containers' MTU: the agent changes it when it follows the uplink's MTU.
func TestMTUOfADeadAgent(t *testing.T) {
	for _, kind := range []string{endpoint.Macvlan, joined} {
		n := newWireOf(t, kind).nodes[0]
		c := n.add(t, blue, 1)
		n.setUplink(t, func(h *netlink.Handle, eth0 netlink.Link) error { return h.LinkSetMTU(eth0, 1400) })
		var said bytes.Buffer
		config := n.datapath.config
		config.Log = slog.New(slog.NewTextHandler(&said, nil))
		n.reopen(t, config)
		must(t, n.datapath.putTenant(blue))
		n.restore(t, c)
		if text := said.String(); strings.Contains(text, "differ") {
			t.Errorf("%s: the log has\n%s", kind, text)
		}
		mtu, err := n.datapath.MTU()
		must(t, err)
		must(t, n.datapath.SetMTU(c.record, mtu))
		c.record.Device.MTU = 1400
		must(t, n.datapath.checkEndpoint(t.Context(), c.record))
	}
}

// TestOverhead: a network with encapsulation reduces the containers' MTU, but not below IPv6's minimum.
func TestOverhead(t *testing.T) {
	n := newWire(t).nodes[0]
	c := n.add(t, blue, 1)
	for _, r := range []struct{ overhead, mtu int }{{70, 1430}, {220, 1280}, {221, 0}} {
		other := c.record
		other.ID, other.Netns = 77, namespace(t, "other").Path()
		other.Attachments = slices.Clone(other.Attachments)
		other.Attachments[0].Overhead, other.Attachments[0].Routes = r.overhead, nil
		d, err := n.datapath.CreateDevice(t.Context(), other)
		if (err == nil) != (r.mtu > 0) || d.MTU != r.mtu {
			t.Errorf("with %d bytes before packets: MTU %d, %v; want %d", r.overhead, d.MTU, err, r.mtu)
		}
		if err == nil {
			other.Device = d
			must(t, n.datapath.removeEndpoint(t.Context(), other))
		}
	}
	must(t, n.datapath.activate(c.record))
	if err := n.datapath.SetMTU(c.record, 1279); err == nil || !strings.Contains(err.Error(), "IPv6's 1280") {
		t.Errorf("an MTU without IPv6: %v", err)
	}
	must(t, n.datapath.checkEndpoint(t.Context(), c.record))
}
