package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// An endpoint has attachments of the network that its tenant is on, and while the tenant leaves another those of that
// too. When the tenant moves, endpoints that run are given the ones and, when the move is finished, lose the others.
// What an endpoint is to have follows from its tenant's record and what it has from its own, so this may be cut off
// anywhere, and is gone on with by the next agent.

// signal tells that something is to be looked at.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) signal() {
	select {
	case s <- struct{}{}:
	default: // it is about to be
	}
}

// moveAgain is how long what failed rests at first, maxMoveAgain at most, and reportMoved how often the cluster is told
// how many are done.
const (
	maxProblem   = 512 // bytes of it that the cluster is told
	moveAgain    = 10 * time.Second
	maxMoveAgain = 5 * time.Minute
	reportMoved  = time.Second
)

// move has endpoints be on their tenants' networks until ctx ends.
func (c *Core) move(ctx context.Context) {
	for failures := 0; ; {
		var again <-chan time.Time
		if c.moveAll(ctx) {
			failures = 0
		} else {
			again = time.After(restOf(failures))
			failures++
		}
		select {
		case <-c.due:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// restOf is the pause after so many failures one after the other: what keeps an endpoint from moving may stay until
// somebody takes it away.
func restOf(failures int) time.Duration { return min(moveAgain<<min(failures, 10), maxMoveAgain) }

// moveAll does what is due, and tells whether all of it is done.
func (c *Core) moveAll(ctx context.Context) (done bool) {
	records := map[string][]endpoint.Record{}
	for _, r := range c.store.List() {
		records[r.Tenant] = append(records[r.Tenant], r)
	}
	done = true
	for _, name := range c.tenants.Names() {
		if ctx.Err() == nil && !c.moveTenant(ctx, name, records[name]) {
			done = false
		}
	}
	return done
}

func (c *Core) moveTenant(ctx context.Context, name string, records []endpoint.Record) (done bool) {
	known, _, ok := c.tenants.get(name)
	if !ok ||
		known.Tenant.Leaving == "" && c.tenants.moving(name) == nil &&
			!slices.ContainsFunc(records, func(r endpoint.Record) bool { return isMoving(known.Tenant, r) }) {
		return true
	}
	var failed error
	told := time.Now()
	for _, r := range records {
		if r.State != endpoint.Active || !c.isDue(known.Tenant, r) {
			continue
		}
		if err := c.moveOne(ctx, r.ContainerID, r.Interface); err != nil {
			c.log.Error(
				"endpoint is not on its tenant's network alone, or not on it",
				"endpoint",
				r.ID,
				"container",
				r.ContainerID,
				"tenant",
				name,
				"error",
				err,
			)
			failed = cmp.Or(failed, fmt.Errorf("endpoint %d: %w", r.ID, err))
		}
		if time.Since(told) > reportMoved {
			c.tellMoved(name, failed)
			told = time.Now()
		}
	}
	if err := c.putOne(ctx, name); err != nil { // the network that the last has left
		c.log.Error("a network still knows a tenant that has left it", "tenant", name, "error", err)
		failed = cmp.Or(failed, err)
	}
	c.tellMoved(name, failed)
	return failed == nil
}

func (c *Core) putOne(ctx context.Context, name string) error {
	unlock, err := c.byTenant.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	return c.put(ctx, name)
}

// isMoving tells whether an endpoint's tenant leaves a network, or it is on others than its tenant.
func isMoving(t tenant.Tenant, r endpoint.Record) bool {
	return t.Leaving != "" || !slices.Equal(r.Networks(), []string{networkOf(t)})
}

// lookAt has somebody look at an endpoint that came or went, where more is to be done or to be counted than that.
func (c *Core) lookAt(r endpoint.Record) {
	known, _, ok := c.tenants.get(r.Tenant)
	if ok && (isMoving(known.Tenant, r) || c.tenants.moving(r.Tenant) != nil) {
		c.due.signal()
	}
}

// isDue tells whether something is to be done about an endpoint.
func (c *Core) isDue(t tenant.Tenant, r endpoint.Record) bool {
	on := r.Networks()
	if slices.Equal(on, []string{networkOf(t)}) {
		return false
	}
	return !c.hasMoved(r.ID) ||
		slices.ContainsFunc(on, func(name string) bool { return name != networkOf(t) && name != t.Leaving })
}

func (c *Core) hasMoved(id endpoint.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.moved[id]
}

func (c *Core) setMoved(id endpoint.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.moved[id] = true
}

func (c *Core) moveOne(ctx context.Context, containerID, iface string) error {
	unlock, err := c.byKey.lock(ctx, key(containerID, iface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok || r.State != endpoint.Active {
		return nil // it went by a DEL, or its device is gone
	}
	known, _, ok := c.tenants.get(r.Tenant)
	if !ok || !c.isDue(known.Tenant, r) {
		return nil
	}
	if err := c.join(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.leave(ctx, known.Tenant, &r); err != nil {
		return err
	}
	if err := c.fit(&r); err != nil { // its container is told when a packet is too big
		c.log.Error("endpoint does not have the MTU that it could", "endpoint", r.ID, "error", err)
	}
	return nil
}

// join gives an endpoint addresses of its tenant's network, or leaves it as it was. Where it has them, all that belongs
// to them is made sure of, and after an error they stay: they may be in use.
func (c *Core) join(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	name := networkOf(t)
	was := r.Without(name)
	if c.hasMoved(r.ID) {
		return nil
	}
	isNew := len(was.Attachments) == len(r.Attachments)
	if isNew {
		bare := was
		bare.Attachments = nil
		more, err := c.attach(ctx, t, r.App, bare)
		if err != nil {
			return err
		}
		both := was
		both.Attachments = append(slices.Clone(was.Attachments), more...)
		// On disk before anything of it is there; but what the container forbids would be written again and again.
		if err = c.driver.CanReaddress(was, both); err == nil {
			err = c.store.Put(both)
		}
		if err != nil {
			return errors.Join(err, c.networks[name].Release(ctx, both.On(name)))
		}
		*r = both
	}
	// Of one whose labels have changed since, the new address says too little.
	err := c.renewPolicies(r.Tenant)
	if err == nil {
		err = c.driver.Readdress(ctx, was, *r)
	}
	if err == nil {
		err = c.networks[name].Activate(ctx, r.On(name))
	}
	if err != nil && !isNew {
		return err
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		return errors.Join(err, c.part(undo, r, name, was))
	}
	c.setMoved(r.ID)
	c.log.Info(
		"endpoint has addresses of its tenant's network too",
		"endpoint",
		r.ID,
		"container",
		r.ContainerID,
		"pod",
		r.Pod,
		"network",
		name,
		"addresses",
		r.Addresses(),
	)
	return nil
}

// leave takes away what an endpoint has of networks that its tenant is not on and has left.
func (c *Core) leave(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	for _, name := range r.Networks() {
		if name == networkOf(t) || name == t.Leaving {
			continue
		}
		stays := r.Without(name)
		stays.Left = append(slices.Clone(r.Left), r.On(name).Addresses()...)
		if err := c.part(ctx, r, name, stays); err != nil {
			return err
		}
		c.log.Info(
			"endpoint has left a network",
			"endpoint",
			r.ID,
			"container",
			r.ContainerID,
			"pod",
			r.Pod,
			"network",
			name,
			"addresses",
			r.Addresses(),
		)
	}
	return nil
}

// part takes an endpoint's attachments of a network away: entries, then the container's side, then the record. After an
// error the record has them still, and the next call goes on from there.
func (c *Core) part(ctx context.Context, r *endpoint.Record, name string, stays endpoint.Record) error {
	n, gone := c.networks[name], r.On(name)
	if err := n.Deactivate(ctx, gone); err != nil {
		return err
	}
	if err := c.driver.Readdress(ctx, *r, stays); err != nil {
		return err
	}
	stays.Device = r.Device
	if err := c.store.Put(stays); err != nil {
		return err
	}
	*r = stays
	if err := n.Release(ctx, gone); err != nil {
		// They are lost for now, never given out twice.
		c.log.Warn("addresses are not noted as released", "addresses", gone.Addresses(), "error", err)
	}
	return nil
}

// tellMoved has the cluster hear how far a tenant's endpoints are, with the first thing that failed.
func (c *Core) tellMoved(name string, failed error) {
	known, _, ok := c.tenants.get(name)
	if !ok {
		return
	}
	moving := &pilasterv1.Moving{}
	for _, r := range c.store.List() {
		if r.Tenant != name || r.State == endpoint.Lost || r.State == endpoint.Deleting ||
			len(r.Without(networkOf(known.Tenant)).Attachments) == 0 {
			continue
		}
		moving.Endpoints++
		if c.hasMoved(r.ID) {
			moving.Moved++
		}
	}
	if failed != nil {
		words := failed.Error()
		moving.Problem = strings.ToValidUTF8(words[:min(len(words), maxProblem)], "")
	}
	if known.Tenant.Leaving == "" && moving.Endpoints == 0 && failed == nil {
		moving = nil
	}
	c.tenants.setMoving(name, moving)
}

func (t *Tenants) setMoving(name string, m *pilasterv1.Moving) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	if h == nil || (h.moving == nil) == (m == nil) && proto.Equal(h.moving, m) {
		return
	}
	h.moving = m
	t.signal()
}

// moving is what was last told of a tenant; nil where nothing was to be.
func (t *Tenants) moving(name string) *pilasterv1.Moving {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.moving
	}
	return nil
}

// unmoved says which tenants' endpoints are not where they are to be, and why.
func (t *Tenants) unmoved() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		h := t.m[name]
		if h.moving.GetProblem() != "" {
			all = append(
				all,
				fmt.Sprintf(
					"tenant %s: %d of %d endpoints that are to move to network %s have addresses there; trying again: %s",
					name,
					h.moving.Moved,
					h.moving.Endpoints,
					networkOf(h.Tenant),
					h.moving.Problem,
				),
			)
		}
	}
	return all
}
