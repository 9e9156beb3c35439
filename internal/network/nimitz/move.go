package nimitz

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// A container with an address key keeps its address on another node (package mobility). When it has left this node, the
// mapping leads to the new one, and this node forwards what other nodes still send here.

// prepareKeyed is Prepare for a record with an address key.
func (n *Network) prepareKeyed(ctx context.Context, t tenant.Tenant, r endpoint.Record) ([]endpoint.Attachment, error) {
	if !n.config.Relays {
		return nil, fmt.Errorf("address key %q: the switch of this node, %s, cannot forward to a container that has "+
			"moved away; nothing was changed: use a node with network %s on eBPF", r.AddressKey, n.config.Kind, Name)
	}
	if err := t.CheckKeyable(); err != nil {
		return nil, err
	}
	return n.moves.Prepare(ctx, r, 0, func(a netip.Addr) (endpoint.Attachment, error) {
		if o := t.Overlays[0].CIDR; !o.Contains(a) {
			return endpoint.Attachment{}, fmt.Errorf("it is not in %v", o)
		}
		return n.attachment(a, netip.Prefix{}), nil
	})
}

// moveHere has the cluster move the addresses of an endpoint here, if they are elsewhere.
func (n *Network) moveHere(ctx context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		if _, err := n.moves.Here(ctx, r, 0, a); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
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
		if _, elsewhere := h.remote[host(a.Address)]; elsewhere && !n.moves.Moving(r.Tenant, a.Address) {
			return true
		}
	}
	return false
}

// noteLeft begins to forward to an endpoint that has left this node. The caller holds the lock, as for the functions
// below.
func (n *Network) noteLeft(h *hosted, r endpoint.Record) {
	for _, a := range r.Attachments {
		n.moves.Leave(r, a.Address)
		if n.config.Relays && r.AddressKey != "" {
			h.relays[host(a.Address)] = time.Now().Add(mobility.FormerTime)
		}
	}
}

// relaysTo reports whether packets from other nodes are forwarded to a prefix.
func (h *hosted) relaysTo(to netip.Prefix, p Place) bool {
	_, left := h.relays[to]
	return left || p.Keyed && h.fronts()
}

// onlyRelays returns what is left of a tenant without containers here: the entries by which this node forwards to
// containers that have moved. The mapping of the last one may arrive later.
func (h *hosted) onlyRelays() *hosted {
	left := newHosted()
	left.name, left.vni, left.segment, left.overlays, left.former = h.name, h.vni, h.segment, h.overlays, true
	left.installed, left.relays = h.installed, h.relays
	for to := range h.relays {
		if p, elsewhere := h.remote[to]; elsewhere {
			left.remote[to] = p
		}
	}
	return left
}

// keepRelays keeps what is left of a tenant until forwarding ends.
func (n *Network) keepRelays(left *hosted) {
	if len(left.relays) > 0 {
		n.leaving[left.vni] = left
	}
}

// adoptLeft is keepRelays for entries that an earlier agent has left. The tenant's name is unknown, so later mappings
// change nothing.
func (n *Network) adoptLeft(vni pipeline.VNI) *hosted {
	left := newHosted()
	left.vni, left.segment, left.former = vni, n.config.Underlay.Segment(vni), true
	n.leaving[vni] = left
	return left
}

// receiver returns the tenant that receives mappings, nil if there is none.
func (n *Network) receiver(name string) *hosted {
	if h, ok := n.tenants[name]; ok {
		return h
	}
	for _, h := range n.leaving {
		if h.name == name {
			return h
		}
	}
	return nil
}

// concerning returns those mappings that the tenant needs here.
func (h *hosted) concerning(all []network.Mapping) []network.Mapping {
	if !h.former {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(m network.Mapping) bool {
		_, left := h.relays[m.To]
		return !left
	})
}

// known yields the tenants with entries in the switch.
func (n *Network) known() iter.Seq[*hosted] {
	return func(yield func(*hosted) bool) {
		for _, all := range []iter.Seq[*hosted]{maps.Values(n.tenants), maps.Values(n.leaving)} {
			for h := range all {
				if !yield(h) {
					return
				}
			}
		}
	}
}

// expireRelays ends forwarding to containers that have moved, until ctx ends.
func (n *Network) expireRelays(ctx context.Context, log *slog.Logger) {
	ticks := time.NewTicker(mobility.FormerTime / 2)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticks.C:
			if err := n.endRelays(ctx, now); err != nil {
				log.Error("ending to forward to containers that have moved failed; retrying", "error", err)
			}
		}
	}
}

// endRelays ends forwarding whose time is over.
func (n *Network) endRelays(ctx context.Context, now time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for h := range n.known() {
		over := map[netip.Prefix]time.Time{}
		var matches []any
		for to, until := range h.relays {
			if now.After(until) {
				over[to] = until
				matches = append(matches, pipeline.Forward{VNI: h.vni, To: to}.Match())
				delete(h.relays, to)
				if h.former {
					delete(h.remote, to)
				}
			}
		}
		if err := n.change(ctx, h, matches); err != nil {
			for to, until := range over {
				h.relays[to] = until
			}
			return err
		}
	}
	maps.DeleteFunc(n.leaving, func(_ pipeline.VNI, h *hosted) bool { return len(h.relays) == 0 })
	return nil
}
