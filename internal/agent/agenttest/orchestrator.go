package agenttest

import (
	"context"
	"sync"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/tenant"
)

// Orchestrator is a fake orchestrator: it has tenants, and assigns an app to each label set.
type Orchestrator struct {
	Mu       sync.Mutex
	Tenants  map[string]tenant.Tenant
	Apps     map[string]address.AppID
	Calls    int
	Err      error
	Policies map[string]bool // tenants that have some
	Older    bool            // it knows no host ports
}

// NewOrchestrator returns one with tenants blue and red.
func NewOrchestrator() *Orchestrator {
	return &Orchestrator{
		Tenants: map[string]tenant.Tenant{
			"blue": {Name: "blue", Addressing: tenant.Encrypted, IDs: []tenant.ID{{ID: 1, Key: BlueKey}}},
			"red":  {Name: "red", Addressing: tenant.Clear, IDs: []tenant.ID{{ID: 2, Key: address.Key{2}}}},
		},
		Apps: map[string]address.AppID{}, Policies: map[string]bool{},
	}
}

func (o *Orchestrator) Resolve(
	_ context.Context, name string, identity map[string]string, exposes bool,
) (agent.Resolved, error) {
	o.Mu.Lock()
	defer o.Mu.Unlock()
	o.Calls++
	if o.Err != nil {
		return agent.Resolved{}, o.Err
	}
	t, ok := o.Tenants[name]
	if !ok {
		return agent.Resolved{}, refusal.New(refusal.ErrNotFound, "tenant %s does not exist", name)
	}
	if exposes && !o.Older && t.ServicesNumber == 0 && tenant.NetworkHas(t.OnNetwork(), tenant.Services) {
		t.Changes++
		t.ServicesNumber = uint32(t.IDs[0].ID)
		o.Tenants[name] = t
	}
	set := name + " " + tenant.Canonical(identity)
	if o.Apps[set] == 0 {
		o.Apps[set] = address.AppID(len(o.Apps) + 1)
	}
	return agent.Resolved{Tenant: t, App: o.Apps[set], Policies: o.Policies[name]}, nil
}
