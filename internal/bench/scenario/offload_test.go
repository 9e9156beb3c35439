package scenario

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// TestCut: with offloads disabled, no device of the wire gets more than one segment at once; restore restores all
// features.
func TestCut(t *testing.T) {
	w, err := NewWire(filepath.Join(t.TempDir(), "w"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := boundMacvlan(w); err != nil {
		t.Fatal(err)
	}
	features := func() (all []string) {
		for _, ns := range w.namespaces {
			err := inside(ns, func(h *netlink.Handle) error {
				eth0, err := h.LinkByName("eth0")
				if err != nil {
					return err
				}
				tso, err := netns.Ethtool("eth0", unix.ETHTOOL_GTSO, 0)
				all = append(all, fmt.Sprint(eth0.Type(), " ", tso, " ", eth0.Attrs().GSOMaxSegs))
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	before := features()
	restore, err := w.DisableOffloads()
	if err != nil {
		t.Fatal(err)
	}
	during := features()
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	veth, macvlan := "veth 1 65535", "macvlan 1 65535"
	if want := []string{veth, veth, macvlan, macvlan}; !slices.Equal(before, want) || !slices.Equal(features(), want) {
		t.Errorf("features after restore: got %q, want %q", before, features())
	}
	if want := []string{"veth 0 1", "veth 0 1", "macvlan 1 1", "macvlan 1 1"}; !slices.Equal(during, want) {
		t.Errorf("while disabled: got %q", during)
	}
}
