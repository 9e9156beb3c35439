package networks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

// Simulated are figures of a network in a large cluster: two real nodes and many simulated ones, which all follow one
// real orchestrator. Tables are those of a real node's kernel.
type Simulated struct {
	Name       string `json:"name"`
	Network    string `json:"network"`
	Nodes      int    `json:"nodes"`      // simulated and real
	Containers int    `json:"containers"` // of each node
	// Following is the number of nodes that follow the orchestrator. The others register, start their containers and
	// end, if the updates to all of them were too many for one machine.
	Following int   `json:"following"`
	Figures   Nodes `json:"figures"`
	// Predicted are the same figures by arithmetic.
	Predicted Predicted `json:"predicted"`
	Seconds   float64   `json:"seconds"`
	Pass      bool      `json:"pass"`
}

// Predicted are the figures that arithmetic predicts.
type Predicted struct {
	State int     `json:"stateForOtherNodes"`
	Start float64 `json:"startStream"` // messages on streams
	Stop  float64 `json:"stopStream"`
	Move  float64 `json:"moveStream"`
}

// predict returns the figures of a cluster, some of whose nodes follow the orchestrator.
func (c Cluster) predict(nodes, each, following int) Predicted {
	messages := float64(c.PerNode * following)
	if c.ActivePeers > 0 {
		// The node that exchanges packets with the container subscribes, and gets the answer; it is the only one that
		// gets the end. Nothing is known of the container that starts on it instead, nor of that one's end.
		return Predicted{State: c.Entries(nodes, each), Start: 1, Move: 1}
	}
	return Predicted{State: c.Entries(nodes, each), Start: messages, Stop: messages, Move: 2 * messages}
}

// Size is the size of a simulated cluster.
type Size struct {
	Nodes, Containers int
	// Followers limits the nodes that follow the orchestrator, if each of them gets a message for each container; 0:
	// all.
	Followers int
}

// realNodes is the number of nodes that are not simulated.
const realNodes = 2

// simulate measures one network in a cluster of a size.
func (o Options) simulate(ctx context.Context, n Network, c Cluster, size Size) (r Simulated, err error) {
	began := time.Now()
	dir, err := os.MkdirTemp("", "pilaster-networks-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	network := n.Tenant.Network
	s := sim.Scenario{
		Network: network, Nodes: size.Nodes - realNodes, ContainersPerNode: size.Containers,
		NoNodeCIDRs: c.NoNodeCIDRs, ActivePeers: c.ActivePeers,
	}.Filled("networks")
	if err := s.Validate(); err != nil {
		return r, err
	}
	r = Simulated{
		Name: c.Name, Network: n.Name, Nodes: size.Nodes, Containers: size.Containers, Following: size.Nodes,
		Figures: Nodes{Network: n.Name, Elsewhere: (size.Nodes - 1) * size.Containers},
	}
	options := sim.Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Every: reportEvery,
		Progress: func(p sim.Progress) { o.Progress(c.Name + ": " + p.String()) },
	}
	if c.PerNode > 0 && tenant.NetworkHas(network, tenant.Mappings) && size.Followers > 0 {
		options.Followers = min(size.Followers, s.Nodes)
		r.Following = options.Followers + realNodes
	}
	r.Predicted = c.predict(size.Nodes, size.Containers, r.Following)
	p := &probe{Options: o, size: size, network: n, cluster: c, result: &r.Figures, predicted: r.Predicted}
	options.Probe, options.Settled = p, func() error { return p.leave(ctx) }
	if _, err := sim.Run(ctx, s, options); err != nil {
		return r, err
	}
	r.Pass = r.agrees()
	r.Seconds = time.Since(began).Round(100 * time.Millisecond).Seconds()
	o.step(fmt.Sprintf("%s: %d nodes with %d containers each", c.Name, size.Nodes, size.Containers))
	return r, nil
}

// reportEvery is the interval of progress reports.
const reportEvery = 5 * time.Second

// agrees compares what was counted with what arithmetic predicts.
func (r Simulated) agrees() bool {
	p := r.Predicted
	return r.Figures.State == p.State && r.Figures.Start.Stream == p.Start && r.Figures.Stop.Stream == p.Stop &&
		r.Figures.Move.Stream == p.Move
}

// probe adds two real nodes to a simulated cluster, and measures one of them.
type probe struct {
	Options
	size    Size
	network Network
	cluster Cluster
	result  *Nodes
	real    *cluster
	alone   reading
	first   string   // container here
	others  []string // containers there

	predicted Predicted
}

// Join starts the real nodes, and fills them as the simulated ones.
func (p *probe) Join(ctx context.Context, by sim.Cluster) error {
	mappings := 2 * p.size.Nodes * p.size.Containers
	arguments := append(agentArguments(p.network.Tenant.Network, mappings), p.cluster.Arguments...)
	l, err := p.upLab(ctx, spec(p.Name, Agents{}, p.network), arguments, &lab.ExternalOrchestrator{
		Serve: by.Orchestrator.ServeNodes, Socket: by.Socket, Token: by.Token,
	})
	if err != nil {
		return err
	}
	p.real = &cluster{
		lab: l, meter: newMeter(by.Socket, l.AgentSocket(here), p.Look), tenant: by.Tenants[0], labels: by.Labels,
		predicted: p.predicted,
	}
	names, err := p.real.fill(ctx, here, p.size.Containers)
	if err != nil {
		return err
	}
	p.first = names[0]
	if p.alone, err = p.real.meter.quiet(ctx, surely); err != nil {
		return err
	}
	p.others, err = p.real.fill(ctx, there, p.size.Containers)
	return err
}

// After measures when the cluster is complete.
func (p *probe) After(ctx context.Context, _ sim.Stage) error {
	if err := p.real.talk(ctx, p.first, p.others[:min(p.cluster.ActivePeers, len(p.others))]); err != nil {
		return err
	}
	full, err := p.real.full(ctx, p.alone)
	if err != nil {
		return err
	}
	p.result.Tables, p.result.State = growth(p.alone.tables, full.tables)
	return p.real.events(ctx, p.result, p.Events, p.first)
}

// leave removes the real nodes while the orchestrator still runs.
func (p *probe) leave(ctx context.Context) error {
	if p.real == nil {
		return nil
	}
	return down(ctx, p.real.lab)
}
