package ila

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

// prepareKeyed is Prepare for a record with an address key.
func (n *Network) prepareKeyed(
	ctx context.Context,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	return n.moves.Prepare(ctx, r, app, func(a netip.Addr) (endpoint.Attachment, error) {
		is := n.attachment(a)
		r.Attachments = []endpoint.Attachment{is}
		return is, n.Validate(r)
	})
}

// moveHere has the cluster move the address of an endpoint here, if it is elsewhere.
func (n *Network) moveHere(ctx context.Context, r endpoint.Record, a endpoint.Attachment) error {
	former, err := n.moves.Here(ctx, r, appOf(r), a)
	if err != nil || !former.IsValid() {
		return err
	}
	local := localOf(r)
	if local.Former, err = n.config.ILA.Locator(former); err != nil {
		return fmt.Errorf("the former node of %v: %w", a.Address, err)
	}
	return n.setLocal(r, a.Address, local)
}

// formerHere returns this node's locator if a new mapping is of a container that is here or was until just now. The
// caller holds the lock.
func (n *Network) formerHere(h *hosted, a netip.Addr) netip.Prefix {
	if _, here := h.here[a]; here || n.moves.HasLeft(h.name, a) {
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
		if _, elsewhere := h.remote[a.Address]; elsewhere && !n.moves.Moving(r.Tenant, a.Address) {
			return true
		}
	}
	return false
}
