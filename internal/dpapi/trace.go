package dpapi

import (
	"context"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

// Tracing shows what the packet path does with a packet.
type Tracing interface {
	Lookup
	// Follow reports what the programs do with selected packets until ctx ends, then closes the channel. It returns
	// once no later packet is missed. Without a trace it costs packets nothing.
	Follow(ctx context.Context, f PacketFilter) (<-chan PacketEvent, error)
}

// Lookup reads single entries of the tables in the kernel, and asks the FIB. The second result of a lookup is false if
// there is no entry.
type Lookup interface {
	TableNames() TableNames
	LookupSource(address netip.Addr) (SourceEntry, bool, error)
	LookupLocal(plaintext netip.Addr) (LocalEntry, bool, error)
	LookupTenantID(id address.TenantID) (TenantEntry, bool, error)
	// LookupEgress returns the address at which hosts outside see an endpoint.
	LookupEgress(id endpoint.ID) (netip.Addr, bool, error)
	// LookupGateway returns the address of this node as an egress gateway of a tenant id.
	LookupGateway(id address.TenantID) (netip.Addr, bool, error)
	// NextHop returns the route of a packet that leaves the node; from is invalid for one of the node's own stack. An
	// error says that there is none.
	NextHop(from, to netip.Addr) (NextHop, error)
	// DeviceName returns the name of a device by its number in the tables.
	DeviceName(number uint32) string
	// EndpointOf returns the endpoint with a device; 0 if no endpoint has it.
	EndpointOf(number uint32) endpoint.ID
}

// TableNames are the names of the tables that Lookup reads, as other tools show them.
type TableNames struct {
	Sources, Locals, Tenants, Keys, Access, Egress, Gateways, Services, Backends string
	Exposed, Maglev, Connections, Targets                                        string // of exposed ports
}

// SourceEntry is an address that a container may send from.
type SourceEntry struct {
	Plaintext netip.Addr
	Device    uint32 // number
	Endpoint  endpoint.ID
	TenantID  address.TenantID
}

// LocalEntry is a container of this node as a destination.
type LocalEntry struct {
	Address  netip.Addr // as the container sees it
	Device   uint32     // number
	Endpoint endpoint.ID
}

// TenantEntry is a tenant with containers here, by one of its ids.
type TenantEntry struct {
	IDs     []address.TenantID
	Clear   bool
	Gateway netip.Addr // this node among the tenant's containers
	HasKey  bool       // the kernel has the key of the id
}

// NextHop is the FIB's answer.
type NextHop struct {
	Device string
	Via    netip.Addr // invalid if the destination is on the link
	Source netip.Addr // that the kernel chooses for a packet of the node
}

// PacketFilter selects packets to follow: those whose source and destination are among these addresses. It names the
// addresses that a packet has at all stages, at most MaxTraced of each.
type PacketFilter struct {
	Sources, Destinations []netip.Addr
	Protocol              uint8
	Port                  uint16 // of the destination; 0 means any
	VNI                   uint32 // on network nimitz: of packets that arrive by the tunnel; 0 means any
	// containers of this node with these addresses: packets are followed from the devices of the senders on, and to
	// those of the receivers
	Senders, Receivers []endpoint.Record
}

// MaxTraced is the most addresses of a kind in a PacketFilter.
const MaxTraced = 4

// LongestTrace is the time after which Follow ends.
const LongestTrace = 10 * time.Minute

// PacketPoint is a place in a program where a packet is observed.
type PacketPoint uint8

// Places, with the values of bpf/trace.bpf.c's enum trace_point.
const (
	PacketEnters   PacketPoint = iota + 1 // a program begins
	PacketLeaves                          // it returns
	PacketDropped                         // it drops the packet
	PacketChecked                         // policy has decided
	PacketPipeline                        // network nimitz has run its stages
)

func (p PacketPoint) String() string {
	return [...]string{"none", "enter", "leave", "drop", "policy", "pipeline"}[p]
}

// PacketEvent is one observation.
type PacketEvent struct {
	Time                uint64 // ns, CLOCK_MONOTONIC
	Packet              uint64 // equal for one packet at all hooks, except behind Open vSwitch
	Point               PacketPoint
	Hook                string // as of Event
	Device              uint32 // number of the hook's device
	Source, Destination netip.Addr
	Protocol            uint8
	SourcePort          uint16
	DestinationPort     uint16
	Length              int // bytes, from the IP header on
	// "hit" or "miss": of the flow cache at PacketEnters, of the verdict cache at PacketChecked
	Cache    string
	Action   string // "redirect", "pass" or "drop", at PacketLeaves
	Target   uint32 // number of the device that a redirect leads to
	Endpoint endpoint.ID
	Egress   bool // direction of the policy, seen from Endpoint
	Reason   string
	Rule     uint32 // 0 means none
	VNI      uint32
	Lost     uint64 // events that found the ring buffer full, since the start
}
