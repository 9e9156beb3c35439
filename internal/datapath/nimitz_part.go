package datapath

import (
	"encoding/binary"
	"math"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// maxPeers is the number of regions and of other prefixes that a node accepts tunnels from.
const maxPeers = 256

// maxOffloads is the number of offloads of the tenants that a node hosts or is a frontend for.
const maxOffloads = 1024

// DefaultMaxMappings is the limit of mappings, unless the configuration says another.
const DefaultMaxMappings = nimitz.DefaultMaxMappings

func nimitzPart() networkPart {
	part := networkPart{
		maps: func(c Config) []pinnedMap {
			return []pinnedMap{
				{bpfobj.PilasterMapNimNodeV1, bpfobj.PinNimNode, 0},
				{bpfobj.PilasterMapNimPeersV1, bpfobj.PinNimPeers, maxPeers},
				{bpfobj.PilasterMapNimSendersV1, bpfobj.PinNimSenders, 2 * c.MaxEndpoints}, // an address of each family
				{bpfobj.PilasterMapNimForeignV1, bpfobj.PinNimForeign, c.MaxMappings},
				{bpfobj.PilasterMapNimOutsideV1, bpfobj.PinNimOutside, c.MaxMappings},
				{bpfobj.PilasterMapNimDnatV1, bpfobj.PinNimDnat, c.MaxMappings},
				{bpfobj.PilasterMapNimSnatV1, bpfobj.PinNimSnat, c.MaxMappings},
				{bpfobj.PilasterMapNimForwardV1, bpfobj.PinNimForward, c.MaxMappings},
				{bpfobj.PilasterMapNimOffloadsV1, bpfobj.PinNimOffloads, maxOffloads},
				{bpfobj.PilasterMapNimBackendsV1, bpfobj.PinNimBackends, maxOffloads},
				{bpfobj.PilasterMapNimFrontedV1, bpfobj.PinNimFronted, c.MaxMappings},
				{bpfobj.PilasterMapNimSentV2, bpfobj.PinNimSent, maxOffloads},
				{bpfobj.PilasterMapNimProbesV2, bpfobj.PinNimProbes, maxOffloads * tenant.MaxFrontends},
				{bpfobj.PilasterMapNimSharingV1, bpfobj.PinNimSharing, 0},
			}
		},
		constants: func(d *Datapath) map[string]any {
			return map[string]any{
				bpfobj.PilasterVarTunnelMark: hook.TunnelMark(d.AcceptMark),
				bpfobj.PilasterVarTunnelBits: uint32(pipeline.MarkBits),
				bpfobj.PilasterVarTunnelPorts: [tunnelPorts]uint16{
					bigEndian16(pipeline.UDPPort), bigEndian16(pipeline.OffloadPort),
				},
				bpfobj.PilasterVarUplinkClasses: d.uplinkClasses(),
				bpfobj.PilasterVarDirectPort:    d.directPort(),
			}
		},
		stale: staleNimitz,
	}
	for _, t := range pipelineMaps {
		part.kept = append(part.kept, keptMap{t.pin, t.mapOf, func(m *ebpf.Map) (all []string, err error) {
			err = t.forEachEntry(m, func(e pipeline.Entry) { all = append(all, e.String()) })
			return all, err
		}})
	}
	return part
}

// staleNimitz finds the VXLAN device and the gateway's devices.
func staleNimitz() ([]network.StaleState, error) {
	all, err := staleNamed("tunnel", hook.TunnelDevice, hook.IsTunnel)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{pipeline.GatewayDevice, pipeline.UnderlayDevice} {
		found, err := staleNamed("pair", name, isVeth)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// Sizes of the lists in bpf/common/tunnel.h and bpf/hooks/uplink_class.h.
const (
	tunnelPorts   = 4
	uplinkClasses = 6
)

// Actions of enum uplink_action.
const (
	classTunnel  = 1
	classProgram = 2
)

// uplinkClasses returns the destinations on this node that belong to networks beside netpila, whose packets are
// compared with no class. The classes exclude each other; each costs a packet of a later one two comparisons. A node
// with macvlans has no tunnels. AttachOffloads decides which program gets tunnel packets before the VXLAN device.
func (d *Datapath) uplinkClasses() (classes [uplinkClasses]bpfobj.PilasterUplinkClass) {
	var all []bpfobj.PilasterUplinkClass
	defer func() { copy(classes[:], all) }()
	gateway := bpfobj.ToAddr(address.Plain{Node: d.config.NodePrefix, App: address.GatewayApp}.Addr())
	apps := bpfobj.ToAddr(netip.MustParseAddr("::ffff:ffff:ff00:0")) // tenant id and app
	all = append(all, bpfobj.PilasterUplinkClass{
		Hi: gateway.Hi, HiMask: math.MaxUint64, Lo: gateway.Lo, LoMask: apps.Lo,
		Action: classProgram, Program: hook.UplinkGateway,
	})
	if d.config.Device != endpoint.Macvlan {
		vtep := bpfobj.ToAddr(pipeline.VTEP(d.config.NodePrefix))
		tunnel := bpfobj.PilasterUplinkClass{
			Hi: vtep.Hi, HiMask: math.MaxUint64, Lo: vtep.Lo, LoMask: math.MaxUint64, Action: classTunnel,
			Program: hook.UplinkTunnel,
		}
		all = append(all, tunnel)
	}
	all = append(all, bpfobj.PilasterUplinkClass{
		Hi: bpfobj.ToAddr(d.egressPrefix().Addr()).Hi, HiMask: math.MaxUint64,
		Lo: bpfobj.ToAddr(tenant.EgressAddress(d.config.NodePrefix, 0)).Lo, LoMask: apps.Lo,
		Action: classProgram, Program: hook.ProgramEgressIn,
	})
	if d.egressPrefix() != d.config.NodePrefix {
		for _, end := range []netip.Addr{
			tenant.EgressTunnel(d.config.NodePrefix), tenant.ExposedTunnel(d.config.NodePrefix),
		} {
			tunnel := bpfobj.ToAddr(end)
			all = append(all, bpfobj.PilasterUplinkClass{
				Hi: tunnel.Hi, HiMask: math.MaxUint64, Lo: tunnel.Lo, LoMask: math.MaxUint64,
				Action: classProgram, Program: hook.ProgramEgressIn,
			})
		}
	}
	if locator, ok := d.locator(); ok {
		to := bpfobj.ToAddr(locator.Addr())
		all = append(all, bpfobj.PilasterUplinkClass{
			Hi: to.Hi, HiMask: math.MaxUint64, Action: classProgram, Program: hook.UplinkILA,
		})
	}
	return classes
}

// directPort returns direct_port of bpf/net/nimitz/direct.h.
func (d *Datapath) directPort() uint16 {
	if !d.config.DirectTunnel {
		return 0
	}
	return bigEndian16(pipeline.UDPPort)
}

// bigEndian16 returns a number as it lies in memory in network byte order.
func bigEndian16(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}
