package pipeline

import (
	"net/netip"

	"pilaster.io/pilaster/internal/dropreason"
)

// Packet is what the pipeline looks at.
type Packet struct {
	From     Port
	Outer    netip.Addr // who encapsulated it; only from VXLAN, as are the next two
	VNI      VNI
	Identity uint16
	Src, Dst netip.Addr
}

// Verdict is what becomes of a packet.
type Verdict struct {
	Drop     dropreason.Reason // or one of the ports below
	To       Port
	VTEP     netip.Addr // where To is VXLAN
	VNI      VNI        // the register when it left the pipeline
	Identity uint16
	Src, Dst netip.Addr // after NAT
}

// Table holds a node's entries. It finds them by scanning: it is the judge of switches, and what explains their
// decisions, never one itself.
type Table struct {
	// Region is where the nodes of this one's are. A peer elsewhere is another region's Edge Switch, and then so is
	// this node (§3.1; NM6).
	Region  netip.Prefix
	Entries []Entry
}

// Run takes a packet through the stages, and tells which entries it met.
func (t Table) Run(p Packet) (Verdict, []Entry) {
	r := run{table: t, Verdict: Verdict{VNI: p.VNI, Identity: p.Identity, Src: p.Src, Dst: p.Dst}}
	switch p.From {
	case VXLAN:
		if !IsVTEP(p.Outer) || !met(&r, func(e Peer) bool { return e.Nodes.Contains(p.Outer) }) {
			return r.drop(dropreason.PeerUnknown)
		}
		r.abroad = !t.Region.Contains(p.Outer)
		if r.abroad && !met(&r, func(e Foreign) bool {
			is := e.Edge.Contains(p.Outer) && e.Theirs == p.VNI && e.Source.Contains(p.Src)
			if is {
				r.VNI, r.Identity = e.VNI, 0
			}
			return is
		}) {
			return r.drop(dropreason.ForeignUnknown)
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

// run is one packet's way.
type run struct {
	Verdict
	table  Table
	abroad bool // it came from another region
	trace  []Entry
	// translated: it has a source that the underlay may see.
	translated bool
}

// met looks for the entry of a type that a condition holds for, and notes it.
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
	// A service's virtual address is outside too: what it becomes is judged after.
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
	case best.Port == VXLAN && from == VXLAN && r.abroad != r.table.Region.Contains(best.VTEP),
		best.Port == Gateway && from == Gateway:
		return r.drop(dropreason.NoRoute) // never back to where it came from, be that this region or others
	case best.Port == Gateway && !r.translated:
		return r.drop(dropreason.Untranslated) // an address of the overlay means nothing there, or somebody else
	}
	r.To, r.VTEP = best.Port, best.VTEP
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
