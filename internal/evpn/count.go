package evpn

import (
	"net/netip"
	"slices"
)

// PeerCount is what a table has of one peer.
type PeerCount struct {
	Up       bool           `json:"up"`
	Routes   int            `json:"routes"`         // all, refused ones included
	Size     int            `json:"attributeBytes"` // of all routes
	Accepted map[Kind]int   `json:"accepted,omitempty"`
	Refused  map[Reason]int `json:"refused,omitempty"`
	Stale    int            `json:"stale,omitzero"` // of the accepted
}

// HiddenSize is how many bytes of attributes a hidden loop counts for: those of BGP's largest message (RFC 4271 §4).
const HiddenSize = 4096

// Hide sets the number of loops of a peer that the caller has counted, but not passed to Update. They count towards the
// peer's limits.
func (t *Table) Hide(addr netip.Addr, loops int) {
	if p := t.peers[addr]; p != nil && p.up {
		p.hidden = loops
	}
}

// Loops returns how many routes came from this AS or this orchestrator.
func (c PeerCount) Loops() int { return c.Refused[Loop] }

// Count returns what the table has of a peer.
func (t *Table) Count(addr netip.Addr) PeerCount {
	p := t.peers[addr]
	if p == nil {
		return PeerCount{}
	}
	c := PeerCount{
		Up: p.up, Routes: len(p.routes) + p.hidden, Size: p.size + p.hidden*HiddenSize, Stale: p.stale,
		Accepted: map[Kind]int{}, Refused: map[Reason]int{},
	}
	for reason, kinds := range p.counts {
		for kind, n := range kinds {
			switch {
			case n == 0:
			case Reason(reason) == Accepted:
				c.Accepted[kind] = n
			default:
				c.Refused[Reason(reason)] += n
			}
		}
	}
	if p.hidden > 0 {
		c.Refused[Loop] += p.hidden
	}
	return c
}

// Exceeds reports whether a peer has announced more than a number of routes, or of bytes of attributes.
func (t *Table) Exceeds(addr netip.Addr, routes, size int) bool {
	p := t.peers[addr]
	return p != nil && (len(p.routes)+p.hidden > routes || p.size+p.hidden*HiddenSize > size)
}

// Contested returns the MACs and addresses of this cluster's containers that other speakers announce too, in order.
func (t *Table) Contested() (keys []RecordKey) {
	for key := range t.own {
		if len(t.groups[key]) > 0 {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, RecordKey.Compare)
	return keys
}

// CountRecords returns the number of records by kind.
func (t *Table) CountRecords() map[RecordKind]int {
	counts := map[RecordKind]int{}
	for key := range t.records {
		counts[key.Kind]++
	}
	return counts
}

// Unreplicated returns how many VTEPs get no replicated frames because of MaxMembers.
func (t *Table) Unreplicated() (n int) {
	for _, all := range t.members {
		n += max(0, len(all)-MaxMembers)
	}
	return n
}
