package datapath

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestChooseDevice: what is there decides, and the choice says so; what is not there is refused.
func TestChooseDevice(t *testing.T) {
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	lacking := HasNetkit()
	kind, why := Choose(Auto)
	suits := Suits(Netkit, lo)
	if lacking == nil {
		if kind != Netkit || !strings.Contains(why, "has netkit") || suits != nil {
			t.Errorf("with netkit: %s, %q, %v", kind, why, suits)
		}
	} else if kind != Veth || why != lacking.Error() || suits == nil || !strings.Contains(why, "this kernel has no netkit (CONFIG_NETKIT") {
		t.Errorf("without netkit: %s, %q, %v", kind, why, suits)
	}
	if joined == Netkit && lacking != nil {
		t.Error(lacking)
	}
	for choice, want := range map[string]string{"": Veth, Veth: Veth, Macvlan: Macvlan, Netkit: Netkit} {
		if kind, why := Choose(choice); kind != want || why != "" {
			t.Errorf("%q means %s, %q", choice, kind, why)
		}
	}
	if err := Suits("bond", lo); err == nil || !strings.Contains(err.Error(), "choose veth, macvlan, netkit, auto") {
		t.Errorf("an unknown kind: %v", err)
	}
}
