package policy

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"

	"pilaster.io/pilaster/internal/humanize"
)

// maxRanges is how many different port ranges of one protocol may match one peer. The time grows with its square.
const maxRanges = 4096

// portTable holds the sorted entries of one table for the maps of ports and ranges.
type portTable struct {
	ports  []portRow
	ranges []rangeRow
}

type portRow struct {
	key   PortKey // without the table
	entry PortEntry
}

type rangeRow struct {
	key     RangeKey // without the table
	verdict Verdict
}

// flatten merges the matches into one entry for each port or range, with the verdict of all matches on it. isolated is
// the step of the NetworkPolicy tier for packets that no policy accepts; 0 if no NetworkPolicy isolates.
func flatten(matches []*match, isolated uint32) (t portTable, err error) {
	end := func(v Verdict) Verdict {
		if v.Action(NetworkPolicy) == None {
			v.Tiers[NetworkPolicy] = isolated
		}
		return v
	}
	var always Verdict
	of := map[uint8]*protocolPorts{}
	for _, m := range matches {
		if len(m.ports) == 0 {
			always = always.with(m.verdict)
		}
		for _, r := range m.ports {
			if of[r.protocol] == nil {
				of[r.protocol] = &protocolPorts{exact: map[uint16]Verdict{}, known: map[portRange]int{}}
			}
			of[r.protocol].add(r, m.verdict)
		}
	}
	t.ports = append(t.ports, portRow{PortKey{Scope: OtherProtocols}, PortEntry{Verdict: end(always)}})
	for _, protocol := range slices.Sorted(maps.Keys(of)) {
		p := of[protocol]
		if len(p.ranges) > maxRanges {
			return t, fmt.Errorf(
				"%s of ports of one protocol match one peer, more than %s: write fewer",
				humanize.Of(len(p.ranges), "range", "ranges"),
				humanize.Grouped(maxRanges),
			)
		}
		p.others = p.others.with(always)
		ranges := p.intervals(end)
		t.ports = append(
			t.ports,
			portRow{PortKey{Protocol: protocol, Scope: OtherPorts}, PortEntry{end(p.others), len(ranges) > 0}},
		)
		for _, port := range slices.Sorted(maps.Keys(p.exact)) {
			v := end(p.exact[port].with(p.at(port)))
			t.ports = append(t.ports, portRow{PortKey{Protocol: protocol, Port: port}, PortEntry{Verdict: v}})
		}
		for _, r := range ranges {
			for _, key := range prefixes(r.first, r.last) {
				key.Protocol = protocol
				t.ranges = append(t.ranges, rangeRow{key, r.verdict})
			}
		}
	}
	return t, nil
}

// protocolPorts holds the matches of one protocol.
type protocolPorts struct {
	others Verdict // the verdict of matches on all ports
	exact  map[uint16]Verdict
	ranges []interval        // all different
	known  map[portRange]int // the index in ranges
}

type interval struct {
	first, last uint16
	verdict     Verdict
}

func (p *protocolPorts) add(r portRange, v Verdict) {
	switch {
	case r.all():
		p.others = p.others.with(v)
	case r.first == r.last:
		p.exact[r.first] = p.exact[r.first].with(v)
	default:
		i, known := p.known[r]
		if !known {
			i = len(p.ranges)
			p.ranges, p.known[r] = append(p.ranges, interval{first: r.first, last: r.last}), i
		}
		p.ranges[i].verdict = p.ranges[i].verdict.with(v)
	}
}

// at returns the verdict for a port without an entry of its own.
func (p *protocolPorts) at(port uint16) Verdict {
	v := p.others
	for _, r := range p.ranges {
		if r.first <= port && port <= r.last {
			v = v.with(r.verdict)
		}
	}
	return v
}

// intervals splits the ranges so that they do not overlap, and omits those with the same verdict as all other ports.
func (p *protocolPorts) intervals(end func(Verdict) Verdict) (out []interval) {
	var starts []uint16
	for _, r := range p.ranges {
		starts = append(starts, r.first)
		if r.last < maxPort {
			starts = append(starts, r.last+1)
		}
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	for i, first := range starts {
		last := uint16(maxPort)
		if i+1 < len(starts) {
			last = starts[i+1] - 1
		}
		v := end(p.at(first))
		if n := len(out); n > 0 && out[n-1].last == first-1 && out[n-1].verdict == v {
			out[n-1].last = last
		} else if v != end(p.others) {
			out = append(out, interval{first, last, v})
		}
	}
	return out
}

// prefixes returns the fewest prefixes that cover exactly the ports from first to last.
func prefixes(first, last uint16) (keys []RangeKey) {
	for from, past := uint32(first), uint32(last)+1; from < past; {
		size := bits.TrailingZeros32(from | 1<<16)
		size = min(size, bits.Len32(past-from)-1)
		keys = append(keys, RangeKey{Bits: uint8(16 - size), Port: uint16(from)})
		from += 1 << size
	}
	return keys
}
