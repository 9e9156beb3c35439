package agent

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// ErrNoNamespace means that an endpoint's container is gone, and its device with it.
var ErrNoNamespace = errors.New("its container's namespace is gone")

// NodeDevice leads from the node's own stack to its containers.
const NodeDevice = "pilaster0"

// Driver makes the kernel do what the core decided. Package datapath drives Linux; a simulation
// counts. Every call may be repeated: the second one finds nothing to do.
//
// It owns devices and hooks; what the packet path knows of endpoints and tenants is in the tables of their networks.
type Driver interface {
	// CreateDevice makes the container's device and what is on its side: address, routes, static
	// neighbour. Nothing flows yet.
	CreateDevice(ctx context.Context, r endpoint.Record) (endpoint.Device, error)
	// Attach gives a recorded device its program. Packets flow once the endpoint's networks have entries for it.
	Attach(endpoint.Record) error
	// Readdress has an active endpoint's container have the addresses, routes and neighbours of one record in the place of those of another,
	// and the node the routes to it. What both have is not touched.
	Readdress(ctx context.Context, was, is endpoint.Record) error
	// CanReaddress is what Readdress would refuse. It changes nothing.
	CanReaddress(was, is endpoint.Record) error
	// MTU is what an endpoint without overhead is to have now, in bytes; an error says why there is no good one.
	MTU() (int, error)
	// SetMTU changes that of an active endpoint's device, on both sides.
	SetMTU(r endpoint.Record, mtu int) error
	// Remove takes away the device, after the entries. The namespace may be gone already.
	Remove(ctx context.Context, r endpoint.Record) error
	// Check compares what exists with the record and names the first difference: link, address,
	// route, neighbour or program.
	Check(ctx context.Context, r endpoint.Record) error
	// Carrying is the endpoints whose devices take packets now, read from the kernel.
	Carrying() ([]endpoint.ID, error)
	// Restore makes the packet path hold these endpoints and nothing else, and takes it over from
	// whichever build left it, losing no packet. It comes after all tenants were put, and nothing else
	// is called meanwhile but fill, before the first hook is moved, with the endpoints found. What cannot be brought back is told
	// apart; an error wrapping ErrNoNamespace says that the container is gone too.
	Restore(ctx context.Context, keep []endpoint.Record, fill func(found []endpoint.Record) error) (lost map[endpoint.ID]error, err error)

	// Lost says which devices of active endpoints are gone, and why, as Restore does. It changes nothing.
	Lost([]endpoint.Record) (map[endpoint.ID]error, error)
	// Lose takes away what leads to an endpoint whose device is gone, after its entries: packets for it end for a reason,
	// and not on their way to a device that is not there.
	Lose(endpoint.Record) error

	// RestorePolicies has containers policed by these tenants' policies, those of held tenants by what an earlier process has left, or isolated where that is
	// nothing, and by nothing else; or it is refused and leaves all as it was. What flows and is allowed goes on.
	RestorePolicies(tenants, held []TenantPolicies) error
	// SetPolicies does that for one tenant, and leaves the others' as they are. What it is given is not changed afterwards.
	SetPolicies(TenantPolicies) error

	// Why asks the tables that packets are judged by.
	Why(Question) (Answer, error)
	// RuleHits is how many packets each rule has denied, or would have if its policy were not in audit; by the numbers in the tables.
	RuleHits() (map[uint32]uint64, error)
	// PolicyEntries is how full the tables are that SetPolicies fills.
	PolicyEntries() []Entries
	// Sessions is how full the table of sessions is. It takes some milliseconds for 100,000 of them.
	Sessions() (Sessions, error)

	// KeepSettings sets the devices again where somebody has overwritten what they need; it is called every
	// few seconds.
	KeepSettings() error

	// GuardEdge checks packets on every interface of the node beside the uplink, and no longer where there is
	// none. After a change it is given the interface, as it was then; nil means all of them.
	GuardEdge(changed netlink.Link) error

	// Status is what the kernel holds and counts now, read from it.
	Status() (Status, error)
	// Events delivers what the packet path reports until ctx ends, then closes the channel.
	Events(ctx context.Context) (<-chan Event, error)
}

// Status of the packet path, read from the kernel.
type Status struct {
	DeviceKind   string
	DeviceWhy    string // why that one, where the agent chose it
	Programs     string // version tag of the loaded programs
	Healthy      bool   // packets flow; if not, the first of Problems says why
	FirstInChain bool
	Guarded      []string          // interfaces beside the uplink where packets are checked
	Problems     []string          // each with what to do
	Drops        []Drops           // every reason, also those at 0
	Without      []string          // what networks lack here, a line each; the core's to say
	Switches     map[string]string // of networks that have one or another; the core's to say
}

// Entries is how full one table is.
type Entries = network.Entries

// Sessions is what the packet path remembers of the connections of containers under policies.
type Sessions struct {
	Capacity int
	Used     int // whose time is not over
	HalfOpen int // of those, such as give way when others need room: not established, or ended

	Begun, Evicted, Refused uint64 // since the table was made; evicted: half open, for another's sake; refused: for want of room

	Largest endpoint.ID // the endpoint that has most; 0: none has any
	Most    int         // that it has
}

// Drops counts the packets dropped for one reason since the maps were made.
type Drops struct {
	Reason  string
	Packets uint64
}

// Event is a drop as the packet path saw it.
type Event struct {
	Time                time.Time
	Type                string // "drop"
	Reason              string
	Hook                string     // "container", "uplink-in", "uplink-out", "edge-in", "edge-out", "node", "tunnel", "gateway", "switch"
	Count               uint64     // packets this event stands for
	Source, Destination netip.Addr // invalid where the packet was of neither IPv6 nor IPv4
	Protocol            uint8
	SourcePort          uint16
	DestinationPort     uint16
	Length              int // bytes
	Endpoint            endpoint.ID
	Ifindex             int
	Lost                uint64 // events the ring had no room for since the last one
	Rule                uint32 // of a policy that decided it; 0: none did
}
