package ovs

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

const noEndpoint = dropreason.NoEndpoint

// reasons are the drop reasons of this switch.
var reasons = []dropreason.Reason{
	dropreason.NotIp6, dropreason.SrcNotOwn, dropreason.NoEndpoint, dropreason.Multicast, dropreason.HopLimit,
	dropreason.NoRoute, dropreason.PeerUnknown,
	dropreason.LaterFragment, dropreason.Untranslated, dropreason.ForeignUnknown,
	dropreason.NdIgnored, dropreason.NdForbidden, dropreason.MldIgnored, dropreason.IcmpQuote,
}

// VXLAN's group policy field carries the identity, but the userspace datapath neither reads nor writes that field.
// Between that datapath and the node's stack the identity is in the VTEP's address, and bpf/policy.bpf.c moves it
// between the address and the field.
const (
	identityByte = 12 // of the address
	identityBit  = 16 // of it, from its end
)

// forLinks are ICMP types that are only valid on one link. The switch drops them, also on a container's link, where
// neighbours and routes are static: some could redirect a container's packets, and kernels send others by default.
var forLinks = []struct {
	of    family
	types []uint64
	why   dropreason.Reason
}{
	{ip4, []uint64{5, 9}, dropreason.NdForbidden},
	{ip6, []uint64{134, 136, 137}, dropreason.NdForbidden},
	{ip6, []uint64{133, 135}, dropreason.NdIgnored},
	{ip6, []uint64{130, 131, 132, 143}, dropreason.MldIgnored},
}

// dropped makes a flow drop its packets, and count them with all others of the same reason.
func dropped(f openflow.Flow, why dropreason.Reason) openflow.Flow {
	f.Actions, f.Goto = []openflow.Action{set(regReason.Number(uint64(why)))}, tableDrops
	return f
}

// constants returns the flows that every switch of a region has, whatever its entries are.
func constants(region netip.Prefix, others ...netip.Prefix) []openflow.Flow {
	all := []openflow.Flow{
		dropped(
			openflow.Flow{Table: tableDecap, Priority: priorityFamily, Match: []openflow.Value{inPort(ofportVXLAN)}},
			dropreason.PeerUnknown,
		),
		{Table: tableDecap, Priority: priorityLast, Goto: tableRegister},
		dropped(openflow.Flow{Table: tableRegister, Priority: priorityLast}, dropreason.NotIp6),
		{Table: tableDNAT, Priority: priorityLast, Goto: tableNorthSouth},
		{
			Table:    tableNorthSouth,
			Priority: priorityFirst,
			Match:    []openflow.Value{regFrom.Number(ofportGateway)},
			Goto:     tableSNAT,
		},
		{Table: tableNorthSouth, Priority: priorityLast, Goto: tableForwarding},
		{Table: tableSNAT, Priority: priorityLast, Goto: tableForwarding},
		dropped(openflow.Flow{Table: tableForwarding, Priority: priorityLast}, dropreason.NoRoute),
		back(regFrom.Number(ofportGateway), regTo.Number(ofportGateway)),
		back(regFrom.Number(ofportVXLAN), regTo.Number(ofportVXLAN), regAbroad.Number(0)),
		back(regFrom.Number(fromAbroad), regTo.Number(ofportVXLAN), regAbroad.Number(1)),
		dropped(
			openflow.Flow{
				Table:    tableEncap,
				Priority: priorityOwnVNI,
				Match:    []openflow.Value{regTo.Number(ofportGateway), regSource.Number(0)},
			},
			dropreason.Untranslated,
		),
		{
			Table: tableEncap, Priority: priorityFamily, Match: []openflow.Value{regMAC.Number(1)},
			Actions: []openflow.Action{
				set(openflow.EthSrc.MAC(pipeline.OutsideMAC)), openflow.ForgetPort, openflow.OutputTo{Field: regTo},
			},
		},
		{Table: tableEncap, Priority: priorityLast, Actions: append(inside(), openflow.OutputTo{Field: regTo})},
	}
	// Open vSwitch treats the first bytes of every fragment as a transport header, and would write a checksum there.
	for _, protocol := range []uint64{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		all = append(all, dropped(openflow.Flow{Table: tableEncap, Priority: priorityFirst, Match: []openflow.Value{
			regNAT.Number(
				1,
			), ip4.is(), openflow.IPProto.Number(protocol), openflow.Fragment.Number(openflow.LaterFragment),
		}}, dropreason.LaterFragment))
	}
	// Open vSwitch does not translate the packet quoted in an ICMP error, and cannot tell for which container a router
	// behind the gateway sends it.
	for of, types := range map[*family][]uint64{&ip4: {3, 4, 11, 12}, &ip6: {1, 2, 3, 4}} {
		for _, kind := range types {
			all = append(
				all,
				dropped(
					openflow.Flow{
						Table:    tableEncap,
						Priority: priorityFirst,
						Match:    append(of.sends(kind), regNAT.Number(1)),
					},
					dropreason.IcmpQuote,
				),
			)
		}
	}
	for _, group := range []netip.Prefix{netip.MustParsePrefix("224.0.0.0/4"),
		netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("ff00::/8")} {
		all = append(
			all,
			dropped(
				openflow.Flow{Table: tableDecap, Priority: priorityFirst, Match: familyOf(group.Addr()).to(group)},
				dropreason.Multicast,
			),
		)
	}
	for _, sources := range others { // their programs count these
		all = append(
			all,
			openflow.Flow{
				Table:    tableRegister,
				Priority: priorityFamily + 1,
				Match:    familyOf(sources.Addr()).from(sources),
			},
		)
	}
	for _, f := range families {
		all = append(all, f.constants(region)...)
	}
	for _, c := range forLinks {
		for _, kind := range c.types {
			all = append(
				all,
				dropped(openflow.Flow{Table: tableDecap, Priority: priorityFirst + 1, Match: c.of.sends(kind)}, c.why),
			)
		}
	}
	for _, why := range reasons {
		all = append(
			all,
			openflow.Flow{
				Table:    tableDrops,
				Priority: priorityEntry,
				Match:    []openflow.Value{regReason.Number(uint64(why))},
			},
		)
	}
	for i := range all {
		all[i].Cookie = cookieOurs
	}
	return all
}

// back drops packets that would leave by the port they came from.
func back(way ...openflow.Value) openflow.Flow {
	return dropped(openflow.Flow{Table: tableEncap, Priority: priorityFirst, Match: way}, dropreason.NoRoute)
}

// inside rewrites the MACs to those that packets have without a MAC of the receiver, and clears the ingress port, so
// that a packet may return to it: only packets for containers get there.
func inside() []openflow.Action {
	return []openflow.Action{
		set(openflow.EthDst.MAC(pipeline.InsideMAC)),
		set(openflow.EthSrc.MAC(pipeline.OutsideMAC)),
		openflow.ForgetPort,
	}
}

// constants returns the constant flows of one family.
func (f family) constants(region netip.Prefix) []openflow.Flow {
	vxlan := func(ttl ...openflow.Value) []openflow.Value {
		return append([]openflow.Value{regTo.Number(ofportVXLAN), f.is()}, ttl...)
	}
	return []openflow.Flow{
		{
			Table:    tableRegister,
			Priority: priorityOwnVNI,
			Match:    []openflow.Value{inPort(ofportVXLAN), vteps(region), f.is()},
			Goto:     tableDNAT,
			Actions: []openflow.Action{
				openflow.Move{Bits: 24, From: openflow.TunnelID, To: regVNI},
				openflow.Move{Bits: 16, From: openflow.TunnelSrc6, FromBit: identityBit, To: regIdentity},
				set(regFrom.Number(ofportVXLAN)),
			},
		},
		{
			Table:    tableRegister,
			Priority: priorityEntry,
			Match:    []openflow.Value{inPort(ofportGateway), f.is()},
			Goto:     tableDNAT,
			Actions: []openflow.Action{
				set(regVNI.Number(uint64(pipeline.GatewayVNI))), set(regFrom.Number(ofportGateway)),
			},
		},
		dropped(
			openflow.Flow{Table: tableRegister, Priority: priorityFamily, Match: []openflow.Value{f.is()}},
			dropreason.SrcNotOwn,
		),
		dropped(
			openflow.Flow{
				Table:    tableRegister,
				Priority: priorityFamily + 2,
				Match:    []openflow.Value{inPort(ofportVXLAN), f.is()},
			},
			dropreason.ForeignUnknown,
		),
		dropped(
			openflow.Flow{Table: tableEncap, Priority: priorityOwnVNI, Match: vxlan(openflow.TTL.Number(0))},
			dropreason.HopLimit,
		),
		dropped(
			openflow.Flow{Table: tableEncap, Priority: priorityOwnVNI, Match: vxlan(openflow.TTL.Number(1))},
			dropreason.HopLimit,
		),
		{Table: tableEncap, Priority: priorityEntry, Match: vxlan(), Actions: append([]openflow.Action{
			openflow.DecTTL{},
			openflow.Move{Bits: 24, From: regVNI, To: openflow.TunnelID},
			openflow.Move{Bits: 16, From: regIdentity, To: openflow.TunnelDst6, ToBit: identityBit},
		}, append(inside(), openflow.Output(ofportVXLAN))...)},
	}
}
