package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
)

// TestChooseDevice: Auto chooses a kind that the kernel supports, and gives the reason. A named kind that the kernel
// does not support is refused.
func TestChooseDevice(t *testing.T) {
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	lacking := device.HasNetkit()
	kind, why := device.ChooseDevice(device.Auto)
	suits := device.CheckDeviceUplink(endpoint.Netkit, lo)
	if lacking == nil {
		if kind != endpoint.Netkit || !strings.Contains(why, "has netkit") || suits != nil {
			t.Errorf("with netkit: %s, %q, %v", kind, why, suits)
		}
	} else if kind != endpoint.Veth || why != lacking.Error() || suits == nil || !strings.Contains(why,
		"this kernel has no netkit (CONFIG_NETKIT") {
		t.Errorf("without netkit: %s, %q, %v", kind, why, suits)
	} else if !strings.HasSuffix(suits.Error(), "\n  nothing was changed; choose another --device: veth, macvlan, "+
		"auto") {
		t.Errorf("refused, and what else there is: %v", suits)
	}
	if joined == endpoint.Netkit && lacking != nil {
		t.Error(lacking)
	}
	for choice, want := range map[string]string{"": endpoint.Veth, endpoint.Veth: endpoint.Veth,
		endpoint.Macvlan: endpoint.Macvlan, endpoint.Netkit: endpoint.Netkit} {
		if kind, why := device.ChooseDevice(choice); kind != want || why != "" {
			t.Errorf("%q means %s, %q", choice, kind, why)
		}
	}
	if err := device.CheckDeviceUplink("bond", lo); err == nil || !strings.Contains(err.Error(), "choose veth, "+
		"macvlan, netkit, auto") {
		t.Errorf("an unknown kind: %v", err)
	}
}

// TestNetkitBesideOthers: another program at the same hook stays and is distinguished from ours.
func TestNetkitBesideOthers(t *testing.T) {
	if joined != endpoint.Netkit {
		return // few kernels have it
	}
	w := newWireOf(t, endpoint.Netkit)
	n := w.nodes[0]
	c, far := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	at := func() (ids []ebpf.ProgramID) {
		must(t, n.ns.Do(func() error {
			result, err := link.QueryPrograms(
				link.QueryOptions{Target: c.record.Device.HostIfindex, Attach: ebpf.AttachNetkitPeer},
			)
			for _, p := range result.Programs {
				ids = append(ids, p.ID)
			}
			return err
		}))
		return ids
	}
	next, err := ebpf.NewProgram(
		&ebpf.ProgramSpec{Name: "stranger", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, -1), asm.Return(), // TCX_NEXT
		}},
	)
	must(t, err)
	defer next.Close()
	info, err := next.Info()
	must(t, err)
	stranger, _ := info.ID()
	must(t, n.ns.Do(func() error {
		return link.RawAttachProgram(
			link.RawAttachProgramOptions{
				Target:  c.record.Device.HostIfindex,
				Program: next,
				Attach:  ebpf.AttachNetkitPeer,
				Anchor:  link.Head(),
			},
		)
	}))
	restart := func() {
		n.reopen(t, n.datapath.config)
		must(t, n.datapath.putTenant(blue))
		n.restore(t, c)
		must(t, n.datapath.checkEndpoint(t.Context(), c.record))
		if ids := at(); len(ids) != 2 || !slices.Contains(ids, stranger) {
			t.Errorf("programs %v, want ours and %d", ids, stranger)
		}
		mustReach(t, c, far, "beside a stranger")
	}
	restart()
	must(t, n.detachContainer(c.record))
	if ids, err := n.datapath.Attached(); err != nil || len(ids) != 0 {
		t.Errorf("with the stranger alone, packets are carried for %v, %v", ids, err)
	}
	restart()
	if ids := at(); ids[0] == stranger {
		t.Error("ours was put behind the stranger")
	}
}

// vanishing is a pair that has gone when its program is queried.
type vanishing struct {
	device.PairDriver
	errno error
}

func (v vanishing) ProgramID(netlink.Link) (ebpf.ProgramID, error) {
	return 0, fmt.Errorf("program: %w", v.errno)
}

func TestCarryingWhatGoes(t *testing.T) {
	n := newWireOf(t, paired).nodes[0]
	n.add(t, blue, 1)
	own := n.datapath.Drivers()[paired].(device.PairDevice).PairDriver
	if ids, err := (device.PairDevice{Devices: n.datapath.Devices, PairDriver: vanishing{own,
		unix.ENODEV}}).AttachedEndpoints(); err != nil ||
		len(ids) != 0 {
		t.Errorf("%v, %v", ids, err)
	}
	if _, err := (device.PairDevice{Devices: n.datapath.Devices, PairDriver: vanishing{own,
		unix.EPERM}}).AttachedEndpoints(); !errors.Is(
		err,
		unix.EPERM,
	) {
		t.Errorf("another error: %v", err)
	}
}
