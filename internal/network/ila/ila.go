// Package ila is the network of identifier-locator addresses (draft-herbert-intarea-ila-01; claims IL1 to IL3). A
// container's address says nothing about its location. The cluster allocates it, and its mapping has the container's
// node and app. Nodes keep the mappings of the tenants that they host. On the fabric, which routes a locator to each
// node, the locators of both ends replace the first halves of the addresses; there is no tunnel. bpf/net/ila forwards,
// and package tables writes its maps.
package ila

import (
	"context"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network/mobility"
)

// Name is the network's name in attachments.
const Name = "ila"

// DefaultMaxMappings is the default limit of mappings on a node.
const DefaultMaxMappings = 65536

// Local is a container of this node.
type Local struct {
	Device   uint32 // index of its device on the node
	Endpoint uint32
	App      address.AppID
	// Former is where the container was until it moved here; that node forwards packets for some time. Zero: nowhere.
	Former netip.Prefix
}

// Peer is a container on another node.
type Peer struct {
	Locator netip.Prefix
	App     address.AppID
	// Former is where the container was until it moved; packets from there are accepted for some time. Zero: nowhere.
	Former netip.Prefix
}

// FormerTime is how long packets from a former locator are accepted, and how long the former node forwards.
const FormerTime = mobility.FormerTime

// Tables are the tables of this node's programs. Keys are addresses as containers see them. Every change is in force
// when the call returns.
type Tables interface {
	Locals() (map[netip.Addr]Local, error)
	Peers() (map[netip.Addr]Peer, error)
	// SetLocal writes an entry, nil removes it. FormerTime begins now.
	SetLocal(a netip.Addr, to *Local) error
	// SetPeers writes entries and removes others. FormerTime begins now.
	SetPeers(put map[netip.Addr]Peer, remove []netip.Addr) error
	// Capacity returns how many entries fit.
	Capacity() (locals, peers int)
}

// Miss is a cache miss of a mapping.
type Miss struct {
	Address netip.Addr
	Sender  bool // the address is the source of a packet from the fabric, where a host may have forged it
}

// PullTables are tables of a node that subscribes to mappings.
type PullTables interface {
	Tables
	// Misses calls deliver with addresses of containers to or from which a packet was dropped because the tables have
	// no mapping, until ctx ends.
	Misses(ctx context.Context, deliver func(Miss)) error
	// Idle returns how long ago a packet last used each mapping. Packets since the last call count, if there was one.
	Idle() (map[netip.Addr]time.Duration, error)
}
