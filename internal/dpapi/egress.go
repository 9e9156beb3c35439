package dpapi

import (
	"net/netip"
	"time"
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
