package pipeline

import (
	"cmp"
	"net/netip"

	"pilaster.io/pilaster/internal/dropreason"
)

// Packet has the fields of a packet that the pipeline uses.
type Packet struct {
	From     Port
	Outer    netip.Addr // the sender of the tunnel packet; set only where Port is VXLAN, as are the next two
	VNI      VNI
	Identity uint16
	Src, Dst netip.Addr
	Relayed  int // how often a node has passed it on to another one; set only where Port is VXLAN
}

// MaxRelays is how often a packet is passed on while nodes disagree about where a container is.
const MaxRelays = 2

// Verdict is the pipeline's decision on a packet.
type Verdict struct {
	Drop     dropreason.Reason // 0 where To is set
	To       Port
	VTEP     netip.Addr // where To is VXLAN
	VNI      VNI        // the register when it left the pipeline
	Identity uint16
	Src, Dst netip.Addr // after NAT
	Relayed  int
}

// Table holds a node's entries, and scans all of them for each packet. Tests compare switches with it, and it explains
// decisions of switches; it never forwards packets itself.
type Table struct {
	// Region is the prefix of all nodes of this region. A peer outside of it is the Edge Switch of another region; only
	// an Edge Switch has such peers (§3.1; NM6).
	Region netip.Prefix
	// Pool has the tunnel addresses of nodes, if the tunnels are over IPv4. Other addresses are other speakers' VTEPs.
	// The table does not check MACs.
	Pool    netip.Prefix
	Entries []Entry
}

// fromTunnel looks up whether a node or another speaker may send a packet.
func (r *run) fromTunnel(p Packet) dropreason.Reason {
	if r.table.Pool.IsValid() {
		r.abroad = !r.table.Pool.Contains(p.Outer)
	} else {
		if !IsVTEP(p.Outer) || !met(r, func(e Peer) bool { return e.Nodes.Contains(p.Outer) }) {
			return dropreason.PeerUnknown
		}
		r.abroad = !r.table.Region.Contains(p.Outer)
	}
	if r.abroad && !met(r, func(e Foreign) bool {
		is := e.Edge.Contains(p.Outer) && e.Theirs == p.VNI && e.Source.Contains(p.Src)
		if is {
			r.VNI, r.Identity = e.VNI, 0
		}
		return is
	}) {
		return dropreason.ForeignUnknown
	}
	return 0
}

// turnsBack reports whether a packet from the tunnel would leave by it. It may only pass between this region's tunnels
// and another region's, and to a container that has moved, which counts.
func (r *run) turnsBack(to Forward) bool {
	if to.Port != VXLAN || !r.table.Pool.IsValid() && r.abroad == r.table.Region.Contains(to.VTEP) {
		return false
	}
	if !to.Relays || r.Relayed == MaxRelays {
		return true
	}
	r.Relayed++
	return false
}

// Run processes a packet, and returns the entries that it matched.
func (t Table) Run(p Packet) (Verdict, []Entry) {
	r := run{table: t, Verdict: Verdict{
		VNI: p.VNI, Identity: p.Identity, Src: p.Src, Dst: p.Dst, Relayed: p.Relayed,
	}}
	switch p.From {
	case VXLAN:
		if why := r.fromTunnel(p); why != 0 {
			return r.drop(why)
		}
	case Gateway:
		r.VNI, r.Identity = GatewayVNI, 0
	default:
		if !met(&r, func(e Sender) bool {
			is := e.Port == p.From && e.Address == p.Src
			if is {
				r.VNI, r.Identity = e.VNI, e.Identity
			}
			return is
		}) {
			return r.drop(dropreason.SrcNotOwn)
		}
	}
	r.nat(p.From)
	return r.forward(p.From)
}

// run is the state of one packet in the pipeline.
type run struct {
	Verdict
	table  Table
	abroad bool // the packet came from another region
	trace  []Entry
	// translated: its source is valid on the underlay.
	translated bool
}

// met looks up an entry of type E that fulfils a condition, and records it.
func met[E Entry](r *run, is func(E) bool) bool {
	for _, e := range r.table.Entries {
		if own, ok := e.(E); ok && is(own) {
			r.trace = append(r.trace, e)
			return true
		}
	}
	return false
}

func (r *run) nat(from Port) {
	// A service's virtual address is north-south too; the lookups below use the translated address.
	met(r, func(e DNAT) bool {
		is := e.VNI == r.VNI && e.Virtual == r.Dst
		if is {
			r.VNI, r.Dst = e.RealVNI, e.Real
		}
		return is
	})
	if from != Gateway && !met(r, func(e NorthSouth) bool { return e.VNI == r.VNI && e.To.Contains(r.Dst) }) {
		return
	}
	r.translated = met(r, func(e SNAT) bool {
		is := e.VNI == r.VNI && e.Real == r.Src
		if is {
			r.Src = e.Virtual
		}
		return is
	})
}

func (r *run) forward(from Port) (Verdict, []Entry) {
	best, found := r.longest(r.VNI)
	if !found {
		best, found = r.longest(Any)
	}
	if !found {
		return r.drop(dropreason.NoRoute)
	}
	r.trace = append(r.trace, best)
	switch {
	case best.Port == 0:
		return r.drop(dropreason.NoEndpoint)
	case from == VXLAN && r.turnsBack(best), best.Port == Gateway && from == Gateway:
		// A packet never leaves by the way it came.
		return r.drop(dropreason.NoRoute)
	case best.Port == Gateway && !r.translated:
		return r.drop(dropreason.Untranslated) // On the underlay, an overlay address has no or another meaning.
	}
	r.To, r.VTEP = best.Port, best.VTEP
	if best.Port == VXLAN && best.VTEP.Is4() {
		r.VNI = cmp.Or(best.Wire, r.VNI)
		if best.Outside {
			r.Identity = 0 // it means nothing to other speakers
		}
	}
	return r.Verdict, r.trace
}

func (r *run) longest(vni VNI) (best Forward, found bool) {
	for _, e := range r.table.Entries {
		if f, ok := e.(Forward); ok && f.VNI == vni && f.To.Contains(r.Dst) &&
			(!found || f.To.Bits() > best.To.Bits()) {
			best, found = f, true
		}
	}
	return best, found
}

func (r *run) drop(why dropreason.Reason) (Verdict, []Entry) {
	r.Drop = why
	return r.Verdict, r.trace
}
