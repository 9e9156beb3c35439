package ila

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// A container with an address key gets the address of the key. If a container of another node has it, the address moves
// here: Prepare returns the address, Activate writes the container's entry and then has the cluster change the mapping.
// So the entry is there before the first packet. The former node forwards what other nodes still send to it.

// prepareKeyed is Prepare for a record with an address key.
func (n *Network) prepareKeyed(
	ctx context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	is, err := n.allocateKeyed(ctx, r, app, 0)
	if err != nil {
		return nil, err
	}
	a := n.attachment(is.Address)
	a.Sequence = is.Sequence
	r.Attachments = []endpoint.Attachment{a}
	if err := n.Validate(r); err != nil {
		err = fmt.Errorf("the cluster gave address key %q of tenant %s the address %v, which cannot be used: %w",
			r.AddressKey, t.Name, is.Address, err)
		return nil, errors.Join(err, n.Release(ctx, r))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.moving, is.Address)
	if is.Elsewhere {
		n.moving[is.Address] = true
	}
	return r.Attachments, nil
}

func (n *Network) allocateKeyed(
	ctx context.Context,
	r endpoint.Record,
	app address.AppID,
	sequence uint64,
) (network.KeyedAddress, error) {
	keyed, ok := n.config.Cluster.(network.KeyedCluster)
	if !ok {
		return network.KeyedAddress{}, errors.New("this node's cluster allocates no addresses of address keys")
	}
	return keyed.AllocateKeyed(ctx, r.Tenant, network.KeyedEndpoint{
		Key: keyOf(r), AddressKey: r.AddressKey, App: app, Sequence: sequence,
	})
}

// moveHere has the cluster move the address of an endpoint here, if it is elsewhere.
func (n *Network) moveHere(ctx context.Context, r endpoint.Record, a endpoint.Attachment) error {
	n.mu.Lock()
	moving := n.moving[a.Address]
	n.mu.Unlock()
	if !moving {
		return nil
	}
	is, err := n.allocateKeyed(ctx, r, appOf(r), a.Sequence)
	if err != nil {
		return err
	}
	n.mu.Lock()
	delete(n.moving, a.Address)
	n.mu.Unlock()
	if !is.Former.IsValid() {
		return nil // an earlier call, whose answer was lost, has moved it
	}
	local := localOf(r)
	if local.Former, err = n.config.ILA.Locator(is.Former); err != nil {
		return fmt.Errorf("the former node of %v: %w", a.Address, err)
	}
	return n.setLocal(r, a.Address, local)
}

// noteLeft notes that a container with an address key was removed: its mapping to another node may arrive later. The
// caller holds the lock.
func (n *Network) noteLeft(r endpoint.Record, a netip.Addr) {
	for a, since := range n.left {
		if time.Since(since) > FormerTime {
			delete(n.left, a)
		}
	}
	delete(n.moving, a) // of an ADD that failed
	if r.AddressKey != "" {
		n.left[a] = time.Now()
	}
}

// formerHere returns this node's locator if a new mapping is of a container that is here or was until just now. The
// caller holds the lock.
func (n *Network) formerHere(h *hosted, a netip.Addr) netip.Prefix {
	_, here := h.here[a]
	if since, left := n.left[a]; here || left && time.Since(since) <= FormerTime {
		h.until = time.Now().Add(FormerTime)
		return n.config.Locator
	}
	return netip.Prefix{}
}

// Run removes the mappings of tenants that have no more containers here, once this node no longer forwards for them. On
// a node that pulls, it begins and ends subscriptions.
func (n *Network) Run(ctx context.Context, log *slog.Logger) {
	if n.config.Pull {
		var reading sync.WaitGroup
		reading.Go(func() { n.readMisses(ctx, log) })
		defer reading.Wait()
	}
	ticks := time.NewTicker(FormerTime / 2)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			if err := n.endForwarding(); err != nil {
				log.Error("removing the mappings of a tenant that has left this node failed", "error", err)
			}
			if err := n.endSubscriptions(); err != nil {
				log.Error("ending unused subscriptions to mappings failed; retrying", "error", err)
			}
		}
	}
}

func (n *Network) endForwarding() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, h := range n.leaving {
		if time.Now().Before(h.until) {
			continue
		}
		if err := n.setPeers(h, nil, slices.Collect(maps.Keys(h.remote))); err != nil {
			return err
		}
		delete(n.leaving, name)
	}
	return nil
}

// Moved reports whether an endpoint's address is on another node by now, as far as this node knows.
func (n *Network) Moved(r endpoint.Record) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[r.Tenant]
	if !ok || r.AddressKey == "" {
		return false
	}
	for _, a := range r.Attachments {
		if _, elsewhere := h.remote[a.Address]; elsewhere && !n.moving[a.Address] {
			return true
		}
	}
	return false
}
