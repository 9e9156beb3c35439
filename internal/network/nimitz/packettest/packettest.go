// Package packettest has packets as data for both switches, with what pipeline.Run makes of them as the one judge: a
// switch given a case's entries does with its packet what Want says.
package packettest

import (
	"net/netip"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// Case is a packet, and a switch that it meets.
type Case struct {
	Name     string
	Table    pipeline.Table
	From     pipeline.Port
	Outer    netip.Addr // who sends it in a tunnel; only from pipeline.VXLAN, as are the next two
	VNI      pipeline.VNI
	Identity uint16
	Packet   packet.Packet
	Frame    []byte            // in the place of Packet
	Drop     dropreason.Reason // for this, which no table decides
}

// Result is what becomes of a packet, and how it looks then.
type Result struct {
	pipeline.Verdict
	Frame []byte // as it leaves: to a container, the gateway, or in the tunnel; nil where it is dropped
}

// In is the frame as it comes out of the port; from pipeline.VXLAN that which is in the tunnel.
func (c Case) In() []byte {
	switch {
	case c.Frame != nil:
		return c.Frame
	case c.From == pipeline.VXLAN:
		return c.Packet.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)
	}
	return c.Packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
}

// Want is what the switch has to do. A packet loses a hop where it is put into a tunnel, and nowhere else.
func (c Case) Want() Result {
	if c.Drop != 0 {
		return Result{Verdict: pipeline.Verdict{Drop: c.Drop}}
	}
	v, _ := c.Table.Run(pipeline.Packet{
		From: c.From, Outer: c.Outer, VNI: c.VNI, Identity: c.Identity, Src: c.Packet.Source, Dst: c.Packet.Destination,
	})
	if v.Drop != 0 {
		return Result{Verdict: v}
	}
	out := c.Packet
	out.Source, out.Destination = v.Src, v.Dst
	if v.To == pipeline.VXLAN {
		if out.HopLimit == 0 {
			out.HopLimit = packet.DefaultHopLimit
		}
		if out.HopLimit == 1 {
			v.Drop = dropreason.HopLimit
			return Result{Verdict: v}
		}
		out.HopLimit--
	}
	return Result{Verdict: v, Frame: out.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)}
}
