package ovs

import (
	"errors"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

// Datapath is which of Open vSwitch's moves the packets, as OVSDB calls it.
type Datapath string

const (
	Userspace Datapath = "netdev"
	// Kernel is that of the module openvswitch. The node's stack carries its tunnels, and a machine whose Open vSwitch
	// has hw-offload=true gives its flows to tc, and so to a NIC that takes them. Open vSwitch 3.1.0, which is Debian
	// 12's, must not start in the first 10 s after boot: "Overriding n-handler-threads to 0" in its log tells that it
	// was, and it loses packets until it is started again.
	Kernel Datapath = "system"
)

// tunnelPort is the port that encapsulates. The kernel's knows the group policy field.
func (s *Switch) tunnelPort() (udp int, extensions map[string]string) {
	if s.config.Datapath == Kernel {
		return outerUDP, map[string]string{"exts": "gbp"}
	}
	return innerUDP, nil
}

// fit makes a flow one of the node's datapath. That of the kernel has the identity where it is on the wire, and tunnels
// by the mark that the programs on the uplink know them by: what bpf/policy.bpf.c does for the one in user space.
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

// own gives the node's stack the VTEP's address.
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
