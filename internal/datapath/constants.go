package datapath

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// setConstants sets the constants of the programs before they are loaded.
func (d *Datapath) setConstants(spec *ebpf.CollectionSpec, mark uint32, cookie uint64) error {
	for name, value := range d.constants(mark, cookie) {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// constants returns the constants of the programs, by name.
func (d *Datapath) constants(mark uint32, cookie uint64) map[string]any {
	base, baseMask := prefixWords(d.config.Plan.Base)
	private, privateMask := prefixWords(d.config.Plan.Private)
	own, _ := prefixWords(d.config.NodePrefix)
	vtep4, vtep4Mask := prefix4(d.config.VTEP4)
	sum := sha256.Sum256([]byte("pilaster packet mark " + d.config.NodePrefix.String()))
	return map[string]any{
		bpfobj.PilasterVarBasePrefix: base, bpfobj.PilasterVarBaseMask: baseMask,
		bpfobj.PilasterVarPrivatePrefix: private, bpfobj.PilasterVarPrivateMask: privateMask,
		bpfobj.PilasterVarOwnNode:       own,
		bpfobj.PilasterVarUplinkIfindex: uint32(d.Uplink.Attrs().Index),
		bpfobj.PilasterVarNodeIfindex:   uint32(d.NodeFar),
		bpfobj.PilasterVarNoFlowCache:   d.config.NoCache,
		bpfobj.PilasterVarClearDscp:     d.config.ClearDSCP,
		// Programs of two loads run side by side during an upgrade, so they must agree on the mark.
		bpfobj.PilasterVarPacketMark:     uint32(sum[0])<<24 | uint32(sum[1])<<16 | uint32(sum[2])<<8 | 1,
		bpfobj.PilasterVarAcceptMark:     mark,
		bpfobj.PilasterVarTunnelMark:     hook.TunnelMark(mark),
		bpfobj.PilasterVarTunnelBits:     uint32(pipeline.MarkBits),
		bpfobj.PilasterVarTunnelPorts:    [tunnelPorts]uint16{bigEndian16(pipeline.UDPPort)},
		bpfobj.PilasterVarVtep4Prefix:    vtep4,
		bpfobj.PilasterVarVtep4Mask:      vtep4Mask,
		bpfobj.PilasterVarUplinkClasses:  d.uplinkClasses(),
		bpfobj.PilasterVarMacvlan:        d.config.Device == endpoint.Macvlan,
		bpfobj.PilasterVarNodeCookie:     cookie,
		bpfobj.PilasterVarSessionBuckets: uint32(d.sessionBuckets()),
		bpfobj.PilasterVarSessionSeed:    mark,
	}
}

// prefixWords returns a prefix of at most 64 bits, and its mask, as the programs compare them.
func prefixWords(p netip.Prefix) (prefix, mask uint64) {
	ones := netip.MustParseAddr("ffff:ffff:ffff:ffff::")
	m, _ := ones.Prefix(p.Bits())
	return bpfobj.ToAddr(p.Masked().Addr()).Hi, bpfobj.ToAddr(m.Addr()).Hi
}

// Sizes of the lists in bpf/common/tunnel.h and bpf/hooks/uplink_class.h.
const (
	tunnelPorts   = 4
	uplinkClasses = 4
)

// Actions of enum uplink_action.
const (
	classTunnel  = 1
	classProgram = 2
)

// uplinkClasses returns the destinations in this node's /64 that belong to networks beside netpila, most specific
// first. A node with macvlans has no tunnels.
func (d *Datapath) uplinkClasses() (all [uplinkClasses]bpfobj.PilasterUplinkClass) {
	gateway := bpfobj.ToAddr(address.Plain{Node: d.config.NodePrefix, App: address.GatewayApp}.Addr())
	apps := bpfobj.ToAddr(netip.MustParseAddr("::ffff:ffff:ff00:0")) // tenant id and app
	all[0] = bpfobj.PilasterUplinkClass{
		Hi: gateway.Hi, HiMask: math.MaxUint64, Lo: gateway.Lo, LoMask: apps.Lo,
		Action: classProgram, Program: hook.UplinkGateway,
	}
	if d.config.Device != endpoint.Macvlan {
		vtep := bpfobj.ToAddr(pipeline.VTEP(d.config.NodePrefix))
		all[1] = bpfobj.PilasterUplinkClass{
			Hi: vtep.Hi, HiMask: math.MaxUint64, Lo: vtep.Lo, LoMask: math.MaxUint64, Action: classTunnel,
		}
	}
	return all
}

// bigEndian16 returns a number as it lies in memory in network byte order.
func bigEndian16(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// prefix4 returns an IPv4 prefix and its mask as the programs compare them; zeros without a prefix.
func prefix4(p netip.Prefix) (prefix, mask uint32) {
	if !p.IsValid() {
		return 0, 0
	}
	ones, _ := netip.MustParseAddr("255.255.255.255").Prefix(p.Bits())
	return binary.NativeEndian.Uint32(p.Masked().Addr().AsSlice()), binary.NativeEndian.Uint32(ones.Addr().AsSlice())
}
