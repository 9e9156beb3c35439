package store

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/tenant"
)

// Offloads are part of their tenant's record. A tenant with offloads cannot be deleted or moved to another network:
// both would take the rules away from frontends while senders still use them. A restore drops offloads.

// Offloading is a request for an offload.
type Offloading struct {
	Tenant    string
	Node      string   // the backend
	Count     int      // of frontends: 1, 2, 4 or 8
	Frontends []string // names of nodes that can be frontends, at most Count
	Lack      string   // why there are fewer frontends than Count
	Fit       int      // largest number of frontends for which enough nodes fit, then
	Loss      string   // why the offload would be a loss, to refuse it; empty if it may start
	Automatic bool     // the controller starts it
	DryRun    bool     // only check
}

// StartOffload records an offload. Its frontends are not active yet: they load the rules, and become active when the
// backend has reported its containers.
func (s *Store) StartOffload(ctx context.Context, is Offloading) (*pilasterv1.Offload, error) {
	if err := checkTenant(is.Tenant); err != nil {
		return nil, err
	}
	if err := checkFrontends(is); err != nil {
		return nil, err
	}
	var made *pilasterv1.Offload
	err := s.change(ctx, func(t *txn) error {
		found := new(pilasterv1.Tenant)
		if err := t.loadTenant(is.Tenant, found); err != nil {
			return err
		}
		prefix, err := t.offloadNode(is.Node)
		if err != nil {
			return err
		}
		if err := t.mayOffload(found, is.Node); err != nil {
			return err
		}
		made = &pilasterv1.Offload{
			Node: is.Node, Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_PREPARING, Since: found.Changes + 1,
			Automatic: is.Automatic, Wanted: uint32(is.Count),
		}
		made.Prefix = prefix.String()
		if len(is.Frontends) < is.Count {
			fewer := ""
			if is.Fit > 0 {
				fewer = fmt.Sprintf("use --frontends %d, or ", is.Fit)
			}
			return refuse(
				Refused,
				"node %s cannot have %s: %s; nothing was changed: %sconnect more nodes with network %s and a build "+
					"with offloads",
				is.Node,
				humanize.Of(is.Count, "frontend", "frontends"),
				cmp.Or(is.Lack, "too few nodes fit"),
				fewer,
				found.Network,
			)
		}
		for _, name := range is.Frontends {
			prefix, err := t.frontendNode(name, found.Network)
			if err != nil {
				return err
			}
			made.Frontends = append(
				made.Frontends, &pilasterv1.Frontend{Node: name, Prefix: prefix.String(), Draining: true})
		}
		if is.DryRun {
			return nil
		}
		if is.Loss != "" {
			return refuse(
				Refused,
				"the offload would be a loss: %s; nothing was changed: use --force to start it all the same",
				is.Loss,
			)
		}
		if made.Id, err = t.nextOffload(); err != nil {
			return err
		}
		made.Epoch, made.Changed = 1+rand.Uint32N(1<<32-1), timestamppb.New(time.Now())
		found.Offloads = append(found.Offloads, made)
		slices.SortFunc(found.Offloads, func(a, b *pilasterv1.Offload) int { return cmp.Compare(a.Node, b.Node) })
		return t.saveOffloads(found)
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// checkFrontends refuses a choice of frontends that is wrong in every cluster.
func checkFrontends(is Offloading) error {
	if n := is.Count; n < 1 || n > tenant.MaxActive || n&(n-1) != 0 || n < len(is.Frontends) {
		return refuse(
			Invalid,
			"an offload has 1, 2, 4 or %d frontends, not %d; nothing was changed",
			tenant.MaxActive,
			n,
		)
	}
	for i, name := range is.Frontends {
		if name == is.Node {
			return refuse(Invalid, "node %s cannot be its own frontend; nothing was changed", name)
		}
		if slices.Contains(is.Frontends[:i], name) {
			return refuse(Invalid, "node %s is named twice as frontend; nothing was changed", name)
		}
	}
	return nil
}

// mayOffload refuses an offload that the tenant's state forbids.
func (t *txn) mayOffload(of *pilasterv1.Tenant, node string) error {
	for _, o := range of.Offloads {
		if o.Node == node {
			return refuse(
				Exists,
				"the containers of tenant %s on node %s are offloaded already; nothing was changed: `pilaster offload "+
					"get %s --node %s` shows the offload",
				of.Name,
				node,
				of.Name,
				node,
			)
		}
	}
	switch network := cmp.Or(of.Network, tenant.DefaultNetwork); {
	case of.Leaving != "":
		return refuse(
			Refused,
			"tenant %s is migrating from network %s to %s; nothing was changed",
			of.Name,
			of.Leaving,
			network,
		)
	case !tenant.NetworkHas(network, tenant.Offloads):
		return refuse(
			Refused,
			"tenant %s is on network %s, and only tenants on network %s can be offloaded; nothing was changed",
			of.Name,
			network,
			tenant.NetworksWith(tenant.Offloads),
		)
	case len(of.Offloads) >= tenant.MaxOffloads:
		return refuse(
			Full,
			"tenant %s has %d offloads, which is the maximum; nothing was changed: stop one first",
			of.Name,
			len(of.Offloads),
		)
	}
	policies, err := t.list(dirPolicies+of.Name+"/", clientv3.WithKeysOnly(), clientv3.WithLimit(1))
	if err != nil {
		return err
	}
	if len(policies.Kvs) == 0 {
		return refuse(
			Refused,
			"tenant %s has no policies, so there are no rules that other nodes could look up; nothing was changed",
			of.Name,
		)
	}
	hosting, err := t.hostingOf(of.Name)
	if err != nil {
		return err
	}
	var with []string // nodes with containers
	for _, h := range hosting {
		if has, err := t.hasContainers(of, h.Node); err != nil {
			return err
		} else if has {
			with = append(with, h.Node)
		}
	}
	if !slices.Contains(with, node) {
		return refuse(
			Refused,
			"node %s has no containers of tenant %s; nothing was changed: `pilaster tenant get %s` shows where they "+
				"are",
			node,
			of.Name,
			of.Name,
		)
	}
	return t.reserveMTU(of.Name, with)
}

// reserveMTU refuses an offload if containers on connected nodes could send packets that frontends cannot forward.
func (t *txn) reserveMTU(name string, nodes []string) error {
	var keys, small []string
	for _, node := range nodes {
		keys = append(keys, dirNodes+node, dirSessions+node)
	}
	// The commit does not compare these records, because there may be thousands, and a node may register with another
	// reserve right after the commit anyway.
	if err := t.fetch(keys...); err != nil {
		return err
	}
	for _, node := range nodes {
		if t.readings[dirSessions+node].value == "" {
			continue
		}
		n := new(pilasterv1.Node)
		if value := t.readings[dirNodes+node].value; value != "" {
			if err := decode(dirNodes+node, []byte(value), n); err != nil {
				return err
			}
		}
		if n.MtuReserve < tenant.OffloadOverhead {
			small = append(small, fmt.Sprintf("%s (%d)", node, n.MtuReserve))
		}
	}
	if small == nil {
		return nil
	}
	return refuse(
		Refused,
		"packets by way of a frontend are %d bytes longer, and nodes with containers of tenant %s reserve fewer: %s; "+
			"nothing was changed: start their agents with --mtu-reserve %d",
		tenant.OffloadOverhead,
		name,
		someOf(small),
		tenant.OffloadOverhead,
	)
}

// hasContainers reports whether a node that hosts a tenant has its containers. A node that is only a frontend hosts the
// tenant too, but no address is allocated to it.
func (t *txn) hasContainers(of *pilasterv1.Tenant, node string) (bool, error) {
	frontend := func(o *pilasterv1.Offload) bool { return hasFrontend(o, node) }
	if !slices.ContainsFunc(of.Offloads, frontend) {
		return true, nil
	}
	all, err := t.list(dirAllocations+of.Name+"/"+node+"/", clientv3.WithKeysOnly(), clientv3.WithLimit(1))
	return err == nil && len(all.Kvs) > 0, err
}

// offloadNode returns the prefix of a node that can take part in offloads.
func (t *txn) offloadNode(name string) (netip.Prefix, error) {
	n, err := t.liveNode(name)
	if err != nil {
		return netip.Prefix{}, err
	}
	if !n.Offloads {
		return netip.Prefix{}, refuse(
			Refused,
			"node %s cannot take part in offloads; nothing was changed: it needs a build with offloads, and network "+
				"%s by eBPF, not by Open vSwitch",
			name,
			tenant.NetworksWith(tenant.Offloads),
		)
	}
	prefix, err := netip.ParsePrefix(n.Prefix)
	if err != nil {
		return prefix, fmt.Errorf("the store's node %s is not readable: %w", name, err)
	}
	return prefix, nil
}

// frontendNode returns the prefix of a node that can be a frontend of tenants of a network.
func (t *txn) frontendNode(name, network string) (netip.Prefix, error) {
	prefix, err := t.offloadNode(name)
	if err != nil {
		return prefix, err
	}
	n, err := t.liveNode(name)
	if err != nil {
		return prefix, err
	}
	if err := t.fetch(dirSessions + name); err != nil {
		return prefix, err
	}
	switch {
	case n.Edge:
		return prefix, refuse(Refused, "node %s is the Edge Switch and cannot be a frontend; nothing was changed", name)
	case !slices.Contains(n.Enforces, network):
		return prefix, refuse(
			Refused,
			"node %s enforces no policies on network %s and cannot be a frontend; nothing was changed: `pilaster "+
				"status` there shows the reason",
			name,
			network,
		)
	case t.readings[dirSessions+name].value == "":
		return prefix, refuse(Refused, "node %s is not connected and cannot be a frontend; nothing was changed", name)
	}
	return prefix, nil
}

// liveNode returns the record of a node that is not being deleted.
func (t *txn) liveNode(name string) (*pilasterv1.Node, error) {
	n := new(pilasterv1.Node)
	exists, err := t.load(dirNodes+name, n)
	deleted := ""
	if err == nil && exists {
		deleted, err = t.get(dirDeleted + n.Uuid)
	}
	if err != nil {
		return nil, err
	}
	if !exists || deleted != "" {
		return nil, refuse(
			NotFound,
			"there is no node %q; nothing was changed: `pilaster node list` lists the nodes",
			name,
		)
	}
	return n, nil
}

// nextOffload allocates an id. Nodes may still hold entries of an offload that ended, so ids are never reused.
func (t *txn) nextOffload() (uint32, error) {
	next, err := t.mark(keyOffloadMark)
	if err != nil {
		return 0, err
	}
	if next > tenant.MaxOffloadID {
		return 0, refuse(
			Full,
			"all %d ids of offloads have been allocated, and they are never reused; nothing was changed",
			tenant.MaxOffloadID,
		)
	}
	t.setMark(keyOffloadMark, next+1)
	return uint32(next), nil
}

// saveOffloads saves a tenant whose offloads changed, if nodes will accept it.
func (t *txn) saveOffloads(of *pilasterv1.Tenant) error {
	if _, err := tenant.ParseOffloads(of.Offloads); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	return t.saveChanged(of)
}

// StopOffload starts the return of the rules to the backend. With now, packets go to the backend before it has the
// rules; until then it drops what only rules can decide. A repeated call changes nothing.
func (s *Store) StopOffload(ctx context.Context, name, node string, now bool) (*pilasterv1.Offload, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	var is *pilasterv1.Offload
	err := s.change(ctx, func(t *txn) error {
		found := new(pilasterv1.Tenant)
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		i := slices.IndexFunc(found.Offloads, func(o *pilasterv1.Offload) bool { return o.Node == node })
		if i < 0 {
			if _, err := t.liveNode(node); err != nil {
				return err
			}
			return refuse(
				NotFound,
				"the containers of tenant %s on node %q are not offloaded; `pilaster offload list` lists the offloads",
				name,
				node,
			)
		}
		is = found.Offloads[i]
		from := tenant.OffloadPhases[is.Phase]
		next := offload.StopPhase(from)
		if now {
			next = tenant.OffloadEnding
		}
		if next == from {
			return nil
		}
		step(found, is, is.Frontends, next)
		return t.saveOffloads(found)
	})
	if err != nil {
		return nil, err
	}
	return is, nil
}

// ChangeOffload applies a change of the controller, except a start. It does nothing and returns false if phase or
// frontends have changed since the controller saw them: another orchestrator made the change, or an operator another
// one.
func (s *Store) ChangeOffload(ctx context.Context, c offload.Change) (applied bool, err error) {
	err = s.change(ctx, func(t *txn) error {
		applied = false
		found := new(pilasterv1.Tenant)
		if exists, err := t.load(dirTenants+c.Tenant, found); err != nil || !exists {
			return err
		}
		i := slices.IndexFunc(found.Offloads, func(o *pilasterv1.Offload) bool {
			return o.Node == c.Node && o.Since == c.Since
		})
		if i < 0 {
			return nil
		}
		applied = true
		if c.Kind == offload.End {
			found.Offloads = slices.Delete(found.Offloads, i, i+1)
			return t.saveOffloads(found)
		}
		o := found.Offloads[i]
		frontends, err := t.frontends(c, o, found.Network)
		if err != nil {
			return err
		}
		o.Wanted = uint32(c.Want)
		step(found, o, frontends, c.Phase)
		return t.saveOffloads(found)
	})
	return applied, err
}

// frontends returns the frontends of an offload after a change. New ones must be able to be frontends.
func (t *txn) frontends(
	c offload.Change,
	o *pilasterv1.Offload,
	network string,
) (all []*pilasterv1.Frontend, err error) {
	for _, f := range c.Frontends {
		i := slices.IndexFunc(o.Frontends, func(has *pilasterv1.Frontend) bool { return has.Node == f.Node })
		if i >= 0 {
			all = append(all, &pilasterv1.Frontend{Node: f.Node, Prefix: o.Frontends[i].Prefix, Draining: f.Draining})
			continue
		}
		prefix, err := t.frontendNode(f.Node, network)
		if err != nil {
			return nil, err
		}
		all = append(all, &pilasterv1.Frontend{Node: f.Node, Prefix: prefix.String(), Draining: f.Draining})
	}
	return all, nil
}

// step sets frontends and phase of an offload whose tenant is saved next.
func step(of *pilasterv1.Tenant, o *pilasterv1.Offload, frontends []*pilasterv1.Frontend, to tenant.OffloadPhase) {
	o.Frontends, o.Phase = frontends, pilasterv1.OffloadPhase(slices.Index(tenant.OffloadPhases, to))
	o.Since, o.Changed = of.Changes+1, timestamppb.New(time.Now())
}

// SetOffloadAuto records whether the controller starts and ends offloads by the nodes' loads.
func (s *Store) SetOffloadAuto(ctx context.Context, on bool) error {
	value := "off"
	if on {
		value = "on"
	}
	return s.change(ctx, func(t *txn) error {
		is, err := t.get(keyOffloadAuto)
		if err != nil || is == value {
			return err
		}
		t.put(keyOffloadAuto, value)
		return nil
	})
}

// notOffloaded refuses a change of a tenant that has offloads.
func notOffloaded(of *pilasterv1.Tenant) error {
	if len(of.Offloads) == 0 {
		return nil
	}
	var nodes []string
	for _, o := range of.Offloads {
		nodes = append(nodes, o.Node)
	}
	return refuse(
		Refused,
		"the containers of tenant %s on %s are offloaded; nothing was changed: stop that first, with `pilaster "+
			"offload stop %s --node NODE`",
		of.Name,
		strings.Join(nodes, ", "),
		of.Name,
	)
}

// leaveOffloads removes a node that is deleted from all offloads (see offload.Leave). Offloads of its own containers
// end at once.
func (t *txn) leaveOffloads(node string) error {
	resp, err := t.list(dirTenants)
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		key, found := string(kv.Key), new(pilasterv1.Tenant)
		if err := decode(key, kv.Value, found); err != nil {
			return err
		}
		if !takesPart(found, node) {
			continue
		}
		if _, known := t.readings[key]; !known {
			t.readings[key] = readingOf([]*mvccpb.KeyValue{kv})
		}
		proto.Reset(found)
		if _, err := t.load(key, found); err != nil { // with the changes of deletePublished
			return err
		}
		found.Offloads = slices.DeleteFunc(found.Offloads, func(o *pilasterv1.Offload) bool { return o.Node == node })
		for _, o := range found.Offloads {
			if !hasFrontend(o, node) {
				continue
			}
			if err := removeFrontend(found, o, node); err != nil {
				return err
			}
		}
		if err := t.saveOffloads(found); err != nil {
			return err
		}
	}
	return nil
}

func takesPart(of *pilasterv1.Tenant, node string) bool {
	return slices.ContainsFunc(of.Offloads, func(o *pilasterv1.Offload) bool {
		return o.Node == node || hasFrontend(o, node)
	})
}

func hasFrontend(o *pilasterv1.Offload, node string) bool {
	return slices.ContainsFunc(o.Frontends, func(f *pilasterv1.Frontend) bool { return f.Node == node })
}

// removeFrontend removes a node that leaves the cluster from an offload.
func removeFrontend(of *pilasterv1.Tenant, o *pilasterv1.Offload, node string) error {
	r, err := offload.RecordOf(of.Name, o)
	if err != nil {
		return err
	}
	left, phase := offload.Leave(r.Offload, node)
	var frontends []*pilasterv1.Frontend
	for _, f := range left {
		frontends = append(frontends,
			&pilasterv1.Frontend{Node: f.Node, Prefix: f.Prefix.String(), Draining: f.Draining})
	}
	step(of, o, frontends, phase)
	return nil
}

// sameOffloading compares what two reports say about offloads.
func sameOffloading(a, b *pilasterv1.Hosting) bool {
	return a.AppliedChanges == b.AppliedChanges && a.PoliciesRevision == b.PoliciesRevision &&
		slices.Equal(a.LostFrontends, b.LostFrontends) &&
		slices.Equal(a.AnsweringFrontends, b.AnsweringFrontends) &&
		slices.EqualFunc(
			a.Offloaded,
			b.Offloaded,
			func(a, b *pilasterv1.OffloadedEndpoint) bool { return proto.Equal(a, b) },
		)
}
