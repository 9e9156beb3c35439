package ila

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// hosted is a tenant that this node hosts: its containers here, and its mappings to other nodes.
type hosted struct {
	name   string
	vnid   address.TenantID
	all    netip.Prefix // its addresses
	here   map[netip.Addr]Local
	remote map[netip.Addr]Peer
	synced bool                         // the cluster has sent all mappings
	apps   map[netip.Addr]address.AppID // of containers here, as the cluster has them in its mappings
	until  time.Time                    // this node forwards for a container that has moved before
}

func newHosted(t tenant.Tenant) *hosted {
	return &hosted{
		name: t.Name, vnid: t.IDs[0].ID, all: t.Overlays[0].CIDR, here: map[netip.Addr]Local{},
		remote: map[netip.Addr]Peer{}, apps: map[netip.Addr]address.AppID{},
	}
}

// localOf returns the entry of an endpoint.
func localOf(r endpoint.Record) Local {
	return Local{Device: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID), App: appOf(r)}
}

func appOf(r endpoint.Record) address.AppID { return cmp.Or(r.AppNow, r.App) }

// peerOf reads a mapping. It returns false for one to this node, whose containers have entries of their own.
func (n *Network) peerOf(h *hosted, m network.Mapping) (Peer, bool, error) {
	id, ok := n.config.ILA.Split(m.To.Addr())
	if !ok || !m.To.IsSingleIP() || id.VNID != h.vnid || id.Locator.IsValid() || len(m.NextHops) > 0 {
		return Peer{}, false, fmt.Errorf("a mapping of %v cannot be used; nothing was changed", m.To)
	}
	if !n.config.ILA.IsNode(m.Node) {
		return Peer{}, false, fmt.Errorf("a mapping of %v to %v, which is no node; nothing was changed", m.To, m.Node)
	}
	locator, err := n.config.ILA.Locator(m.Node)
	if err != nil {
		return Peer{}, false, fmt.Errorf("a mapping of %v: %w; nothing was changed", m.To, err)
	}
	return Peer{Locator: locator, App: m.App}, locator != n.config.Locator, nil
}

// move notes in a new mapping where the container was before.
func move(was, is Peer) Peer {
	if was.Locator.IsValid() && was.Locator != is.Locator {
		is.Former = was.Locator
	}
	return is
}
