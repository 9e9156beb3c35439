package sim

import (
	"context"
	"sync"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// countedNetwork is a network of one node without mappings: the real address allocation, and tables that count.
type countedNetwork struct {
	network.Addresses
	*entryCounter
}

// entryCounter counts the entries that package datapath would have in the tables of the default network.
type entryCounter struct {
	mu        sync.Mutex
	ids       map[address.TenantID]bool // by tenant ID; true if it has a key
	endpoints active
}

var _ network.Dataplane = (*entryCounter)(nil)

func newEntryCounter() *entryCounter {
	return &entryCounter{ids: map[address.TenantID]bool{}}
}

func (p *entryCounter) PutTenant(_ context.Context, t tenant.Tenant) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range t.IDs {
		p.ids[id.ID] = t.Addressing != tenant.Clear
	}
	return nil
}

func (p *entryCounter) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range t.IDs {
		delete(p.ids, id.ID)
	}
	return nil
}

func (p *entryCounter) Activate(_ context.Context, r endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints.add(r)
	return nil
}

func (p *entryCounter) Deactivate(_ context.Context, r endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints.remove(r)
	return nil
}

func (p *entryCounter) Check(context.Context, endpoint.Record) error { return nil }

func (p *entryCounter) Repair(_ context.Context, _, found []endpoint.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints = active{}
	for _, r := range found {
		p.endpoints.add(r)
	}
	return nil
}

func (p *entryCounter) Entries(context.Context) ([]network.Entries, error) {
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
