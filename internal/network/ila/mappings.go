package ila

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// Replace sets all mappings of a tenant. It ignores a tenant that is not hosted here, and a list that this node did not
// ask for.
func (n *Network) Replace(_ context.Context, name string, all []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[name]
	if !ok || n.config.Pull {
		return nil
	}
	change, err := n.differ(h).Replace(h.remote, all)
	if err != nil {
		return err
	}
	if err := n.setPeers(h, change.Put, change.Gone); err != nil {
		return err
	}
	h.synced = true
	return nil
}

// Apply changes mappings.
func (n *Network) Apply(_ context.Context, name string, add, remove []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[name]
	if !ok {
		return nil
	}
	if n.config.Pull {
		return n.applyPulled(h, add, remove)
	}
	if !h.synced {
		return network.BeforeList(name)
	}
	return n.apply(h, add, remove)
}

func (n *Network) apply(h *hosted, add, remove []network.Mapping) error {
	change, err := n.differ(h).Apply(add, remove)
	if err != nil {
		return err
	}
	return n.setPeers(h, change.Put, change.Gone)
}

// differ reads mappings.
func (n *Network) differ(h *hosted) network.Differ[netip.Addr, Peer] {
	return network.Differ[netip.Addr, Peer]{
		Key: func(m network.Mapping) netip.Addr {
			if !m.To.IsSingleIP() {
				return netip.Addr{} // no container's
			}
			return m.To.Addr()
		},
		Place: func(m network.Mapping) (Peer, bool, error) {
			p, elsewhere, err := n.peerOf(h, m)
			if err != nil {
				err = fmt.Errorf("tenant %s: %w", h.name, err)
			}
			return p, elsewhere, err
		},
	}
}

// setPeers changes the mappings of a tenant. Without room for all new ones, it adds those that fit and returns an
// error. The caller holds the lock.
func (n *Network) setPeers(h *hosted, peers map[netip.Addr]Peer, gone []netip.Addr) error {
	put, more := map[netip.Addr]Peer{}, 0
	for a, is := range peers {
		was, known := h.remote[a]
		if is = move(was, is); !known {
			is.Former = n.formerHere(h, a)
			more++
		} else if is == (Peer{Locator: was.Locator, App: was.App}) {
			continue
		}
		put[a] = is
	}
	gone = slices.DeleteFunc(gone, func(a netip.Addr) bool { _, known := h.remote[a]; return !known })
	more -= len(gone)
	var full error
	if over := n.peers + more - n.config.MaxMappings; more > 0 && over > 0 {
		// Changes of known mappings must not wait: policies follow the apps in them.
		added := slices.DeleteFunc(slices.SortedFunc(maps.Keys(put), netip.Addr.Compare), func(a netip.Addr) bool {
			_, known := h.remote[a]
			return known
		})
		for _, a := range added[len(added)-over:] {
			delete(put, a)
		}
		more -= over
		full = fmt.Errorf("%w: this node has no room for %d more mappings of tenant %s: %d of %d are in use\n  "+
			"it cannot reach their containers; use another node, or raise --ila-max-mappings",
			endpoint.ErrExhausted, over, h.name, n.peers+more, n.config.MaxMappings)
	}
	if n.repaired && len(put)+len(gone) > 0 {
		if err := n.config.Tables.SetPeers(put, gone); err != nil {
			return fmt.Errorf("tenant %s: %w", h.name, err)
		}
	}
	maps.Copy(h.remote, put)
	for _, a := range gone {
		delete(h.remote, a)
	}
	n.peers += more
	return full
}

func (n *Network) repairPeers() error {
	there, err := n.config.Tables.Peers()
	if err != nil {
		return err
	}
	put, gone := map[netip.Addr]Peer{}, []netip.Addr{}
	for a, p := range there {
		id, _ := n.config.ILA.Split(a)
		h := n.byVNID[id.VNID]
		switch {
		case h == nil:
			gone = append(gone, a)
		case !h.synced:
			h.remote[a] = Peer{Locator: p.Locator, App: p.App}
		default:
			if _, wanted := h.remote[a]; !wanted {
				gone = append(gone, a)
			}
		}
	}
	n.peers = 0
	for _, h := range n.tenants {
		n.peers += len(h.remote)
		for a, p := range h.remote {
			if is, known := there[a]; !known || is.Locator != p.Locator || is.App != p.App {
				put[a] = p
			}
		}
	}
	return n.config.Tables.SetPeers(put, gone)
}

// AppOf returns the app of a container of a tenant on another node; false if this node has no mapping of it.
func (n *Network) AppOf(name string, a netip.Addr) (address.AppID, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if h, ok := n.tenants[name]; ok {
		p, known := h.remote[a]
		return p.App, known
	}
	return 0, false
}
