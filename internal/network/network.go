// Package network is the interface between the agent and a network, which allocates containers' addresses and delivers
// their packets. Several networks run side by side on a node, each in its own folder below; a tenant chooses one, and
// an endpoint may have attachments of several.
package network

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// ErrConflict means that a tenant conflicts with the node's existing state. Other tenants are not affected.
var ErrConflict = errors.New("this node cannot accept it")

// Factory opens a network on a node.
type Factory struct {
	Name string
	// Open is called after the driver was opened; nil means that this node does not have the network.
	Open func(Node) (Network, error)
	With string // the flag that turns the network on
}

// Node describes the node to a network.
type Node struct {
	Plan    address.Plan
	Prefix  netip.Prefix // its /64
	Indexes Indexes
	Egress  *egress.Addresses // at which hosts outside see containers; nil in simulations
	Cluster Cluster
}

// Indexes allocates indexes and stores the ones in use; *endpoint.Store does so on disk.
type Indexes interface {
	AllocateIndex(key endpoint.CursorKey, find func(from address.Index) (address.Index, error)) (address.Index, error)
	ReleaseIndex(key endpoint.CursorKey, i address.Index) error
}

// Network is one network on one node. It receives records with its own attachments only. Calls for one endpoint are
// sequential, and every call except Prepare is idempotent. Optional interfaces are MappingSink, MappingStatus,
// MappingPuller,
// DropCounter, SwitchInfo, PolicyGuard, GatewayProvider, LocatorProvider, AppProvider, MoveReporter, FormProvider,
// Located and Runner. A network that holds resources is an io.Closer; Close keeps everything that packets need.
type Network interface {
	Addresses
	Dataplane
}

// Addresses allocates and releases the addresses of endpoints.
type Addresses interface {
	// Prepare allocates addresses for an endpoint that has everything but attachments and a device. An error that wraps
	// endpoint.ErrExhausted means that there are none left.
	Prepare(ctx context.Context, t tenant.Tenant, app address.AppID, r endpoint.Record) ([]endpoint.Attachment, error)
	// Release releases an endpoint's addresses.
	Release(ctx context.Context, r endpoint.Record) error
	// Validate refuses a record from disk whose attachments this network cannot have made.
	Validate(r endpoint.Record) error
}

// Dataplane is a network's part of the packet path: its tables. The driver owns devices and hooks.
type Dataplane interface {
	// PutTenant adds a tenant to this node, or updates it. On ErrConflict and endpoint.ErrExhausted the tenant stays as
	// it was.
	PutTenant(ctx context.Context, t tenant.Tenant) error
	// DeleteTenant removes the ids in t from this node: all ids of a tenant without endpoints here, or only some.
	DeleteTenant(ctx context.Context, t tenant.Tenant) error

	// Activate lets packets flow from and to an endpoint, whose device exists. Of one that is active it changes the
	// entries to those of the record, and removes that of an egress address that it had: no packet of others is lost.
	Activate(ctx context.Context, r endpoint.Record) error
	// Deactivate is the inverse of Activate. The device may be gone.
	Deactivate(ctx context.Context, r endpoint.Record) error
	// Check names the first difference between a record and the tables.
	Check(ctx context.Context, r endpoint.Record) error
	// Repair makes the tables hold exactly the endpoints in found, and the tenants that were put or that have an
	// endpoint in recorded. No packet is lost. The agent calls Repair once, at its start, after it has put all tenants;
	// earlier calls of other methods need not take effect before Repair.
	Repair(ctx context.Context, recorded, found []endpoint.Record) error
	// Entries returns how full the tables are, read from the kernel or the switch.
	Entries(ctx context.Context) ([]Entries, error)
}

// Runner is a network with background work.
type Runner interface {
	// Run works until ctx ends. The agent calls it after Repair.
	Run(ctx context.Context, log *slog.Logger)
}

// DropCounter is a network with a switch outside the driver's packet path.
type DropCounter interface {
	// Drops counts the packets that the switch dropped since it was started.
	Drops(ctx context.Context) (map[dropreason.Reason]uint64, error)
}

// SwitchInfo is a network with a choice of switches.
type SwitchInfo interface {
	// Switch names this node's switch: "ebpf", "ovs".
	Switch() string
	// Lacks lists the features that containers here lack with this switch, one per line.
	Lacks() []string
}

// PolicyGuard is a network that may be unable to enforce policies on this node.
type PolicyGuard interface {
	// PolicyError returns the reason why this node cannot enforce policies; nil if it can.
	PolicyError() error
	// Seal blocks all packets from and to a tenant's containers here, or unblocks them. It may be called before the
	// tenant is put, and before Repair.
	Seal(ctx context.Context, tenant string, sealed bool) error
}

// LocatorProvider is a network whose containers have addresses of another prefix on the fabric, which the fabric must
// route to this node.
type LocatorProvider interface {
	Locator() netip.Prefix // a /64
	// OnFabric returns the address that the fabric sees of a container of this node.
	OnFabric(endpoint.Attachment) netip.Addr
}

// FormProvider is a network with a choice of how addresses are written in packets on the fabric. Nodes with different
// forms do not reach each other.
type FormProvider interface {
	Form() string // as flags of the agent
}

// Located is a network of which a trace reads where containers are.
type Located interface {
	// Locate returns what the tables in the kernel say about a container's address; false if they have nothing.
	Locate(netip.Addr) (Location, bool, error)
	// OnWire returns the addresses on the fabric of a packet between two locators.
	OnWire(src, dst netip.Addr, from, to netip.Prefix) (wireSrc, wireDst netip.Addr)
}

// Location is where a container is.
type Location struct {
	Device, Endpoint uint32 // on this node; 0: on another one
	Locator, Node    netip.Prefix
	Entry            string // the table and its entry, as text
}

// AppProvider is a network that knows the apps of containers on other nodes.
type AppProvider interface {
	// AppOf returns the app of a tenant's container on another node; false if there is none.
	AppOf(tenant string, a netip.Addr) (address.AppID, bool)
}

// MoveReporter is a network whose addresses move between nodes.
type MoveReporter interface {
	// Moved reports whether the address of an endpoint of this node belongs to a container of another node by now.
	Moved(r endpoint.Record) bool
}

// GatewayProvider is a network with a gateway between its containers and hosts outside of the network.
type GatewayProvider interface {
	MTUFollower
	// Gateway describes this node's gateway.
	Gateway() Gateway
}

// MTUFollower is a network with devices whose MTU depends on the uplink's.
type MTUFollower interface {
	// FollowMTU sets the MTUs of the network's devices after the uplink's MTU, in bytes, changed.
	FollowMTU(mtu int) error
}

// Gateway is the status of a gateway.
type Gateway struct {
	// the source that underlay services see, and the source that published containers see; zero without a gateway
	Own, Virtual                   netip.Addr
	UnderlayServices, Publications int    // underlay services of the tenants here, and publications at this gateway
	Missing                        string // reason why there is no gateway
}

// StateDevice is the Kind of the device of a container that still runs.
const StateDevice = "device"

// StaleState is an object that an agent left on a node without a running agent.
type StaleState struct {
	Kind   string // "device", "route", "file", …
	Name   string
	Remove func() error
}

// Entries is the size and use of one table. A cache table contains only data that can be recomputed.
type Entries struct {
	Table          string
	Used, Capacity int
	Cache          bool
}
