package policy_test

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// packet is the first packet of a connection, as one of its ends sees it.
type packet struct {
	subject   *tenant.Identity // nil: an unknown app
	remote    *tenant.Identity // nil: an unknown app, or outside
	outside   bool
	direction policy.Direction
	addr      netip.Addr
	protocol  uint8
	port      uint16
}

// evaluate applies the policies rule by rule, as they are written. It is the reference for Compile and Decide, and
// shares only the types of the model with them. by is the rule that decided; it is empty if no rule did.
func evaluate(policies []policy.Policy, p packet, audit bool) (allowed bool, by policy.RuleName) {
	policies = slices.Clone(policies)
	slices.SortFunc(policies, func(a, b policy.Policy) int {
		return cmp.Or(
			cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name),
		)
	})
	for _, tier := range []policy.Tier{policy.Admin, policy.NetworkPolicy, policy.Baseline} {
		if action, by := inTier(policies, tier, p, audit); action == policy.Accept || action == policy.Deny {
			return action == policy.Accept, by
		}
	}
	return true, policy.RuleName{}
}

func inTier(policies []policy.Policy, tier policy.Tier, p packet, audit bool) (policy.Action, policy.RuleName) {
	var isolation *policy.RuleName
	for _, pol := range policies {
		if pol.Tier != tier || pol.Audit && !audit || !selects(pol.Subject, p.subject) {
			continue
		}
		name := policy.RuleName{Policy: pol.String(), Direction: p.direction, Rule: policy.Isolation, Audit: pol.Audit}
		if pol.Isolates[p.direction] && isolation == nil {
			isolation = &policy.RuleName{}
			*isolation = name
		}
		for i, rule := range pol.Rules[p.direction] {
			if mayMatch(rule, tier, p) {
				name.Rule, name.Name = i, rule.Name
				return policy.Deny, name
			}
			if peerMatches(rule, p) && portMatches(rule, p) {
				name.Rule, name.Name = i, rule.Name
				return rule.Action, name
			}
		}
	}
	if isolation != nil {
		return policy.Deny, *isolation
	}
	return policy.None, policy.RuleName{}
}

// mayMatch reports whether a rule would match an unknown peer with some labels, and denies, or passes to a tier that
// may deny.
func mayMatch(r policy.Rule, tier policy.Tier, p packet) bool {
	if p.remote != nil || p.outside || r.Action != policy.Deny && (r.Action != policy.Pass || tier != policy.Admin) {
		return false
	}
	selected := r.Everyone || slices.ContainsFunc(r.Pods, func(s policy.Pods) bool { return selects(s, nil) })
	if !selected && len(r.Pods) == 0 {
		return false
	}
	if len(r.Ports) == 0 || !selected && portMatches(r, p) {
		return !selected
	}
	return slices.ContainsFunc(r.Ports, func(port policy.Port) bool {
		hasPorts := p.protocol == policy.TCP || p.protocol == policy.UDP || p.protocol == policy.SCTP
		return p.direction == policy.Egress && port.Name != "" &&
			(port.Protocol == p.protocol || port.Protocol == 0 && hasPorts)
	})
}

func selects(s policy.Pods, id *tenant.Identity) bool {
	if id == nil {
		return s.Namespace == "" && len(s.Namespaces) == 0 && len(s.Labels) == 0
	}
	return (s.Namespace == "" || s.Namespace == id.Namespace) && fulfils(s.Namespaces, id.NamespaceLabels) &&
		fulfils(s.Labels, id.Pod)
}

func fulfils(s policy.Selector, labels map[string]string) bool {
	for _, r := range s {
		value, there := labels[r.Key]
		ok := false
		switch r.Operator {
		case policy.In:
			ok = there && slices.Contains(r.Values, value)
		case policy.NotIn:
			ok = !there || !slices.Contains(r.Values, value)
		case policy.Exists:
			ok = there
		case policy.DoesNotExist:
			ok = !there
		}
		if !ok {
			return false
		}
	}
	return true
}

func peerMatches(r policy.Rule, p packet) bool {
	if r.Everyone {
		return true
	}
	for _, s := range r.Pods {
		if !p.outside && selects(s, p.remote) {
			return true
		}
	}
	return slices.ContainsFunc(r.Blocks, func(b policy.Block) bool {
		return b.Prefix.Contains(p.addr) &&
			!slices.ContainsFunc(b.Except, func(e netip.Prefix) bool { return e.Contains(p.addr) })
	})
}

func portMatches(r policy.Rule, p packet) bool {
	destination := p.subject
	if p.direction == policy.Egress {
		destination = p.remote
	}
	return len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(port policy.Port) bool {
		if port.Name == "" {
			return port.Protocol == p.protocol && port.First <= p.port && p.port <= port.Last
		}
		if destination == nil || p.outside && p.direction == policy.Egress {
			return false
		}
		named, there := destination.Ports[port.Name]
		number := map[string]uint8{"TCP": policy.TCP, "UDP": policy.UDP, "SCTP": policy.SCTP}[named.Protocol]
		return there && named.Number == p.port && number == p.protocol &&
			(port.Protocol == 0 || port.Protocol == p.protocol)
	})
}

func appsOf(apps map[address.AppID]map[string]string) []address.AppID {
	return slices.Sorted(maps.Keys(apps))
}
