package datapath

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TestNimitzOthersDevices: if another program's device, or one of the other switch, has the name of our device, it is
// refused and left unchanged.
func TestNimitzOthersDevices(t *testing.T) {
	n := newWireOf(t, endpoint.Veth).nodes[0]
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	named := func(name string) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name = name
		return a
	}
	for _, c := range []struct {
		name string
		link netlink.Link
		says string
	}{
		{"a bridge", &netlink.Bridge{LinkAttrs: named(hook.TunnelDevice)}, "pilvxlan is a bridge that another " +
			"program made"},
		{"another port", &netlink.Vxlan{LinkAttrs: named(hook.TunnelDevice), FlowBased: true, GBP: true, Port: 8472},
			"pilvxlan is a vxlan that another program made"},
		{"no group policy", &netlink.Vxlan{LinkAttrs: named(hook.TunnelDevice), FlowBased: true,
			Port: pipeline.UDPPort}, "pilvxlan is a vxlan that another program made"},
		{"one tunnel", &netlink.Vxlan{LinkAttrs: named(hook.TunnelDevice), VxlanId: 7, GBP: true,
			Port: pipeline.UDPPort}, "pilvxlan is a vxlan that another program made"},
		{"of Open vSwitch", &netlink.Veth{LinkAttrs: named(pipeline.NodeSide), PeerName: pipeline.SwitchSide},
			"this node's tunnels are Open vSwitch's"},
	} {
		must(t, h.LinkAdd(c.link))
		if _, err := n.datapath.Nimitz(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.says)
		}
		must(t, n.datapath.AttachTunnel())
		l, err := h.LinkByName(c.link.Attrs().Name)
		must(t, err)
		eth0, err := h.LinkByName("eth0")
		must(t, err)
		role := hook.RoleOf(l, []netlink.Link{eth0}, h.LinkByIndex)
		if ours := l.Attrs().Name == pipeline.NodeSide; (role == hook.RoleNone) != ours {
			t.Errorf("%s: packets are let by there", c.name)
		}
		must(t, n.ns.Do(func() error {
			left, err := staleNimitz()
			if len(left) != 0 {
				t.Errorf("%s: a reset would remove it", c.name)
			}
			return err
		}))
		must(t, h.LinkDel(l))
	}
	if _, err := n.datapath.Nimitz(); err != nil {
		t.Error(err)
	}
	if _, err := n.datapath.OVSPorts(); err == nil || !strings.Contains(err.Error(), "this node's tunnels are eBPF's") {
		t.Errorf("a switch beside the tunnel: %v", err)
	}
	if _, err := h.LinkByName(pipeline.NodeSide); !errors.As(err, new(netlink.LinkNotFoundError)) {
		t.Error(err)
	}
}
