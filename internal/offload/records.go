package offload

import (
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// RecordOf converts an offload of a tenant, without its containers.
func RecordOf(name string, o *pilasterv1.Offload) (Record, error) {
	is, err := tenant.ParseOffloads([]*pilasterv1.Offload{{
		Id: o.Id, Node: o.Node, Prefix: o.Prefix, Phase: o.Phase, Epoch: o.Epoch, Frontends: o.Frontends,
		Since: o.Since,
	}})
	if err != nil {
		return Record{}, err
	}
	return Record{Tenant: name, Offload: is[0], Want: int(o.Wanted), Automatic: o.Automatic}, nil
}

// Leave returns the frontends and the phase of an offload after a frontend has left the cluster. The largest power of
// two of the others stays active, and the rest is draining; if none is left, packets go to the backend, which drops
// what only rules can decide until it has them.
func Leave(o tenant.Offload, node string) ([]tenant.Frontend, tenant.OffloadPhase) {
	active := len(o.Active())
	left := slices.DeleteFunc(slices.Clone(o.Frontends), func(f tenant.Frontend) bool { return f.Node == node })
	keep := powerOfTwo(len(activeOf(left)))
	for i := range left {
		if !left[i].Draining {
			left[i].Draining = keep <= 0
			keep--
		}
	}
	if len(left) == 0 || active > 0 && len(activeOf(left)) == 0 {
		return left, tenant.OffloadEnding
	}
	return left, o.Phase
}

// AwaitedNode is a node that has not acknowledged the phase of an offload.
type AwaitedNode struct {
	Node, Reason string
	Needed       bool // it is the backend or an active frontend
	Connected    bool
}

func namesOf(all []AwaitedNode) (names []string) {
	for _, a := range all {
		names = append(names, a.Node)
	}
	return names
}

// Awaited returns the nodes whose acknowledgements the next step of an offload waits for, in the order of nodes: in
// some phases only for a limited time.
func Awaited(r *Record, nodes []Node) (all []AwaitedNode) {
	frontend := map[string]bool{}
	for _, f := range r.Active() {
		frontend[f.Node] = true
	}
	var answering []string
	if i := slices.IndexFunc(nodes, func(n Node) bool { return n.Name == r.Node }); i >= 0 {
		answering = nodes[i].Tenants[r.Tenant].Answering
	}
	for i := range nodes {
		n := &nodes[i]
		_, hosts := n.Tenants[r.Tenant]
		backend, fronts := n.Name == r.Node, frontend[n.Name]
		delete(frontend, n.Name)
		awaited, rules := false, fronts
		switch r.Phase {
		case tenant.OffloadPreparing:
			awaited = backend || fronts // the backend may lack room for the rules, which is a reason to offload
		case tenant.OffloadDual:
			awaited = backend || fronts || hosts && n.Connected // the backend serves others: it asks frontends
		case tenant.OffloadReturning:
			awaited, rules = backend && hosts, true // without containers it needs no rules
		case tenant.OffloadEnding:
			awaited, rules = hosts, false
		}
		if !awaited {
			continue
		}
		why := n.lacks(r, rules)
		if why == "" && fronts && r.Phase == tenant.OffloadPreparing && !slices.Contains(answering, n.Name) {
			why = "has not answered the backend's probes"
		}
		if why != "" {
			all = append(all, AwaitedNode{n.Name, why, backend || fronts, n.Connected})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(frontend)) {
		all = append(all, AwaitedNode{Node: name, Reason: "has left the cluster", Needed: true})
	}
	return all
}

// lacks says why a node has not applied a record as it is, "" if it has. With rules, it must also enforce the policies.
func (n *Node) lacks(r *Record, rules bool) string {
	h, hosts := n.Tenants[r.Tenant]
	switch {
	case !hosts:
		return "does not have the tenant yet"
	case !n.Connected && (rules || h.Applied < r.Since):
		return "is not connected"
	case rules && h.Unenforced != "":
		return "does not enforce the policies: " + h.Unenforced
	case h.Applied < r.Since:
		return "has not confirmed"
	}
	return ""
}
