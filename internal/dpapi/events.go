package dpapi

import (
	"context"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
)

// Events delivers what the packet path reports.
type Events interface {
	// Events delivers events until ctx ends, then closes the channel.
	Events(ctx context.Context) (<-chan Event, error)
}

// Event is a drop as the packet path saw it.
type Event struct {
	Time   time.Time
	Type   string // "drop"
	Reason string
	// Hook is one of "container", "uplink-in", "uplink-out", "edge-in", "edge-out", "node", "tunnel", "gateway" and
	// "switch".
	Hook                string
	Count               uint64     // packets this event stands for
	Source, Destination netip.Addr // invalid where the packet was of neither IPv6 nor IPv4
	Protocol            uint8
	SourcePort          uint16
	DestinationPort     uint16
	Length              int // bytes
	Endpoint            endpoint.ID
	Ifindex             int
	Lost                uint64 // events that did not fit into the ring buffer since the last one
	Rule                uint32 // the policy rule that decided; 0: none did
}
