package policy

import (
	"encoding/binary"

	"pilaster.io/pilaster/internal/tenant"
)

// A match is a rule in one set: the verdict it adds where it matches, and the ports at which it does.
type match struct {
	verdict Verdict
	ports   []portRange // none: all, of all protocols
	key     string      // all of the above, to tell matches apart
}

// portRange is ports of a protocol, with numbers alone.
type portRange struct {
	protocol    uint8
	first, last uint16
}

func (r portRange) all() bool { return r.first == 0 && r.last == maxPort }

func newMatch(v Verdict, ports []portRange) match {
	b := appendVerdict(nil, v)
	b = binary.BigEndian.AppendUint32(b, uint32(len(ports)))
	for _, r := range ports {
		b = append(b, r.protocol, byte(r.first>>8), byte(r.first), byte(r.last>>8), byte(r.last))
	}
	return match{v, ports, string(b)}
}

func appendVerdict(b []byte, v Verdict) []byte {
	for _, t := range v.Tiers {
		b = binary.BigEndian.AppendUint32(b, t)
	}
	for _, r := range v.Rank {
		b = binary.BigEndian.AppendUint16(b, r)
	}
	return b
}

// podMatch is of a rule that matches apps, blockMatch of one that matches addresses.
type podMatch struct {
	match
	apps appSet
}

type blockMatch struct {
	match
	blocks []Block
}

// numbered are the ports of a rule that have no names. never: it has names alone.
func numbered(r *Rule) (ports []portRange, never bool) {
	for _, p := range r.Ports {
		if p.Name == "" {
			ports = append(ports, portRange{p.Protocol, p.First, p.Last})
		}
	}
	return ports, len(r.Ports) > 0 && len(ports) == 0
}

// called is the port of a container that a named port of a rule means.
func (p Port) called(port tenant.Port) (portRange, bool) {
	protocol, ok := protocols[port.Protocol]
	return portRange{protocol, port.Number, port.Number}, ok && (p.Protocol == 0 || p.Protocol == protocol)
}

// matches are those of a rule in the set of a subject. On egress a name means a port of each app's own, so that is a
// match of its own; addresses have no names.
func (ix *index) matches(r *Rule, d Direction, v Verdict, apps appSet, subject int) (pods []podMatch, blocks []blockMatch) {
	ports, never := numbered(r)
	for _, p := range r.Ports {
		if p.Name == "" {
			continue
		}
		if d == Ingress {
			if own, ok := ix.identity(subject).Ports[p.Name]; ok {
				if r, ok := p.called(own); ok {
					ports, never = append(ports, r), false
				}
			}
			continue
		}
		for port, having := range ix.ports[p.Name] {
			if r, ok := p.called(port); ok {
				those := append(appSet(nil), having...)
				those.and(apps)
				pods = append(pods, podMatch{newMatch(v, []portRange{r}), those})
			}
		}
	}
	if never {
		return pods, nil
	}
	m := newMatch(v, ports)
	if len(r.Blocks) > 0 {
		blocks = append(blocks, blockMatch{m, r.Blocks})
	}
	return append(pods, podMatch{m, apps}), blocks
}
