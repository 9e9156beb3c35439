package dpapi

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// EgressPath is a driver whose containers can reach hosts outside of the cluster, by themselves or by egress gateways.
// A gateway is known by the /64 of its node.
type EgressPath interface {
	// SetOwnAddresses replaces the list of this node's addresses, which containers never reach by egress rules.
	SetOwnAddresses(addrs []netip.Addr) error
	// ProbeGateway sends a probe to the program of a gateway.
	ProbeGateway(node netip.Prefix) error
	// GatewayAnswered returns how long ago a gateway has last answered a probe; false if it never has.
	GatewayAnswered(node netip.Prefix) (ago time.Duration, ok bool, err error)
	// SetGatewayAlive says whether new connections may use a gateway. Until it is called, they may.
	SetGatewayAlive(node netip.Prefix, alive bool) error
}

// Access reads what containers reach besides each other.
type Access interface {
	// LookupAccess returns the entry of a tenant id with the longest prefix that contains an address: of a host outside
	// of the cluster, or of a node. Entries of id 0 are protected from all tenants. The second result is false if there
	// is none.
	LookupAccess(id address.TenantID, to netip.Addr) (AccessEntry, bool, error)
}

// AccessEntry is what the kernel's own table says of a prefix.
type AccessEntry struct {
	To       netip.Prefix
	Action   AccessAction
	Gateways []GatewayEntry // of AccessGateway
}

// GatewayEntry is an egress gateway of a rule.
type GatewayEntry struct {
	Node   netip.Prefix // its /64
	Silent bool         // it does not answer, so new connections avoid it
}

// AccessAction is an action of the packet path.
type AccessAction uint32

// Actions, with the values of enum access_action.
const (
	AccessDeny    AccessAction = iota + 1
	AccessOutside              // leave at this node, with the container's egress address
	AccessGateway              // leave at a gateway
	AccessNode                 // a node
)
