package nic

import (
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Table holds the megaflows that a switch's software table can offload.
type Table struct {
	Entries     int // entries of all stages
	flows       []Megaflow
	handles     map[Megaflow]Handle
	unforwarded map[Megaflow]bool
	lengths     []int // prefix lengths, longest first
}

// NewTable indexes a node's entries.
func NewTable(entries []pipeline.Entry) *Table {
	t := &Table{Entries: len(entries), handles: map[Megaflow]Handle{}, unforwarded: map[Megaflow]bool{}}
	for _, e := range entries {
		f, ok := e.(pipeline.Forward)
		if !ok {
			continue
		}
		m := Megaflow{f.VNI, f.To}
		if !slices.Contains(t.lengths, f.To.Bits()) {
			t.lengths = append(t.lengths, f.To.Bits())
		}
		if f.Port == 0 {
			t.unforwarded[m] = true
			continue
		}
		t.handles[m] = Handle(len(t.flows))
		t.flows = append(t.flows, m)
	}
	slices.SortFunc(t.lengths, func(a, b int) int { return b - a })
	return t
}

// Lookup returns the megaflow of a packet. Its prefix is the prefix of the matched forwarding entry, which covers a
// node if nodes have CIDRs. Lookup returns false for a packet that no entry forwards.
func (t *Table) Lookup(vni pipeline.VNI, to netip.Addr) (Handle, bool) {
	for _, v := range []pipeline.VNI{vni, pipeline.Any} {
		for _, bits := range t.lengths {
			p, err := to.Prefix(bits)
			if err != nil {
				continue // of the other family
			}
			if h, found := t.handles[Megaflow{v, p}]; found {
				return h, true
			}
			if t.unforwarded[Megaflow{v, p}] {
				return 0, false
			}
		}
	}
	return 0, false
}
