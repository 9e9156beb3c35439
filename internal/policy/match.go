package policy

import (
	"encoding/binary"
	"maps"
	"slices"

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

// ofStranger is the verdict of a rule that may or may not select who is not known yet. One that accepts does not; one
// that denies does, and so does one that passes a peer to those who may deny it.
func (v Verdict) ofStranger() (Verdict, bool) {
	for _, t := range [2]Tier{Admin, Baseline} {
		if a := v.Action(t); a == Deny || a == Pass && t == Admin {
			v.Tiers[t] = step(Deny, v.Rule(t))
			return v, true
		}
	}
	return v, false
}

// possible are the ports at which a rule may mean who is not known, beside those where it does as it selects everyone:
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
