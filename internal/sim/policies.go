package sim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// changePolicy changes a policy of the first tenant so many times. After each change it waits until all nodes that host
// the tenant have the change in their packet paths.
func (w *world) changePolicy(ctx context.Context, times int) error {
	name := w.tenants[0]
	c := w.beginChanges(policyChanges, name)
	for i := range times {
		c.collectIfDue()
		w.policyPort = w.policyPort%50_000 + 1
		port := w.policyPort
		began := c.begin()
		if _, err := w.operator.ApplyPolicies(ctx, connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: name,
			Documents: []string{portPolicy(port)}})); err != nil {
			return fmt.Errorf("policy change %d: %w", i+1, err)
		}
		var last time.Duration
		for n := range c.hosts {
			since, err := n.driver.awaitPort(ctx, port)
			if err != nil {
				return fmt.Errorf("policy change %d did not reach node %s: %w", i+1, n.name, err)
			}
			took := since.Sub(began)
			c.each.note(took)
			last = max(last, took)
		}
		c.done(last)
	}
	return nil
}

// checkPolicies compares the policies of packet paths with the last change: nodes that host the tenant enforce only
// that policy, and other nodes enforce none.
func (w *world) checkPolicies(v *violations) {
	if w.policyPort == 0 {
		return
	}
	hosts := w.hosting(w.tenants[0])
	for _, n := range w.nodes {
		n.driver.mu.Lock()
		ports := n.driver.enforced.ports
		n.driver.mu.Unlock()
		switch {
		case hosts[n] && !(ports[w.policyPort] && len(ports) == 1):
			v.add(
				"a changed policy is not in force",
				"node %s accepts ports %v, want %d",
				n.name,
				slices.Collect(maps.Keys(ports)),
				w.policyPort,
			)
		case !hosts[n] && len(ports) > 0:
			v.add("a node without the tenant has its policy", "node %s has rules of tenant %s", n.name, w.tenants[0])
		}
	}
}

// portPolicy returns a policy that admits connections to one port only.
func portPolicy(port uint16) string {
	return fmt.Sprintf(
		`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: sim, namespace: default}, `+
			`spec: {podSelector: {}, ingress: [{ports: [{port: %d}]}]}}`,
		port,
	)
}

// enforced is the last policy of a packet path.
type enforced struct {
	ports map[uint16]bool // ports that a rule names
	since time.Time
	next  chan struct{} // closed at the next change; nil while no goroutine waits
}

func (d *driver) RestorePolicies(all, _ []dpapi.TenantPolicies) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports = map[string]map[uint16]bool{}
	for _, of := range all {
		d.ports[of.Tenant] = portsOf(of)
	}
	d.enforce()
	return nil
}

func (d *driver) SetPolicies(of dpapi.TenantPolicies) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports[of.Tenant] = portsOf(of)
	d.enforce()
	return nil
}

func portsOf(t dpapi.TenantPolicies) map[uint16]bool {
	ports := map[uint16]bool{}
	for k := range t.Tables.Ports {
		if k.Scope == policy.ThisPort {
			ports[k.Port] = true
		}
	}
	return ports
}

// enforce requires the lock.
func (d *driver) enforce() {
	given := enforced{ports: map[uint16]bool{}, since: time.Now()}
	for _, ports := range d.ports {
		maps.Copy(given.ports, ports)
	}
	if d.enforced.next != nil {
		close(d.enforced.next)
	}
	d.enforced = given
}

// awaitPort waits until a rule names the port, and returns when the rule took effect.
func (d *driver) awaitPort(ctx context.Context, port uint16) (since time.Time, err error) {
	for {
		d.mu.Lock()
		if d.enforced.next == nil {
			d.enforced.next = make(chan struct{})
		}
		now := d.enforced
		d.mu.Unlock()
		if now.ports[port] {
			return now.since, nil
		}
		select {
		case <-now.next:
		case <-ctx.Done():
			return since, ctx.Err()
		}
	}
}
