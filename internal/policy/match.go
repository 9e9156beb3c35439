package policy

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
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

// podMatch is the match of a rule for the peers that it selects by label, blockMatch for those by address.
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

// called returns the container port that a rule's named port refers to, and whether its protocol is the rule's.
func (p Port) called(port tenant.Port) (portRange, bool) {
	protocol, ok := protocols[port.Protocol]
	return portRange{protocol, port.Number, port.Number}, ok && (p.Protocol == 0 || p.Protocol == protocol)
}

// matches returns the matches of a rule in the set of a subject. On egress, a port name refers to a port of the peer,
// whose number may differ by app. So each number is a separate match. Peers by address have no port names.
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

// ofStranger returns the verdict of a rule for an unknown app, which the rule may or may not select, and whether the
// rule applies. A rule that accepts does not apply. A rule that denies applies. A rule of the tier Admin that passes
// also applies, and denies, because a later tier may deny.
func (v Verdict) ofStranger() (Verdict, bool) {
	for _, t := range [2]Tier{Admin, Baseline} {
		if a := v.Action(t); a == Deny || a == Pass && t == Admin {
			v.Tiers[t] = step(Deny, v.Rule(t))
			return v, true
		}
	}
	return v, false
}

// possible returns the ports on which a rule may match an unknown app, without those on which it matches every app. On
// egress, any port of an unknown app may have the name that the rule gives.
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

// Labels holds the labels and the named ports that the apps of a tenant have.
type Labels struct {
	pods, namespaces map[string]map[string]bool // the values of each key
	ports            map[string][]tenant.Port   // by name
}

// LabelsOf collects the labels and named ports of apps.
func LabelsOf(apps map[address.AppID]map[string]string) Labels {
	l := Labels{map[string]map[string]bool{}, map[string]map[string]bool{}, map[string][]tenant.Port{}}
	add := func(to map[string]map[string]bool, labels map[string]string) {
		for key, value := range labels {
			if to[key] == nil {
				to[key] = map[string]bool{}
			}
			to[key][value] = true
		}
	}
	for _, labels := range apps {
		id := tenant.ReadIdentity(labels)
		add(l.pods, id.Pod)
		add(l.namespaces, id.NamespaceLabels)
		for name, port := range id.Ports {
			if !slices.Contains(l.ports[name], port) {
				l.ports[name] = append(l.ports[name], port)
			}
		}
	}
	return l
}

// Unmatched returns the keys of labels that a policy selects by and that no app has. Such a selector is often a
// mistake: it selects no pod, or all pods if it requires that the label is absent.
func (l Labels) Unmatched(p *Policy) []string {
	keys := map[string]bool{}
	p.eachRequirement(func(r Requirement, of string, namespace bool) {
		if _, known := l.values(namespace)[r.Key]; !known {
			keys[fmt.Sprintf("%s %q", of, r.Key)] = true
		}
	})
	return slices.Sorted(maps.Keys(keys))
}

// UnmatchedValues returns the values that a policy selects by and that no app has, for labels that some app has.
func (l Labels) UnmatchedValues(p *Policy) []string {
	found := map[string]bool{}
	p.eachRequirement(func(r Requirement, of string, namespace bool) {
		values, known := l.values(namespace)[r.Key]
		for _, v := range r.Values {
			if known && !values[v] {
				found[fmt.Sprintf("%s %q with value %q", of, r.Key, v)] = true
			}
		}
	})
	return slices.Sorted(maps.Keys(found))
}

// UnmatchedPorts returns the named ports of a policy's rules that no app declares with the rule's protocol. Such a port
// matches nothing.
func (l Labels) UnmatchedPorts(p *Policy) []string {
	found := map[string]bool{}
	for _, d := range directions {
		for _, r := range p.Rules[d] {
			for _, port := range r.Ports {
				declared := func(of tenant.Port) bool { _, ok := port.called(of); return ok }
				if port.Name == "" || slices.ContainsFunc(l.ports[port.Name], declared) {
					continue
				}
				text := fmt.Sprintf("%q", port.Name)
				for name, number := range protocols {
					if number == port.Protocol {
						text += " of " + name
					}
				}
				found[text] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func (l Labels) values(namespace bool) map[string]map[string]bool {
	if namespace {
		return l.namespaces
	}
	return l.pods
}

// eachRequirement calls f with each requirement of a policy's selectors, and with the name of its kind of label.
func (p *Policy) eachRequirement(f func(r Requirement, of string, namespace bool)) {
	all := []Pods{p.Subject}
	for _, d := range directions {
		for _, r := range p.Rules[d] {
			all = append(all, r.Pods...)
		}
	}
	for _, pods := range all {
		for _, r := range pods.Labels {
			f(r, "label", false)
		}
		for _, r := range pods.Namespaces {
			f(r, "label of namespaces", true)
		}
	}
}
