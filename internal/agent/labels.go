package agent

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// maxRelabelled is how many containers of a node may have another app than the one in their addresses. The orchestrator
// has the same limit.
const maxRelabelled = 4096

// LabelChange sets and removes labels of a running container.
type LabelChange struct {
	Set    map[string]string
	Remove []string
}

// apply returns the labels after the change.
func (q LabelChange) apply(labels map[string]string) (map[string]string, error) {
	if len(q.Set)+len(q.Remove) == 0 {
		return nil, refusal.New(refusal.ErrInvalid, "no label to set or remove")
	}
	next := maps.Clone(labels)
	if next == nil {
		next = map[string]string{}
	}
	for _, k := range q.Remove {
		if _, both := q.Set[k]; both {
			return nil, refusal.New(refusal.ErrInvalid, "label %s is both set and removed; nothing was changed", k)
		}
		delete(next, k)
	}
	maps.Copy(next, q.Set)
	if err := tenant.CheckLabels(next); err != nil {
		return nil, refusal.New(refusal.ErrInvalid, "%w; nothing was changed", err)
	}
	return next, nil
}

// Label changes labels of the endpoint that Find returns. The address keeps the app of the initial labels; policies use
// the app of the new labels: on this node when Label returns, on other nodes that host the tenant when they receive the
// update.
func (c *Core) Label(ctx context.Context, endpointKey string, q LabelChange) (endpoint.Record, error) {
	found, err := c.Find(endpointKey)
	if err != nil {
		return endpoint.Record{}, err
	}
	unlock, err := c.byKey.Lock(ctx, EndpointKey(found.ContainerID, found.Interface))
	if err != nil {
		return endpoint.Record{}, err
	}
	defer unlock()
	was, ok := c.store.Find(found.ContainerID, found.Interface)
	if !ok || was.ID != found.ID || !was.Lives() {
		return endpoint.Record{}, refusal.New(refusal.ErrNotFound, "endpoint %d has just gone", found.ID)
	}
	is := was
	if is.Labels, err = q.apply(was.Labels); err != nil {
		return endpoint.Record{}, err
	}
	identity := tenant.IdentityLabels(is.Labels)
	defer c.services.EndpointsChanged(is.Tenant)
	if maps.Equal(identity, tenant.IdentityLabels(was.Labels)) {
		return is, c.store.Put(is) // other labels do not affect policies
	}
	t, app, err := c.acquire(ctx, was.Tenant, identity, false)
	if err != nil {
		return endpoint.Record{}, err
	}
	defer c.release(ctx, was.Tenant, t.Current().ID)
	defer c.tenants.unclaim(was.Tenant, app)
	c.tenants.claimApp(was.Tenant, was.AppNow) // a rollback may need it
	defer c.tenants.unclaim(was.Tenant, was.AppNow)
	if is.AppNow = app; app == was.App {
		is.AppNow = 0
	}
	if err := c.checkRelabel(is); err != nil {
		return endpoint.Record{}, err
	}
	if err := c.store.Put(is); err != nil {
		return endpoint.Record{}, err
	}
	err = c.policies.Renew(was.Tenant)
	if err == nil {
		err = c.activateApp(ctx, is)
	}
	if err != nil {
		err = refusal.New(refusal.ErrUnavailable, "%w\n  the labels are unchanged", err)
		if undo := c.store.Put(was); undo != nil {
			return endpoint.Record{}, undo
		}
		return endpoint.Record{}, errors.Join(err, c.policies.Renew(was.Tenant), c.activateApp(ctx, was))
	}
	c.tenants.signal()
	c.log.Info(
		"labels of an endpoint changed",
		"endpoint",
		is.ID,
		"container",
		is.ContainerID,
		"pod",
		is.Pod,
		"app",
		is.App,
		"app_now",
		is.AppNow,
	)
	return is, nil
}

// ConditionChange sets conditions of a running container; nil leaves one as it is.
type ConditionChange struct{ Ready, Terminating *bool }

// SetConditions changes the conditions of the endpoint that Find returns.
func (c *Core) SetConditions(ctx context.Context, endpointKey string, q ConditionChange) (endpoint.Record, error) {
	found, err := c.Find(endpointKey)
	if err != nil {
		return endpoint.Record{}, err
	}
	unlock, err := c.byKey.Lock(ctx, EndpointKey(found.ContainerID, found.Interface))
	if err != nil {
		return endpoint.Record{}, err
	}
	defer unlock()
	r, ok := c.store.Find(found.ContainerID, found.Interface)
	if !ok || r.ID != found.ID || !r.Lives() {
		return endpoint.Record{}, refusal.New(refusal.ErrNotFound, "endpoint %d has just gone", found.ID)
	}
	was := r.Conditions
	if q.Ready != nil {
		r.Conditions.NotReady = !*q.Ready
	}
	if q.Terminating != nil {
		r.Conditions.Terminating = *q.Terminating
	}
	if r.Conditions == was {
		return r, nil
	}
	defer c.services.EndpointsChanged(r.Tenant)
	return r, c.store.Put(r)
}

// activateApp notifies networks whose packets or mappings contain the app. The rules of the app are already in force.
func (c *Core) activateApp(ctx context.Context, r endpoint.Record) error {
	if r.State != endpoint.Active {
		return nil
	}
	var errs []error
	for _, name := range r.Networks() {
		if tenant.NetworkHas(name, tenant.PolicyAtReceiver) || tenant.NetworkHas(name, tenant.Identifiers) {
			errs = append(errs, c.networks.Get(name).Activate(ctx, r.On(name)))
		}
	}
	return errors.Join(errs...)
}

func (c *Core) checkRelabel(is endpoint.Record) error {
	if is.AppNow == 0 {
		return nil
	}
	n := 0
	for _, r := range c.store.List() {
		if r.AppNow != 0 && r.ID != is.ID {
			n++
		}
	}
	if n >= maxRelabelled {
		return refusal.New(
			refusal.ErrExhausted,
			"%d containers of this node have changed labels, which is the maximum per node\n  nothing was changed; "+
				"recreate some of them",
			n,
		)
	}
	return nil
}

// overrides returns, by tenant, the containers here whose app differs from the one in their addresses, for the
// orchestrator.
func (c *Core) overrides() map[string][]*pilasterv1.Override {
	all := map[string][]*pilasterv1.Override{}
	for _, r := range c.store.List() {
		for _, a := range r.Attachments {
			if r.AppNow != 0 && a.Plaintext.IsValid() {
				all[r.Tenant] = append(
					all[r.Tenant],
					&pilasterv1.Override{Address: a.Plaintext.String(), App: uint32(r.AppNow)},
				)
			}
		}
	}
	for _, of := range all {
		slices.SortFunc(of, func(a, b *pilasterv1.Override) int { return cmp.Compare(a.Address, b.Address) })
	}
	return all
}
