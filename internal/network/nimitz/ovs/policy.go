package ovs

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// policy attaches the programs for VXLAN's group policy field between Open vSwitch and the node's stack. They stay with
// the device.
func (s *Switch) policy(h *netlink.Handle, hostLink netlink.Link) error {
	programs, err := s.loadPolicy()
	if err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	defer programs.Close()
	device := hostLink.Attrs().Index
	return errors.Join(
		host.AttachFilter(h, device, hostSide, netlink.HANDLE_MIN_INGRESS, programs.PilPolicyOut, "pil_policy_out"),
		host.AttachFilter(h, device, hostSide, netlink.HANDLE_MIN_EGRESS, programs.PilPolicyIn, "pil_policy_in"))
}

func (s *Switch) loadPolicy() (*policyObjects, error) {
	spec, err := loadPolicy()
	if err != nil {
		return nil, err
	}
	for name, value := range map[string]uint32{policyVarTunnelMark: s.config.Mark,
		policyVarTunnelBits: pipeline.MarkBits} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, err
		}
	}
	programs := &policyObjects{}
	return programs, spec.LoadAndAssign(programs, nil)
}
