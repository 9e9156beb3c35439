package agent

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// Resolver asks the orchestrator for a tenant or for the app of a label set. Its errors are refusals of kind
// ErrNotFound, ErrExhausted, ErrInvalid, ErrUnavailable or ErrNever.
type Resolver interface {
	Resolve(ctx context.Context, name string, identity map[string]string) (Resolved, error)
}

// Resolved is the orchestrator's answer.
type Resolved struct {
	Tenant   tenant.Tenant
	App      address.AppID
	Policies bool // the tenant has policies; they arrive on the stream
	Retiring Retiring
}

// LinkStatus is the current state of the link to the orchestrator.
type LinkStatus struct {
	Connected bool
	Since     time.Time
	Revision  int64
	LastError string
	Refused   bool // the orchestrator knows this node and rejects it: LastError has the reason

	NotTaken []string // parts of this node's reports that the orchestrator rejected, with the reason
}
