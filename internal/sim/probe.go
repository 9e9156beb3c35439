package sim

import (
	"context"

	"pilaster.io/pilaster/internal/orchestrator"
)

// Probe adds real nodes to a simulated cluster.
type Probe interface {
	// Join is called once, when there is an orchestrator that knows the tenants, and no node.
	Join(context.Context, Cluster) error
	// After is called after each stage, when all is quiet.
	After(context.Context, Stage) error
}

// Cluster is what a probe joins.
type Cluster struct {
	Orchestrator *orchestrator.Server
	Socket       string // the operator's
	Token        string // file with the join token
	Tenants      []string
	Labels       map[string]string // of every container
}
