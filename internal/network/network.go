// Package network is what the agent asks of a network: one way to give containers addresses and to carry their packets.
// Several run side by side on a node, each in its own folder below; a tenant chooses one, and an endpoint may have
// attachments of more.
package network

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// ErrConflict means that a tenant cannot be beside what the node has already. Others are as well as before.
var ErrConflict = errors.New("this node cannot take it")

// Factory is how a node has a network.
type Factory struct {
	Name string
	// Open takes hold of it, after the driver; nil means that this node does without.
	Open func(Node) (Network, error)
	With string // what the agent is to be started with to have it
}

// Node is what a network is given of the node that it is on.
type Node struct {
	Plan    address.Plan
	Prefix  netip.Prefix // its /64
	Indexes Indexes
	Cluster Cluster
}

// Indexes keeps what was drawn; *endpoint.Store does it on disk.
type Indexes interface {
	AllocateIndex(key endpoint.CursorKey, find func(from address.Index) (address.Index, error)) (address.Index, error)
	ReleaseIndex(key endpoint.CursorKey, i address.Index) error
}

// Network is one of them on one node. It is given records with attachments of its own only. Calls about one endpoint
// come one after the other, and every call but Prepare may be repeated: the second one finds nothing to do. What more
// the agent asks of some is in Mapped, Dropping, GatewayProvider and Working; one that holds something open is an
// io.Closer, and closing it leaves in place what carries packets.
type Network interface {
	Addresses
	Dataplane
}

// Addresses are what a network gives to endpoints.
type Addresses interface {
	// Prepare takes addresses for an endpoint that has everything but attachments and a device. An error that wraps
	// endpoint.ErrExhausted means that there are no more.
	Prepare(ctx context.Context, t tenant.Tenant, app address.AppID, r endpoint.Record) ([]endpoint.Attachment, error)
	// Release gives an endpoint's addresses back.
	Release(ctx context.Context, r endpoint.Record) error
	// Validate refuses a record from the disk whose attachments the network cannot have made.
	Validate(r endpoint.Record) error
}

// Dataplane is a network's part of the packet path: its tables. The devices and hooks are the driver's.
type Dataplane interface {
	// PutTenant makes a tenant of this node known, or what has changed of it. ErrConflict and endpoint.ErrExhausted
	// mean that it was left as it was.
	PutTenant(ctx context.Context, t tenant.Tenant) error
	// DeleteTenant forgets a tenant that has no endpoint here any more, or those of its ids that are given.
	DeleteTenant(ctx context.Context, t tenant.Tenant) error

	// Activate lets packets flow from and to an endpoint, whose device is there.
	Activate(ctx context.Context, r endpoint.Record) error
	// Deactivate ends that. The device may be gone.
	Deactivate(ctx context.Context, r endpoint.Record) error
	// Check names the first difference between a record and what is there.
	Check(ctx context.Context, r endpoint.Record) error
	// Repair makes the tables hold the endpoints found and nothing else, with the tenants of all that are recorded or
	// were put, and loses no packet. It comes once, at the start, after all tenants were put; what is put before need
	// not take effect until then.
	Repair(ctx context.Context, recorded, found []endpoint.Record) error
	// Entries says how full the tables are, read from where packets meet them.
	Entries(ctx context.Context) ([]Entries, error)
}

// Runner is a network that has something to do beside calls.
type Runner interface {
	// Run does it until ctx ends. It begins after Repair.
	Run(ctx context.Context, log *slog.Logger)
}

// DropCounter is a network with a switch outside the driver's packet path.
type DropCounter interface {
	// Drops counts the packets that the switch dropped since it was started.
	Drops(ctx context.Context) (map[dropreason.Reason]uint64, error)
}

// SwitchInfo is a network that one switch or another carries.
type SwitchInfo interface {
	// Switch is what this node has: "ebpf".
	Switch() string
	// Lacks says what containers here do without, a line each.
	Lacks() []string
}

// PolicyError is a network that may be unable to enforce policies on this node.
type PolicyGuard interface {
	// PolicyError says why, nil where they are enforced.
	PolicyError() error
	// Seal has none of a tenant's containers here send or receive, or lets them again. It may come before the tenant is
	// known, and before Repair.
	Seal(ctx context.Context, tenant string, sealed bool) error
}

// GatewayProvider is a network with a gateway: the way between its containers and hosts that have no part in it.
type GatewayProvider interface {
	// Gateway is how this node's is.
	Gateway() Gateway
	// FollowMTU fits it, and what else the network has of devices, to what may leave by the uplink now, in bytes.
	FollowMTU(mtu int) error
}

// Gateway is what people see of one.
type Gateway struct {
	// its addresses: services see the one, published containers the other; zero where there is no gateway
	Own, Virtual           netip.Addr
	Services, Publications int    // that it leads to: of the tenants here, and those published at it
	Missing                string // why there is none
}

// StateDevice is the kind of a container's device: its container lives.
const StateDevice = "device"

// StaleState is one thing that an agent has left on a node where it does not run.
type StaleState struct {
	Kind   string // "device", "route", "file", …
	Name   string
	Remove func() error
}

// Entries is how full one table is. Cache tables hold nothing that cannot be computed again.
type Entries struct {
	Table          string
	Used, Capacity int
	Cache          bool
}
