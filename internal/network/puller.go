package network

// MappingPuller is a MappingSink that may subscribe to single mappings instead of receiving those of all its tenants.
// Then Replace is not called, and Apply also delivers the answer to each subscription: the mapping, or its end if there
// is none. After an error of Apply, it subscribes to what it could not change again.
type MappingPuller interface {
	MappingSink
	// Pulls reports whether it subscribes. It is constant.
	Pulls() bool
	// Subscriptions returns the subscriptions to begin and to end, as mappings with tenant and prefix only: the changes
	// since the last call, or with all, for a new stream, all subscriptions.
	Subscriptions(all bool) (begin, end []Mapping)
	// SubscriptionsChanged receives a value when Subscriptions has changes.
	SubscriptionsChanged() <-chan struct{}
	// PullStats returns counts since the start of the process.
	PullStats() PullStats
}

// MaxSubscriptions is the maximum of subscriptions that an orchestrator accepts from a node.
const MaxSubscriptions = 1 << 18

// PullStats describes the subscriptions of a node.
type PullStats struct {
	Subscriptions int // now
	Unknown       int // those of them without a mapping: unanswered, or the address is unknown to the cluster
	Capacity      int // maximum of subscriptions at cache misses
	// Cache misses that began a subscription; that were ignored, because there is one already; and that were refused
	// for want of room.
	Begun, Ignored, Refused uint64
}
