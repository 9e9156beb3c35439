package policy

import (
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// Labels are the keys of those that apps of a tenant have.
type Labels struct{ pods, namespaces map[string]bool }

// LabelsOf finds them.
func LabelsOf(apps map[address.AppID]map[string]string) Labels {
	l := Labels{map[string]bool{}, map[string]bool{}}
	for _, labels := range apps {
		id := tenant.ReadIdentity(labels)
		for key := range id.Pod {
			l.pods[key] = true
		}
		for key := range id.NamespaceLabels {
			l.namespaces[key] = true
		}
	}
	return l
}

// Unheard are labels, of pods and of their namespaces, that a policy selects by and no app has. Such a selector may
// mean what its writer did not: where nobody says the labels to the network, it selects no pod, and one that asks for a
// label not to be there selects all.
func (l Labels) Unheard(p *Policy) []string {
	keys := map[string]bool{}
	note := func(s Selector, what string, known map[string]bool) {
		for _, r := range s {
			if !known[r.Key] {
				keys[fmt.Sprintf("%s %q", what, r.Key)] = true
			}
		}
	}
	all := []Pods{p.Subject}
	for _, d := range directions {
		for _, r := range p.Rules[d] {
			all = append(all, r.Pods...)
		}
	}
	for _, pods := range all {
		note(pods.Labels, "label", l.pods)
		note(pods.Namespaces, "label of namespaces", l.namespaces)
	}
	return slices.Sorted(maps.Keys(keys))
}
