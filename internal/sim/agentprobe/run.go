package agentprobe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

// Options configure the agent and the simulated cluster.
type Options struct {
	Networks       []string      // networks of the tenant; one run each
	Sizes          []int         // numbers of simulated nodes, increasing; at least two
	Containers     int           // containers of the agent
	NodeContainers int           // containers of each simulated node
	Followers      int           // simulated nodes of a network with mappings that follow the orchestrator; 0 means all
	Dir            string        // folder on a real disk for the orchestrator's etcd
	WarmUp         time.Duration // minimum time between the last container and the first measurement
	Binary         string        // path of pilaster; pilaster-cni must be in the same folder
	Name           string        // name of the lab
	Log            *slog.Logger
	Progress       func(string)
}

// Run measures on each network. If it fails, the report has the steps measured so far.
func Run(ctx context.Context, o Options) (*Report, error) {
	began := time.Now()
	r := &Report{
		Started:        began.UTC().Truncate(time.Second),
		Sizes:          o.Sizes,
		Containers:     o.Containers,
		NodeContainers: o.NodeContainers,
		Followers:      o.Followers,
	}
	for _, network := range o.Networks {
		line := Line{Network: network}
		err := follow(ctx, o, &line)
		if !tenant.NetworkHas(network, tenant.Mappings) {
			line.NotFlat = notFlat(line.Points)
		}
		r.Lines = append(r.Lines, line)
		r.Seconds = time.Since(began).Round(100 * time.Millisecond).Seconds()
		if err != nil {
			return r, fmt.Errorf("network %s: %w", network, err)
		}
	}
	return r, nil
}

// reportEvery is the interval of progress reports.
const reportEvery = 2 * time.Second

// follow grows one cluster around one agent.
func follow(ctx context.Context, o Options, line *Line) error {
	dir, err := os.MkdirTemp(o.Dir, "pilaster-sim-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	report := func(what string) { o.Progress(line.Network + ": " + what) }
	g := &probe{Options: o, line: line, report: report, began: time.Now(), warm: make(chan struct{})}
	options := sim.Options{
		Dir: dir, Log: o.Log, Every: reportEvery, Progress: func(p sim.Progress) { report(p.String()) },
		Probe: g, Settled: func() error { return g.leave(ctx) },
	}
	if tenant.NetworkHas(line.Network, tenant.Mappings) {
		options.Followers = o.Followers
	}
	scenario, err := o.scenario(line.Network)
	if err != nil {
		return err
	}
	r, err := sim.Run(ctx, scenario, options)
	if r != nil {
		line.Warnings = r.Warnings
	}
	return err
}

func (o Options) scenario(network string) (sim.Scenario, error) {
	s := sim.Scenario{Network: network, Nodes: o.Sizes[0], ContainersPerNode: o.NodeContainers}
	for i, size := range o.Sizes[1:] {
		s.Events = append(s.Events, sim.Event{Do: sim.Grow, By: sim.Amount{N: size - o.Sizes[i]}})
	}
	s = s.Filled("agent")
	return s, s.Validate()
}

// Check validates the options.
func (o Options) Check() error {
	if len(o.Sizes) < 2 {
		return errors.New(
			"give at least two sizes: the measurements at the others are compared with those at the first",
		)
	}
	for i, size := range o.Sizes[1:] {
		if size <= o.Sizes[i] {
			return fmt.Errorf("size %d after %d: each size must be larger than the previous one", size, o.Sizes[i])
		}
	}
	for _, of := range []struct {
		what     string
		n, least int
	}{{"containers of the agent", o.Containers, 1}, {"containers of each simulated " +
		"node", o.NodeContainers, 1}, {"followers", o.Followers, 0}} {
		if of.n < of.least || of.n > dpapi.DefaultMaxEndpoints && of.least > 0 {
			return fmt.Errorf(
				"%d %s: use %d or more, and at most %d containers",
				of.n,
				of.what,
				of.least,
				dpapi.DefaultMaxEndpoints,
			)
		}
	}
	_, err := o.scenario(tenant.DefaultNetwork)
	return err
}
