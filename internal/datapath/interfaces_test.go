package datapath

import (
	"net"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/hook"
)

// aLink is a link as the kernel describes it.
type aLink struct {
	netlink.LinkAttrs
	kind string
}

func (l aLink) Attrs() *netlink.LinkAttrs { return &l.LinkAttrs }
func (l aLink) Type() string              { return l.kind }

// TestWhichInterfacesAreGuarded also has kinds of interfaces that the test's kernel may be unable to make.
func TestWhichInterfacesAreGuarded(t *testing.T) {
	make := func(index int, name, kind string, parent, master int, more ...func(*netlink.LinkAttrs)) netlink.Link {
		l := aLink{
			netlink.LinkAttrs{
				Index:       index,
				Name:        name,
				ParentIndex: parent,
				MasterIndex: master,
				NetNsID:     -1,
				EncapType:   "ether",
			},
			kind,
		}
		for _, change := range more {
			change(&l.LinkAttrs)
		}
		return l
	}
	loops := func(a *netlink.LinkAttrs) { a.Flags |= net.FlagLoopback }
	elsewhere := func(a *netlink.LinkAttrs) { a.NetNsID = 3 }
	encap := func(kind string) func(*netlink.LinkAttrs) {
		return func(a *netlink.LinkAttrs) { a.EncapType = kind }
	}
	others := []netlink.Link{
		make(
			1,
			"lo",
			"device",
			0,
			0,
			loops,
		), make(20, "eth1", "device", 0, 0), make(21, "docker0", "bridge", 0, 0), make(22, "veth1", "veth", 30, 21,
			elsewhere),
		make(
			23,
			"cali1",
			"veth",
			10,
			0,
			elsewhere,
		), make(24, "tun0", "tun", 0, 0, encap("none")), make(25, "wg0", "wireguard", 0, 0, encap("none")),
		make(
			26,
			"vrf0",
			"vrf",
			0,
			0,
		), make(27, "eth2", "device", 0, 26), make(28, "bond0", "bond", 0, 0), make(29, "eth3", "device", 0, 28),
		make(
			31,
			"ifb0",
			"ifb",
			0,
			0,
		), make(32, "can0", "can", 0, 0, encap("can")), make(33, "nlmon0", "nlmon", 0, 0, encap("netlink")),
		make(34, "lost", "veth", 0, 99),
		make(
			35,
			"pil7",
			"veth",
			0,
			0,
		), make(36, "pil007", "veth", 0, 0), make(37, hook.NodeDevice, "veth", 38, 0), make(38, hook.NodeFar, "veth",
			37, 0), make(40, "eth0", "device", 0, 0),
	}
	always := []string{"eth1", "docker0", "cali1", "tun0", "wg0", "vrf0", "eth2", "bond0", "lost", "pil007"}
	ports := []string{"veth1", "eth3"}
	for _, c := range []struct {
		uplink netlink.Link
		want   []string // beside those of always
	}{
		{make(40, "eth0", "device", 0, 0), nil},
		{make(50, "eth0.5", "vlan", 40, 0), []string{"eth0"}},
		{make(51, "vx", "vxlan", 40, 0), []string{"eth0"}},
		{make(52, "macvlan0", "macvlan", 40, 0), nil},
		{make(53, "up", "veth", 40, 0), nil},
		{make(54, "up", "veth", 40, 0, elsewhere), []string{"eth0"}},
		{make(55, "up", "veth", 55, 0), []string{"eth0"}},
	} {
		got := map[hook.Role][]string{}
		all := append(slices.Clone(others), c.uplink)
		for _, l := range all {
			is := hook.RoleOf(l, []netlink.Link{c.uplink}, func(index int) (netlink.Link, error) {
				for _, l := range all {
					if l.Attrs().Index == index {
						return l, nil
					}
				}
				return nil, unix.ENODEV
			})
			got[is] = append(got[is], l.Attrs().Name)
		}
		if want := append(slices.Clone(always), c.want...); !slices.Equal(got[hook.RoleEdge], want) ||
			!slices.Equal(got[hook.RolePort], ports) ||
			!slices.Equal(got[hook.RoleLoopback], []string{"lo"}) {
			t.Errorf(
				"uplink %s (%s): guarded are %q with ports %q and %q, want %q with %q and lo",
				c.uplink.Attrs().Name,
				c.uplink.Type(),
				got[hook.RoleEdge],
				got[hook.RolePort],
				got[hook.RoleLoopback],
				want,
				ports,
			)
		}
	}
}
