package sim

import (
	"context"
	"sync"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// netpilaPath counts the entries that package datapath would have in its tables of network netpila.
type netpilaPath struct {
	mu        sync.Mutex
	ids       map[address.TenantID]bool // by tenant ID; true if it has a key
	endpoints active
}

var _ network.Dataplane = (*netpilaPath)(nil)

func newNetpilaPath() *netpilaPath {
	return &netpilaPath{ids: map[address.TenantID]bool{}}
}

func (p *netpilaPath) PutTenant(_ context.Context, t tenant.Tenant) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range t.IDs {
		p.ids[id.ID] = t.Addressing != tenant.Clear
	}
	return nil
}

func (p *netpilaPath) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range t.IDs {
		delete(p.ids, id.ID)
	}
	return nil
}

func (p *netpilaPath) Activate(_ context.Context, r endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints.add(r)
	return nil
}

func (p *netpilaPath) Deactivate(_ context.Context, r endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints.remove(r)
	return nil
}

func (p *netpilaPath) Check(context.Context, endpoint.Record) error { return nil }

func (p *netpilaPath) Repair(_ context.Context, _, found []endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints = active{}
	for _, r := range found {
		p.endpoints.add(r)
	}
	return nil
}

func (p *netpilaPath) Entries(context.Context) ([]network.Entries, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	addresses, keys := p.endpoints.addresses, 0
	for _, has := range p.ids {
		if has {
			keys++
		}
	}
	return []network.Entries{
		{Table: "locals", Used: addresses},
		{Table: "sources", Used: addresses},
		{Table: "tenants", Used: len(p.ids)},
		{Table: "keys", Used: keys},
	}, nil
}
