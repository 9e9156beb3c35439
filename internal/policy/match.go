package policy

import (
	"encoding/binary"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/tenant"
)

// A match is a rule in one set: its ports, and the verdict that it adds there.
type match struct {
	verdict Verdict
	ports   []portRange // empty: all ports of all protocols
	key     string      // encodes verdict and ports, to compare matches
}

// portRange is a range of port numbers of a protocol.
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

// podMatch is the match of a rule with peers by label, blockMatch that of one with peers by address.
type podMatch struct {
	match
	apps appSet
}

type blockMatch struct {
	match
	blocks []Block
}

// numbered returns the ports of a rule that are given by number. never reports that all its ports are given by name.
func numbered(r *Rule) (ports []portRange, never bool) {
	for _, p := range r.Ports {
		if p.Name == "" {
			ports = append(ports, portRange{p.Protocol, p.First, p.Last})
		}
	}
	return ports, len(r.Ports) > 0 && len(ports) == 0
}

// called returns the container port that a named port of a rule refers to.
func (p Port) called(port tenant.Port) (portRange, bool) {
	protocol, ok := protocols[port.Protocol]
	return portRange{protocol, port.Number, port.Number}, ok && (p.Protocol == 0 || p.Protocol == protocol)
}

// matches returns the matches of a rule in the set of a subject. On egress, a port name refers to a port of the peer,
// which may differ by app, so each such port is a separate match. Peers by address have no port names.
func (ix *Index) matches(
	r *Rule,
	d Direction,
	v Verdict,
	apps appSet,
	subject int,
) (pods []podMatch, blocks []blockMatch) {
	ports, never := numbered(r)
	for _, p := range r.Ports {
		if p.Name == "" {
			continue
		}
		if d == Ingress {
			if own, ok := ix.namedPorts(subject)[p.Name]; ok {
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
	if denied, ok := v.ofStranger(); ok {
		if possible := possible(r, d, ports, apps.has(ix.unknown())); len(possible) > 0 {
			pods = append(pods, podMatch{newMatch(denied, possible), ix.stranger})
		} else if len(r.Ports) == 0 && len(r.Pods) > 0 && !apps.has(ix.unknown()) {
			pods = append(pods, podMatch{newMatch(denied, nil), ix.stranger})
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

// ofStranger returns the verdict of a rule that may or may not select an unknown app, and whether the rule applies. A
// rule that accepts does not apply. One that denies does, and so does one of the tier Admin that passes the peer to
// tiers that may deny: both deny.
func (v Verdict) ofStranger() (Verdict, bool) {
	for _, t := range [2]Tier{Admin, Baseline} {
		if a := v.Action(t); a == Deny || a == Pass && t == Admin {
			v.Tiers[t] = step(Deny, v.Rule(t))
			return v, true
		}
	}
	return v, false
}

// possible returns the ports at which a rule may match an unknown app, in addition to those where it matches every app.
// on egress any port may have the name.
func possible(r *Rule, d Direction, ports []portRange, selected bool) (all []portRange) {
	if !selected && len(r.Pods) > 0 {
		all = slices.Clone(ports)
	}
	if d == Ingress || !selected && len(r.Pods) == 0 {
		return all
	}
	for _, p := range r.Ports {
		for _, protocol := range slices.Sorted(maps.Values(protocols)) {
			if p.Name != "" && (p.Protocol == 0 || p.Protocol == protocol) {
				all = append(all, portRange{protocol, 0, maxPort})
			}
		}
	}
	return all
}
