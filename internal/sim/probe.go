package sim

import (
	"context"

	"pilaster.io/pilaster/internal/orchestrator"
)

// Probe adds real nodes to a simulated cluster.
type Probe interface {
	// Join is called once, after the orchestrator has the tenants and before the first node joins.
	Join(context.Context, Cluster) error
	// After is called after each stage, when no more messages are in transit.
	After(context.Context, Stage) error
}

// Cluster is what a probe joins.
type Cluster struct {
	Orchestrator *orchestrator.Server
	Socket       string // of the operator API
	Token        string // path of the file with the join token
	Tenants      []string
	Labels       map[string]string // of every container
}
