// Package packettest has packets as data for both switches. pipeline.Run is the reference for the results: a switch
// with a case's entries must treat its packet as Want says.
package packettest

import (
	"net/netip"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// Case is a packet, and the switch that receives it.
type Case struct {
	Name     string
	Table    pipeline.Table
	From     pipeline.Port
	Outer    netip.Addr // the tunnel's source; only from pipeline.VXLAN, as are the next three
	VNI      pipeline.VNI
	Identity uint16
	Relayed  int
	Packet   packet.Packet
	Frame    []byte            // in place of Packet
	Drop     dropreason.Reason // a drop that no table decides
}

// Result is the verdict on a packet, and the packet as it leaves.
type Result struct {
	pipeline.Verdict
	Frame []byte // as it leaves to a container, to the gateway or inside the tunnel; nil if dropped
}

// In returns the frame as it enters the switch; from pipeline.VXLAN the inner frame.
func (c Case) In() []byte {
	switch {
	case c.Frame != nil:
		return c.Frame
	case c.From == pipeline.VXLAN:
		return c.Packet.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)
	}
	return c.Packet.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
}

// Want returns the expected result. A packet's hop limit decreases when it enters a tunnel, and nowhere else.
func (c Case) Want() Result {
	if c.Drop != 0 {
		return Result{Verdict: pipeline.Verdict{Drop: c.Drop}}
	}
	v, _ := c.Table.Run(pipeline.Packet{
		From: c.From, Outer: c.Outer, VNI: c.VNI, Identity: c.Identity, Relayed: c.Relayed,
		Src: c.Packet.Source, Dst: c.Packet.Destination,
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
	return Result{Verdict: v, Frame: out.Frame(MACs[v.To].Addr(), pipeline.OutsideMAC)}
}
