package ovs

import (
	"errors"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

// Datapath is the type of Open vSwitch's datapath, as OVSDB calls it.
type Datapath string

const (
	Userspace Datapath = "netdev"
	// Kernel is the datapath of the kernel module openvswitch. The node's stack encapsulates, and with hw-offload=true
	// Open vSwitch offloads flows to tc, and so to a NIC that supports them. Open vSwitch 3.1.0 (Debian 12) must not
	// start in the first 10 s after boot: it then loses packets until it is restarted. "Overriding n-handler-threads to
	// 0" in its log shows that it did.
	Kernel Datapath = "system"
)

// tunnelPort returns the UDP port of the tunnels, and VXLAN's extensions. The kernel datapath supports the group policy
// field.
func (s *Switch) tunnelPort() (udp int, extensions map[string]string) {
	if s.config.Datapath == Kernel {
		return outerUDP, map[string]string{"exts": "gbp"}
	}
	return innerUDP, nil
}

// fit adapts a flow to the node's datapath. In the kernel datapath, the identity is in the group policy field, and
// tunnel packets have the mark by which the programs on the uplink recognise them. For the userspace datapath
// bpf/policy.bpf.c does both.
func (s *Switch) fit(f openflow.Flow) openflow.Flow {
	if s.config.Datapath != Kernel {
		return f
	}
	var match []openflow.Value
	for _, v := range f.Match {
		if v.Field == openflow.TunnelSrc6 {
			mask := append([]byte{}, v.Mask...)
			mask[identityByte], mask[identityByte+1] = 0xff, 0xff
			v.Mask = mask
			if f.Table == tableDecap && s.config.Mark != 0 {
				match = append(match, openflow.PacketMark.Number(uint64(s.config.Mark)).Masked(markMask[:]))
			}
		}
		match = append(match, v)
	}
	var actions []openflow.Action
	for _, a := range f.Actions {
		m, ok := a.(openflow.Move)
		switch {
		case ok && m.From == openflow.TunnelSrc6:
			m.From, m.FromBit = openflow.TunnelGBP, 0
			a = m
		case ok && m.To == openflow.TunnelDst6:
			m.To, m.ToBit = openflow.TunnelGBP, 0
			actions = append(actions, set(openflow.PacketMark.Number(uint64(s.config.Mark))))
			a = m
		}
		actions = append(actions, a)
	}
	f.Match, f.Actions = match, actions
	return f
}

var markMask = [4]byte{
	pipeline.MarkBits >> 24,
	pipeline.MarkBits >> 16 & 0xff,
	pipeline.MarkBits >> 8 & 0xff,
	pipeline.MarkBits & 0xff,
}

// own assigns the VTEP's address to the node's stack.
func (s *Switch) own(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	return errors.Join(h.LinkSetUp(lo), h.AddrReplace(lo, s.vtep()))
}

func (s *Switch) disown(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := h.AddrDel(lo, s.vtep()); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return err
	}
	return nil
}

func (s *Switch) vtep() *netlink.Addr {
	return &netlink.Addr{IPNet: single(pipeline.VTEP(s.config.Node)), Flags: unix.IFA_F_NODAD}
}
