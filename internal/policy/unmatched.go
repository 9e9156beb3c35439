package policy

import (
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

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

// Unmatched returns the labels of pods and namespaces that a policy selects by and that no app has. Such a selector is
// often a mistake: it selects no pod, or all pods if it requires that the label is absent.
func (l Labels) Unmatched(p *Policy) []string {
	keys := map[string]bool{}
	p.eachRequirement(func(r Requirement, of string, namespace bool) {
		if _, known := l.values(namespace)[r.Key]; !known {
			keys[fmt.Sprintf("%s %q", of, r.Key)] = true
		}
	})
	return slices.Sorted(maps.Keys(keys))
}

// UnmatchedValues returns the values that a policy selects by and that no app has, of labels that some app has.
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
