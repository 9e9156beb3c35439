package sim

import (
	"context"
	"math/bits"
	"slices"
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

// bitset is a set of numbers.
type bitset []uint64

func (b *bitset) set(i int, is bool) {
	for i/64 >= len(*b) {
		*b = append(*b, 0)
	}
	if is {
		(*b)[i/64] |= 1 << (i % 64)
	} else {
		(*b)[i/64] &^= 1 << (i % 64)
	}
}

func (b bitset) has(i int) bool { return i/64 < len(b) && b[i/64]>>(i%64)&1 == 1 }

func (b bitset) count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// without returns the numbers that are not in other.
func (b bitset) without(other bitset) bitset {
	rest := slices.Clone(b)
	for i := range min(len(rest), len(other)) {
		rest[i] &^= other[i]
	}
	return rest
}

// active counts the endpoints that have entries.
type active struct {
	ids       bitset
	addresses int // of all these endpoints
}

func (a *active) add(r endpoint.Record) {
	if !a.ids.has(int(r.ID)) {
		a.ids.set(int(r.ID), true)
		a.addresses += len(r.Attachments)
	}
}

func (a *active) remove(r endpoint.Record) {
	if a.ids.has(int(r.ID)) {
		a.ids.set(int(r.ID), false)
		a.addresses -= len(r.Attachments)
	}
}
