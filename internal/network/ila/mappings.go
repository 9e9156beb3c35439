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

// Replace sets all mappings of a tenant. It ignores a tenant that is not hosted here.
func (n *Network) Replace(_ context.Context, name string, all []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[name]
	if !ok {
		return nil
	}
	peers, err := n.peersOf(h, all)
	if err != nil {
		return err
	}
	var gone []netip.Addr
	for a := range h.remote {
		if _, stays := peers[a]; !stays {
			gone = append(gone, a)
		}
	}
	if err := n.setPeers(h, peers, gone); err != nil {
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
	if !h.synced {
		return fmt.Errorf("tenant %s: an update of mappings before their first list; nothing was changed", name)
	}
	peers, err := n.peersOf(h, add)
	if err != nil {
		return err
	}
	var gone []netip.Addr
	for _, m := range slices.Concat(remove, add) {
		if _, elsewhere := peers[m.To.Addr()]; !elsewhere && m.To.IsSingleIP() {
			gone = append(gone, m.To.Addr())
		}
	}
	return n.setPeers(h, peers, gone)
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
	byVNID := map[address.TenantID]*hosted{}
	for _, h := range n.tenants {
		byVNID[h.vnid] = h
	}
	put, gone := map[netip.Addr]Peer{}, []netip.Addr{}
	for a, p := range there {
		id, _ := n.config.ILA.Split(a)
		h := byVNID[id.VNID]
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
