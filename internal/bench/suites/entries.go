package suites

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// EntriesOptions configure the size of the simulated cluster.
type EntriesOptions struct {
	Switches []string // some of EntrySwitches
	Nodes    []int    // at least two sizes, ascending
	Density  int      // containers on each node
	Services int      // services of the tenant
	Dir      string
	Progress func(done, of int)
}

// Switches whose entries are counted.
const (
	onEBPF = "ebpf"
	onOVS  = "ovs"
)

// EntrySwitches are all switches.
var EntrySwitches = []string{onEBPF, onOVS}

// density is the paper's number of containers per node. With node CIDRs, a node has fewer entries by this factor
// (NIMITZ §3.2).
const density = 80

// QuickEntries takes ten seconds.
func QuickEntries() EntriesOptions {
	return EntriesOptions{Switches: EntrySwitches, Nodes: []int{1, 10, 100}, Density: density, Services: 16}
}

// FullEntries goes up to 80,000 containers.
func FullEntries() EntriesOptions {
	return EntriesOptions{
		Switches: EntrySwitches,
		Nodes:    []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000},
		Density:  density,
		Services: 16,
	}
}

// MaxEntryNodes limits the size of a run: 320,000 mappings without node CIDRs.
const MaxEntryNodes = 4000

// Entries fills the switch of a node as the node's agent does, with mappings of nodes that do not exist, and counts the
// switch's entries (NM2, NM3).
func Entries(ctx context.Context, o EntriesOptions) (_ *EntriesReport, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	r := &EntriesReport{Simulated: simulated, Density: o.Density, Services: o.Services}
	done := 0
	step := func() {
		done++
		o.Progress(done, len(o.Switches)*2*2*len(o.Nodes))
	}
	for _, kind := range o.Switches {
		for _, nodeCIDRs := range []bool{true, false} {
			samples, err := o.count(ctx, kind, nodeCIDRs, step)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", kind, err)
			}
			r.Samples = append(r.Samples, samples...)
		}
	}
	r.Grows = r.grows()
	r.Pass = !slices.ContainsFunc(r.Grows, func(g Growth) bool { return g.OffSum != 0 })
	r.Header = report.NewHeader(started)
	return r, nil
}

// count reads a switch at each size of the cluster: first with one container on this node and ascending sizes, then
// with Density containers and descending sizes. At each size it reads with one service and with all services.
func (o EntriesOptions) count(
	ctx context.Context,
	kind string,
	nodeCIDRs bool,
	step func(),
) (all []EntriesSample, err error) {
	w, err := scenario.NewWire(filepath.Join(o.Dir, "entries"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	c := scenario.NewCluster(nodeCIDRs, o.Density)
	b, err := newEntriesBed(ctx, w, kind, &scenario.Member{Cluster: c}, slices.Max(o.Nodes)*o.Density)
	if err != nil {
		return nil, err
	}
	sizes := slices.Clone(o.Nodes)
	for _, here := range []int{1, o.Density} {
		if err := b.fill(ctx, here); err != nil {
			return nil, err
		}
		for _, nodes := range sizes {
			if err := b.network.Replace(ctx, c.Tenant.Name, c.Mappings(nodes)); err != nil {
				return nil, err
			}
			for _, services := range []int{1, o.Services} {
				stages, err := b.read(ctx, services)
				if err != nil {
					return nil, err
				}
				all = append(
					all,
					EntriesSample{
						Switch:     kind,
						NodeCIDRs:  nodeCIDRs,
						Nodes:      nodes,
						Containers: here,
						Services:   services,
						Stages:     stages,
					},
				)
			}
			step()
		}
		slices.Reverse(sizes)
	}
	return all, nil
}

// Counts are numbers of entries by stage.
type Counts struct {
	Decap      int `json:"decap"`
	Register   int `json:"register"`
	NAT        int `json:"nat"`
	Forwarding int `json:"forwarding"`
	// Remote is the number of forwarding entries to other nodes.
	Remote int `json:"remote"`
}

// All returns the sum of all stages.
func (c Counts) All() int { return c.Decap + c.Register + c.NAT + c.Forwarding }

func countsOf(entries []pipeline.Entry) Counts {
	by := pipeline.Count(entries)
	c := Counts{
		Decap:      by[pipeline.Decap],
		Register:   by[pipeline.Register],
		NAT:        by[pipeline.NAT],
		Forwarding: by[pipeline.Forwarding],
	}
	for _, e := range entries {
		if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN {
			c.Remote++
		}
	}
	return c
}

// service returns the addresses of the tenant's n-th service.
func service(n int) (virtual, real netip.Addr) {
	at := func(first uint16) netip.Addr {
		return netip.AddrFrom16([16]byte{byte(first >> 8), byte(first), 14: byte((n + 1) >> 8), 15: byte(n + 1)})
	}
	return at(0xfd09), at(0xfd0a)
}
