package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// Egress rules and the nodes that a tenant reaches are part of its record. In addition each node has a mark of the
// addresses that it got as an egress gateway. Indexes are never reused: firewalls outside may still admit the old
// addresses.

// SetEgressRules creates or replaces the egress rules of a tenant for some prefixes. Of a gateway, only node and
// address count; without an address, the tenant keeps the one that it has at the node, or gets one.
func (s *Store) SetEgressRules(
	ctx context.Context,
	name string,
	to []netip.Prefix,
	allow bool,
	via []tenant.EgressGateway,
) (made []*pilasterv1.EgressRule, err error) {
	if len(to) == 0 {
		return nil, refuse(Invalid, "an egress rule needs a prefix; nothing was changed")
	}
	err = s.changeEgress(ctx, name, func(t *txn, plan address.Plan, found *pilasterv1.Tenant) error {
		if err := checkTo(plan, to); err != nil {
			return err
		}
		isReplaced := func(r *pilasterv1.EgressRule) bool { return slices.Contains(to, prefixOf(r)) }
		replaced := slices.Clone(found.Egress)
		replaced = slices.DeleteFunc(replaced, func(r *pilasterv1.EgressRule) bool { return !isReplaced(r) })
		found.Egress = slices.DeleteFunc(found.Egress, isReplaced)
		if n := len(found.Egress) + len(to); n > tenant.MaxEgressRules {
			return refuse(
				Full,
				"tenant %s would have %d egress rules, and a tenant has %d at most; nothing was changed: delete "+
					"some first",
				name,
				n,
				tenant.MaxEgressRules,
			)
		}
		var gateways []*pilasterv1.EgressGateway
		for _, g := range via {
			gateway, err := t.egressGateway(plan, found, replaced, g)
			if err != nil {
				return err
			}
			gateways = append(gateways, gateway)
		}
		made = nil
		for _, p := range to {
			made = append(made, &pilasterv1.EgressRule{To: p.String(), Allow: allow, Gateways: gateways})
		}
		found.Egress = append(found.Egress, made...)
		slices.SortFunc(found.Egress, func(a, b *pilasterv1.EgressRule) int {
			return prefixOf(a).Compare(prefixOf(b))
		})
		return nil
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// checkTo refuses prefixes of new rules that name nothing outside.
func checkTo(plan address.Plan, to []netip.Prefix) error {
	for i, p := range to {
		if slices.Contains(to[:i], p) {
			return refuse(Invalid, "prefix %v is there twice; nothing was changed", p)
		}
		if by, is := alwaysProtected(plan, p); is {
			return refuse(
				Invalid,
				"an egress rule to %v would have no effect, because no rule leads to %v; nothing was changed",
				p,
				by,
			)
		}
	}
	return nil
}

// alwaysProtected returns the prefix that denies all of p whatever rules say.
func alwaysProtected(plan address.Plan, p netip.Prefix) (netip.Prefix, bool) {
	all := tenant.AlwaysProtected(plan)
	i := slices.IndexFunc(all, func(by netip.Prefix) bool { return by.Bits() <= p.Bits() && by.Overlaps(p) })
	if i < 0 {
		return netip.Prefix{}, false
	}
	return all[i], true
}

// prefixOf returns the prefix of a stored rule.
func prefixOf(r *pilasterv1.EgressRule) netip.Prefix {
	p, _ := netip.ParsePrefix(r.GetTo())
	return p
}

// DeleteEgressRules deletes egress rules of a tenant: all that are named, or none.
func (s *Store) DeleteEgressRules(ctx context.Context, name string, to []netip.Prefix) error {
	return s.changeEgress(ctx, name, func(_ *txn, _ address.Plan, found *pilasterv1.Tenant) error {
		for _, p := range to {
			i := slices.IndexFunc(found.Egress, func(r *pilasterv1.EgressRule) bool { return prefixOf(r) == p })
			if i < 0 {
				return refuse(
					NotFound,
					"tenant %s has no egress rule to %v; nothing was changed: `pilaster egress list %s` lists its "+
						"rules",
					name,
					p,
					name,
				)
			}
			found.Egress = slices.Delete(found.Egress, i, i+1)
		}
		return nil
	})
}

// SetTenantNodes replaces the nodes whose processes reach a tenant's containers, and are reached by them. It returns
// their prefixes; with all, that is the base prefix.
func (s *Store) SetTenantNodes(
	ctx context.Context,
	name string,
	prefixes []netip.Prefix,
	all bool,
) (set []string, err error) {
	err = s.changeEgress(ctx, name, func(_ *txn, plan address.Plan, found *pilasterv1.Tenant) error {
		sorted := slices.SortedFunc(slices.Values(prefixes), netip.Prefix.Compare)
		if all {
			sorted = []netip.Prefix{plan.Base}
		}
		set = nil
		for _, p := range slices.Compact(sorted) {
			set = append(set, p.String())
		}
		found.NodePrefixes = set
		return nil
	})
	return set, err
}

// changeEgress changes the egress rules or the nodes of a tenant and checks the result.
func (s *Store) changeEgress(
	ctx context.Context,
	name string,
	change func(*txn, address.Plan, *pilasterv1.Tenant) error,
) error {
	if err := checkTenant(name); err != nil {
		return err
	}
	return s.change(ctx, func(t *txn) error {
		found := new(pilasterv1.Tenant)
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		if network := cmp.Or(found.Network, tenant.DefaultNetwork); !tenant.NetworkHas(network, tenant.Egress) {
			return refuse(
				Refused,
				"tenant %s is on network %s, and only tenants of network %s have egress rules and reach nodes; "+
					"nothing was changed",
				name,
				network,
				tenant.NetworksWith(tenant.Egress),
			)
		}
		plan, err := t.plan()
		if err != nil {
			return err
		}
		was := proto.CloneOf(found)
		if err := change(t, plan, found); err != nil {
			return err
		}
		if proto.Equal(was, found) {
			return nil
		}
		is := tenant.Tenant{Name: name, Network: found.Network}
		if is.Egress, err = tenant.ParseEgress(found.Egress); err == nil {
			is.Nodes, err = tenant.ParsePrefixes(found.NodePrefixes)
		}
		if err == nil {
			err = is.CheckEgress(plan)
		}
		if _, unfit := errors.AsType[tenant.Unfit](err); unfit {
			return refuse(Refused, "%v; nothing was changed", err)
		}
		if err != nil {
			return refuse(Invalid, "%v; nothing was changed", err)
		}
		return t.saveChanged(found)
	})
}

// plan returns the cluster's plan with what it reserves; another orchestrator may have added to that.
func (t *txn) plan() (address.Plan, error) {
	r, err := t.clusterRecord()
	plan := r.plan()
	plan.Identifiers = r.Identifiers
	return plan, err
}

// egressGateway returns a gateway of a rule, with the tenant's address at the node. Of is the tenant without the
// replaced rules.
func (t *txn) egressGateway(
	plan address.Plan,
	of *pilasterv1.Tenant,
	replaced []*pilasterv1.EgressRule,
	wanted tenant.EgressGateway,
) (*pilasterv1.EgressGateway, error) {
	prefix, err := t.egressNode(wanted.Node)
	if err != nil {
		return nil, err
	}
	made := &pilasterv1.EgressGateway{Node: wanted.Node, Prefix: prefix.String()}
	has := gatewayAddress(of.Egress, wanted.Node)
	switch {
	case !wanted.Address.IsValid():
		made.Address = cmp.Or(has, gatewayAddress(replaced, wanted.Node))
	case has != "" && has != wanted.Address.String():
		return nil, refuse(
			Refused,
			"other rules of tenant %s have address %s at node %s, and a tenant has one address at a node; nothing was "+
				"changed: leave --address out, or set these rules together",
			of.Name,
			has,
			wanted.Node,
		)
	default:
		made.Address = wanted.Address.String()
		if err := t.mayHaveAddress(plan, of.Name, wanted.Node, prefix, wanted.Address); err != nil {
			return nil, err
		}
	}
	if made.Address != "" {
		return made, nil
	}
	a, err := t.nextGatewayAddress(plan, wanted.Node, prefix)
	made.Address = a.String()
	return made, err
}

// gatewayAddress returns the address that rules have at a node, "" for none.
func gatewayAddress(rules []*pilasterv1.EgressRule, node string) string {
	for _, r := range rules {
		for _, g := range r.Gateways {
			if g.Node == node {
				return g.Address
			}
		}
	}
	return ""
}

// egressNode returns the prefix of a node that can be an egress gateway and is not being deleted.
func (t *txn) egressNode(name string) (netip.Prefix, error) {
	at, err := t.liveNode(name)
	if err != nil {
		return netip.Prefix{}, err
	}
	if !at.Egress {
		return netip.Prefix{}, refuse(
			Refused,
			"node %s cannot be an egress gateway; nothing was changed: upgrade its agent, run `pilaster status` there "+
				"to see why, or use another node",
			name,
		)
	}
	prefix, err := netip.ParsePrefix(at.Prefix)
	if err != nil {
		return prefix, fmt.Errorf("the store's node %s is not readable: %w", name, err)
	}
	return prefix, nil
}

// mayHaveAddress refuses an address that an operator chose for a gateway if it is something else's.
func (t *txn) mayHaveAddress(plan address.Plan, name, node string, prefix netip.Prefix, a netip.Addr) error {
	if err := t.notAnothersAddress(name, node, a); err != nil {
		return err
	}
	host := netip.PrefixFrom(a, a.BitLen())
	if by, is := alwaysProtected(plan, host); is {
		next, err := t.mark(dirGatewayMarks + node)
		if err != nil {
			return err
		}
		at, _ := plan.EgressNode(prefix)
		index := address.Split(a).Index
		own := tenant.IsEgressAddress(a) && (at.Contains(a) || prefix.Contains(a))
		if own && index >= tenant.FirstGatewayIndex && uint64(index) < next {
			return nil // it was allocated at this node before
		}
		return refuse(
			Invalid,
			"address %v is in %v, and it is none that node %s has had as a gateway: the cluster allocates the "+
				"addresses there, or no host outside has them; nothing was changed: leave --address out, or use an "+
				"address outside of the cluster that is routed to node %[3]s",
			a,
			by,
			node,
		)
	}
	check := func(what string, is netip.Prefix) error {
		if !is.Contains(a) {
			return nil
		}
		if is != host {
			what = fmt.Sprintf("in %v, %s", is, what)
		}
		return refuse(
			Refused,
			"address %v is %s; nothing was changed: use a separate address for the gateway",
			a,
			what,
		)
	}
	if err := t.checkUnderlay(check); err != nil {
		return err
	}
	return t.checkExposed(check)
}

// notAnothersAddress refuses the gateway address of another tenant, or of the same tenant at another node.
func (t *txn) notAnothersAddress(name, node string, a netip.Addr) error {
	return t.eachGatewayAddress(func(tenant, at, has string) error {
		if has != a.String() || tenant == name && at == node {
			return nil
		}
		return refuse(Refused, "address %v is that of tenant %s at node %s; nothing was changed: use another", a,
			tenant, at)
	})
}

// eachGatewayAddress calls check for the address of each tenant at each of its egress gateways.
func (t *txn) eachGatewayAddress(check func(tenant, node, address string) error) error {
	resp, err := t.list(dirTenants)
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		other := new(pilasterv1.Tenant)
		if err := decode(string(kv.Key), kv.Value, other); err != nil {
			return err
		}
		for _, r := range other.Egress {
			for _, g := range r.Gateways {
				if err := check(other.Name, g.Node, g.Address); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// nextGatewayAddress allocates the next address of a node as an egress gateway.
func (t *txn) nextGatewayAddress(plan address.Plan, node string, prefix netip.Prefix) (netip.Addr, error) {
	at, ok := plan.EgressNode(prefix)
	if !ok {
		return netip.Addr{}, refuse(
			Refused,
			"node %s has no /64 in the egress prefix %v; nothing was changed: use another node, or --address",
			node,
			plan.Egress,
		)
	}
	next, err := t.mark(dirGatewayMarks + node)
	if err != nil {
		return netip.Addr{}, err
	}
	next = max(next, uint64(tenant.FirstGatewayIndex))
	if next >= uint64(tenant.FirstEgressIndex) {
		return netip.Addr{}, refuse(
			Full,
			"all %d addresses of node %s for egress gateways have been allocated, and they are never reused; nothing "+
				"was changed: use another node, or --address",
			tenant.FirstEgressIndex-tenant.FirstGatewayIndex,
			node,
		)
	}
	t.setMark(dirGatewayMarks+node, next+1)
	return tenant.EgressAddress(at, address.Index(next)), nil
}

// leaveGateways removes a node that is deleted from egress rules. A rule without another gateway then denies, because
// without a gateway its packets would leave elsewhere with other addresses. Without force it refuses if there are any.
func (t *txn) leaveGateways(node string, force bool) error {
	resp, err := t.list(dirTenants)
	if err != nil {
		return err
	}
	is := func(g *pilasterv1.EgressGateway) bool { return g.Node == node }
	var named, denied []string
	for _, kv := range resp.Kvs {
		key, found := string(kv.Key), new(pilasterv1.Tenant)
		if err := decode(key, kv.Value, found); err != nil {
			return err
		}
		if gatewayAddress(found.Egress, node) == "" {
			continue
		}
		if _, known := t.readings[key]; !known {
			t.readings[key] = readingOf([]*mvccpb.KeyValue{kv})
		}
		proto.Reset(found)
		if _, err := t.load(key, found); err != nil { // with earlier changes of this transaction
			return err
		}
		for _, r := range found.Egress {
			if !slices.ContainsFunc(r.Gateways, is) {
				continue
			}
			name := found.Name + " to " + r.To
			named = append(named, name)
			r.Gateways = slices.DeleteFunc(r.Gateways, is)
			if r.Allow = len(r.Gateways) > 0; !r.Allow {
				denied = append(denied, name)
			}
		}
		if err := t.saveChanged(found); err != nil {
			return err
		}
	}
	if len(named) > 0 && !force {
		after := "after which they use their other gateway"
		if len(denied) > 0 {
			after = "after which these deny: " + fewOf(denied)
		}
		return refuse(Refused, "node %s is a gateway of %s, so it was not deleted: %s. Set other gateways first "+
			"(`pilaster egress set TENANT --to PREFIX --action allow --via NODE`), or use --force, %s", node,
			humanize.Of(len(named), "egress rule", "egress rules"), fewOf(named), after)
	}
	t.delete(dirGatewayMarks + node)
	return nil
}

// fewOf joins names, and omits all but the first 8.
func fewOf(names []string) string {
	if more := len(names) - 8; more > 0 {
		return strings.Join(names[:8], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(names, ", ")
}

// ChangeProtected adds and removes prefixes that only egress rules for them or parts of them allow. It returns all.
func (s *Store) ChangeProtected(ctx context.Context, add, remove []netip.Prefix) (all []netip.Prefix, err error) {
	err = s.change(ctx, func(t *txn) error {
		plan, err := t.plan()
		if err != nil {
			return err
		}
		before, err := t.get(keyProtected)
		if err != nil {
			return err
		}
		if all, err = parseProtected(before); err != nil {
			return err
		}
		for _, p := range remove {
			i := slices.Index(all, p)
			if i < 0 {
				return refuse(
					NotFound,
					"prefix %v is not protected; nothing was changed: `pilaster egress protect list` lists the "+
						"prefixes",
					p,
				)
			}
			all = slices.Delete(all, i, i+1)
		}
		for _, p := range add {
			if err := checkProtected(plan, p); err != nil {
				return err
			}
			all = append(all, p)
		}
		slices.SortFunc(all, netip.Prefix.Compare)
		if all = slices.Compact(all); len(all) > tenant.MaxProtected {
			return refuse(
				Full,
				"%d prefixes would be protected, and the maximum is %d; nothing was changed: remove some first",
				len(all),
				tenant.MaxProtected,
			)
		}
		text, err := json.Marshal(all)
		if err != nil || string(text) == cmp.Or(before, "null") {
			return err
		}
		t.put(keyProtected, string(text))
		return nil
	})
	return all, err
}

func checkProtected(plan address.Plan, p netip.Prefix) error {
	by, is := alwaysProtected(plan, p)
	switch {
	case !p.IsValid() || !p.Addr().Is6() || p.Addr().Is4In6():
		return refuse(Invalid, "%v is not an IPv6 prefix; nothing was changed", p)
	case p != p.Masked():
		return refuse(Invalid, "%v has host bits set; nothing was changed: write %v", p, p.Masked())
	case is:
		return refuse(Invalid, "%v is always protected, as a part of %v; nothing was changed", p, by)
	}
	return nil
}

func parseProtected(text string) (all []netip.Prefix, err error) {
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("the store's %s is not readable: %w", keyProtected, err)
	}
	return all, nil
}
