package sim

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/policy"
)

// policyChanges is how often an event changes the policy, each time when the change before is everywhere.
const policyChanges = 100

// changePolicy changes a policy of the first tenant, and waits each time until all nodes that host the tenant have in their packet paths what it says.
func (w *world) changePolicy(ctx context.Context) error {
	name := w.tenants[0]
	hosts := w.hosting(name)
	w.stage.hosts = len(hosts)
	for i := range policyChanges {
		w.policyPort = w.policyPort%50_000 + 1
		port := w.policyPort
		began := time.Now()
		if _, err := w.operator.ApplyPolicies(ctx, connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: name, Documents: []string{portPolicy(port)}})); err != nil {
			return fmt.Errorf("change %d of the policy: %w", i+1, err)
		}
		for _, n := range hosts {
			last, err := n.driver.awaitPort(ctx, port)
			if err != nil {
				return fmt.Errorf("change %d of the policy is not on node %s: %w", i+1, n.name, err)
			}
			w.stage.changes.note(last.Sub(began))
		}
	}
	return nil
}

// hosting is the nodes that have containers of a tenant.
func (w *world) hosting(tenant string) (hosts []*node) {
	for _, n := range w.nodes {
		for _, c := range n.running {
			if c.tenant == tenant {
				hosts = append(hosts, n)
				break
			}
		}
	}
	return hosts
}

// portPolicy lets all containers be reached at one port alone.
func portPolicy(port uint16) string {
	return fmt.Sprintf(`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: sim, namespace: default}, spec: {podSelector: {}, ingress: [{ports: [{port: %d}]}]}}`, port)
}

// enforced is what a packet path was given last.
type enforced struct {
	ports map[uint16]bool // that a rule names
	since time.Time
	next  chan struct{} // closed when it is given something else; nil while nobody waits
}

func (d *driver) SetPolicies(all []agent.TenantPolicies) error {
	given := enforced{since: time.Now()}
	for _, of := range all {
		for k := range of.Tables.Ports {
			if k.Scope == policy.ThisPort {
				if given.ports == nil {
					given.ports = map[uint16]bool{}
				}
				given.ports[k.Port] = true
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.enforced.next != nil {
		close(d.enforced.next)
	}
	d.enforced = given
	return nil
}

// awaitPort waits until a rule names the port, and says since when one does.
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
