// Package mobility has what networks with address keys share (capability tenant.AddressKeys). A container with an
// address key gets the address of the key. If a container of another node has it, the address moves here: Prepare
// returns the address, and when the network has written the container's entry, Here has the cluster change the mapping.
// So the entry is there before the first packet. The former node forwards what other nodes still send to it.
package mobility

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// FormerTime is how long a node forwards for a container that has left it.
const FormerTime = 2 * time.Second

// Moves has the addresses of a network that move from and to this node.
type Moves struct {
	cluster network.Cluster

	mu     sync.Mutex
	moving map[owned]bool      // addresses of other nodes' containers that Here moves here
	left   map[owned]time.Time // when containers with an address key were removed from here; the last ones only
}

// owned is an address of a tenant.
type owned struct {
	tenant  string
	address netip.Addr
}

// New returns an empty value.
func New(c network.Cluster) *Moves {
	return &Moves{cluster: c, moving: map[owned]bool{}, left: map[owned]time.Time{}}
}

// KeyOf identifies an endpoint's addresses in the cluster.
func KeyOf(r endpoint.Record) string { return r.ContainerID + "/" + r.Interface }

// Prepare is a network's Prepare for a record with an address key. attach returns the attachment with an address, or
// refuses the address.
func (m *Moves) Prepare(
	ctx context.Context,
	r endpoint.Record,
	app address.AppID,
	attach func(netip.Addr) (endpoint.Attachment, error),
) ([]endpoint.Attachment, error) {
	is, err := m.Allocate(ctx, r, app, 0)
	if err != nil {
		return nil, err
	}
	a, err := attach(is.Address)
	if err != nil {
		err = fmt.Errorf("the cluster gave address key %q of tenant %s the address %v, which cannot be used: %w",
			r.AddressKey, r.Tenant, is.Address, err)
		return nil, errors.Join(err, m.cluster.Free(ctx, r.Tenant, KeyOf(r)))
	}
	a.Sequence = is.Sequence
	m.mu.Lock()
	defer m.mu.Unlock()
	of := owned{r.Tenant, is.Address}
	delete(m.moving, of)
	if is.Elsewhere {
		m.moving[of] = true
	}
	return []endpoint.Attachment{a}, nil
}

// Allocate requests the address of the record's address key. A sequence above that of the address moves it here.
func (m *Moves) Allocate(
	ctx context.Context,
	r endpoint.Record,
	app address.AppID,
	sequence uint64,
) (network.KeyedAddress, error) {
	cluster, ok := m.cluster.(network.KeyedCluster)
	if !ok {
		return network.KeyedAddress{}, errors.New("this node's cluster allocates no addresses of address keys")
	}
	return cluster.AllocateKeyed(ctx, r.Tenant, network.KeyedEndpoint{
		Key: KeyOf(r), AddressKey: r.AddressKey, App: app, Sequence: sequence,
	})
}

// Here has the cluster move the address of an endpoint here, if it is elsewhere. It returns the /64 of the node from
// which it has moved the address; zero if none.
func (m *Moves) Here(
	ctx context.Context,
	r endpoint.Record,
	app address.AppID,
	a endpoint.Attachment,
) (former netip.Prefix, err error) {
	if !m.Moving(r.Tenant, a.Address) {
		return former, nil
	}
	is, err := m.Allocate(ctx, r, app, a.Sequence)
	if err != nil {
		return former, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.moving, owned{r.Tenant, a.Address})
	return is.Former, nil // zero if an earlier call, whose answer was lost, has moved it
}

// Moving reports whether Here has yet to move an address.
func (m *Moves) Moving(tenant string, a netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.moving[owned{tenant, a}]
}

// Leave notes that a container was removed. If it has an address key, its mapping to another node may arrive later.
func (m *Moves) Leave(r endpoint.Record, a netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for a, since := range m.left {
		if time.Since(since) > FormerTime {
			delete(m.left, a)
		}
	}
	of := owned{r.Tenant, a}
	delete(m.moving, of) // of an ADD that failed
	if r.AddressKey != "" {
		m.left[of] = time.Now()
	}
}

// HasLeft reports whether a container with an address key has left this node less than FormerTime ago.
func (m *Moves) HasLeft(tenant string, a netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	since, left := m.left[owned{tenant, a}]
	return left && time.Since(since) <= FormerTime
}
