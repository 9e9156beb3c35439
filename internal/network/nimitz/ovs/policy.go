package ovs

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath"
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
	if err := spec.Variables[policyVarTunnelMark].Set(s.config.Mark); err != nil {
		return nil, err
	}
	programs := &policyObjects{}
	return programs, spec.LoadAndAssign(programs, nil)
}

// NoOffload has what sends by a device, in the namespace of the thread, fill in checksums and cut segments itself: Open vSwitch in user space takes
// packets as they are.
func NoOffload(device string) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	request := struct{ command, value uint32 }{unix.ETHTOOL_STXCSUM, 0} // segmentation needs it
	ifr := struct {
		name    [unix.IFNAMSIZ]byte
		request unsafe.Pointer
		_       [16]byte
	}{request: unsafe.Pointer(&request)}
	copy(ifr.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr)))
	runtime.KeepAlive(&request)
	if errno != 0 {
		return fmt.Errorf("turn checksum offload of %s off: %w", device, errno)
	}
	return nil
}
