package ovs

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// policy puts the programs that know VXLAN's group policy field between Open vSwitch and the node's stack. They stay with the device.
func (s *Switch) policy(h *netlink.Handle, host netlink.Link) error {
	programs, err := s.loadPolicy()
	if err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	defer programs.Close()
	device := host.Attrs().Index
	return errors.Join(
		datapath.AttachFilter(h, device, hostSide, netlink.HANDLE_MIN_INGRESS, programs.PilPolicyOut, "pil_policy_out"),
		datapath.AttachFilter(h, device, hostSide, netlink.HANDLE_MIN_EGRESS, programs.PilPolicyIn, "pil_policy_in"))
}

func (s *Switch) loadPolicy() (*policyObjects, error) {
	spec, err := loadPolicy()
	if err != nil {
		return nil, err
	}
	for name, value := range map[string]uint32{policyVarTunnelMark: s.config.Mark, policyVarTunnelBits: pipeline.MarkBits} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	programs := &policyObjects{}
	return programs, spec.LoadAndAssign(programs, nil)
}

// NoOffload has what sends by a device, in the namespace of the thread, fill in checksums and cut segments itself: Open vSwitch in user space takes
// packets as they are.
func NoOffload(device string) error {
	_, err := netns.Ethtool(device, unix.ETHTOOL_STXCSUM, 0) // segmentation needs it
	return err
}
