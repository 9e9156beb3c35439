package network

import (
	"context"
	"net"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Mapping says where packets to a subnet or an address of a tenant go. Where it has more than the node, each network
// uses the fields that it needs.
type Mapping struct {
	Tenant   string
	To       netip.Prefix
	Node     netip.Prefix     // the /64 of the node it is on; zero: no node of the cluster
	NextHops []netip.Addr     // tunnel addresses; any leads there, all to tenant.Broadcast; empty: the node's own
	Locator  netip.Prefix     // the /64 that replaces the first half of the destination
	MAC      net.HardwareAddr // of the container or router there; nil: unknown
	App      address.AppID    // of the container; 0: unknown
	Sequence uint64           // increases each time that the address moves
	Origin   string           // who announced it; empty: this cluster
}

// MappingSink is a network whose nodes store where each subnet or address of a tenant is. The agent sends it updates of
// hosted tenants only, one at a time per tenant. After an error the agent sends the whole list again.
type MappingSink interface {
	// Replace sets the whole list, this node's own subnets included. Before the first call, the network does not know
	// the list, and the packet path keeps its mappings.
	Replace(ctx context.Context, tenant string, all []Mapping) error
	// Apply adds and removes mappings. Removed mappings have only tenant and prefix.
	Apply(ctx context.Context, tenant string, add, remove []Mapping) error
}

// MappingStatus is a MappingSink that reports whether it has the whole list of a tenant.
type MappingStatus interface{ HasMappings(tenant string) bool }

// Cluster allocates addresses from a tenant's own CIDRs.
type Cluster interface {
	// NodeCIDRs returns this node's subnets of a tenant's overlays, in their order. The first call sends a request to
	// the orchestrator, later ones do not.
	NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error)
	// Allocate returns an address of each overlay for an endpoint of a tenant without node CIDRs. The key is "container
	// id/interface"; the same key gets the same addresses again. app is what mappings of the addresses have; 0 on
	// networks without the capability Identifiers.
	Allocate(ctx context.Context, tenant, key string, app address.AppID) ([]netip.Addr, error)
	// Free releases the addresses of a key.
	Free(ctx context.Context, tenant, key string) error
}

// KeyedCluster allocates addresses that belong to an address key (capability AddressKeys): the endpoint that has the
// key last has the address.
type KeyedCluster interface {
	// AllocateKeyed returns the address of an address key for an endpoint, and allocates it if no endpoint has it. A
	// sequence above that of the address moves it from the other node's endpoint to this one.
	AllocateKeyed(ctx context.Context, tenant string, of KeyedEndpoint) (KeyedAddress, error)
}

// KeyedEndpoint is an endpoint with an address key.
type KeyedEndpoint struct {
	Key        string // "container id/interface"
	AddressKey string
	App        address.AppID
	Sequence   uint64 // 0: do not move the address
}

// KeyedAddress is the address of an address key.
type KeyedAddress struct {
	Address   netip.Addr
	Sequence  uint64       // of the address; if it is elsewhere, the one with which it can move here
	Elsewhere bool         // an endpoint of another node has it
	Former    netip.Prefix // the /64 of the node from which the call has moved it; zero: none
}
