package networks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// Nodes are figures of a row on real nodes.
type Nodes struct {
	Network string `json:"network"`
	// Elsewhere is the number of the tenant's containers on other nodes, when the node's tables were read.
	Elsewhere int `json:"containersElsewhere"`
	// State is the number of entries that the node's tables have more with these containers than without; Tables are
	// those that grew.
	State  int     `json:"stateForOtherNodes"`
	Tables []Table `json:"tables"`
	// Messages for one container of a tenant that the node hosts already, means of all events.
	Start Messages `json:"start"`
	Stop  Messages `json:"stop"`
	Move  Messages `json:"move"` // a stop on one node, and a start on another
	// Reachable are the times from the start of a container, as a runtime calls it, until its answer to another node's
	// container, in ms; Added until the ADD was done.
	Reachable []float64 `json:"reachableMs"`
	Added     []float64 `json:"addedMs"`
}

// The real nodes: tables of here are read, and containers start and stop there. Simulated nodes have other names.
const (
	here  = "here"
	there = "there"
)

// cluster is a lab of two nodes, and the orchestrator that they follow.
type cluster struct {
	lab    *lab.Lab
	meter  *meter
	tenant string
	labels map[string]string
	made   int
	// What arithmetic predicts is awaited, so that slow messages count for their own event.
	predicted Predicted
}

// spec is the lab of rows with equal agents.
func spec(name string, a Agents, some ...Network) lab.Spec {
	s := lab.Spec{Name: name, Nodes: []string{here, there}}
	s.Nimitz = a.Switch
	for _, n := range some {
		if n.Spec != nil {
			n.Spec(&s)
		}
	}
	return s
}

// upLab starts two nodes. External is nil for an orchestrator of the lab's own.
func (o Options) upLab(
	ctx context.Context, s lab.Spec, arguments []string, external *lab.ExternalOrchestrator,
) (*lab.Lab, error) {
	return lab.Up(ctx, s, lab.Options{Binary: o.Binary, AgentArgs: arguments, External: external})
}

// CheckLabs returns an error if labs cannot start later.
func CheckLabs(o Options) error {
	if !slices.ContainsFunc(o.Networks, func(n Network) bool { return n.Tenant != nil }) {
		return nil
	}
	plugin := filepath.Join(filepath.Dir(o.Binary), "pilaster-cni")
	if _, err := os.Stat(plugin); err != nil {
		return fmt.Errorf("labs need the plugin beside this program: %w; build it with: make build", err)
	}
	if _, err := os.Stat(filepath.Join(lab.DefaultRoot, o.Name)); err == nil {
		return fmt.Errorf("lab %s is up, or remains after a crash; remove it with: pilaster lab down %s", o.Name,
			o.Name)
	}
	return nil
}

// downTime bounds the removal of a lab, also after an interrupt.
const downTime = time.Minute

func down(ctx context.Context, l *lab.Lab) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
	defer cancel()
	return l.Down(ctx)
}

// measureNodes measures rows that have the same agents, on two nodes of their own.
func (o Options) measureNodes(ctx context.Context, agents Agents, some []Network) (all []Nodes, err error) {
	s := spec(o.Name, agents, some...)
	for _, n := range some {
		if !slices.ContainsFunc(s.Tenants, func(t lab.Tenant) bool { return t.Name == n.Tenant.Name }) {
			s.Tenants = append(s.Tenants, *n.Tenant)
		}
	}
	var arguments []string
	if agents.Arguments != "" {
		arguments = []string{agents.Arguments}
	}
	l, err := o.upLab(ctx, s, arguments, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down(ctx, l)) }()
	status, err := l.Status(ctx)
	if err != nil {
		return nil, err
	}
	meter := newMeter(status.Orchestrator.Socket, l.AgentSocket(here), o.Look)
	for _, n := range some {
		c := &cluster{lab: l, meter: meter, tenant: n.Tenant.Name}
		if len(n.Clusters) > 0 {
			c.predicted = n.Clusters[0].predict(2, o.Containers, 2)
		}
		r := Nodes{Network: n.Name}
		if err := c.measure(ctx, &r, o); err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name, err)
		}
		all = append(all, r)
		o.step("two nodes: " + n.Name)
	}
	return all, nil
}

// measure fills the nodes and measures everything.
func (c *cluster) measure(ctx context.Context, r *Nodes, o Options) error {
	first, err := c.fill(ctx, here, 1)
	if err != nil {
		return err
	}
	alone, err := c.meter.quiet(ctx, surely)
	if err != nil {
		return err
	}
	others, err := c.fill(ctx, there, o.Containers)
	if err != nil {
		return err
	}
	full, err := c.full(ctx, alone)
	if err != nil {
		return err
	}
	r.Elsewhere = o.Containers
	r.Tables, r.State = growth(alone.tables, full.tables)
	if err := c.events(ctx, r, o.Events, first[0]); err != nil {
		return err
	}
	return c.clear(ctx, append(first, others...))
}

// full waits until the node's tables have what is predicted for other nodes.
func (c *cluster) full(ctx context.Context, alone reading) (reading, error) {
	return c.meter.await(ctx, surely, func(now reading) bool {
		_, state := growth(alone.tables, now.tables)
		return state >= c.predicted.State
	})
}

// growth returns the tables that have more entries than before, and the sum of the differences.
func growth(before, after map[string]int) (tables []Table, sum int) {
	for name, now := range after {
		if more := now - before[name]; more != 0 {
			tables = append(tables, Table{name, more})
			sum += more
		}
	}
	slices.SortFunc(tables, func(a, b Table) int { return strings.Compare(a.Name, b.Name) })
	return tables, sum
}

// addsAtOnce is the number of concurrent ADDs when nodes are filled.
const addsAtOnce = 4

// fill starts containers on a node.
func (c *cluster) fill(ctx context.Context, node string, many int) (names []string, err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(addsAtOnce)
	for range many {
		one := c.container(node)
		names = append(names, one.Name)
		g.Go(func() error { return c.lab.AddContainer(ctx, one) })
	}
	return names, g.Wait()
}

// container is a new container of a node.
func (c *cluster) container(node string) lab.Container {
	c.made++
	return lab.Container{
		Name: fmt.Sprintf("%s-%d", c.tenant, c.made), Node: node, Tenant: c.tenant, Labels: c.labels,
	}
}

func (c *cluster) clear(ctx context.Context, names []string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(addsAtOnce)
	for _, name := range names {
		g.Go(func() error { return c.lab.RemoveContainer(ctx, name) })
	}
	return g.Wait()
}

// events starts, moves and stops a container so many times. Both nodes host the tenant before and after. The counters
// are read between the two parts of a move, so that no update is merged with another.
func (c *cluster) events(ctx context.Context, r *Nodes, times int, from string) error {
	source, err := c.lab.Namespace(from)
	if err != nil {
		return err
	}
	defer source.Close()
	last, err := c.meter.quiet(ctx, once)
	if err != nil {
		return err
	}
	cost := func(of *Messages, expected float64, do func() error) error {
		if err := do(); err != nil {
			return err
		}
		now, err := c.meter.await(ctx, once, func(now reading) bool {
			return now.messages.since(last.messages).Stream >= expected
		})
		if err != nil {
			return err
		}
		*of = of.plus(now.messages.since(last.messages))
		last = now
		return nil
	}
	for range times {
		one := c.container(there)
		remove := func() error { return c.lab.RemoveContainer(ctx, one.Name) }
		for _, step := range []struct {
			of       *Messages
			expected float64
			do       func() error
		}{
			{&r.Start, c.predicted.Start, func() error { return c.start(ctx, r, one, source) }},
			{&r.Move, c.predicted.Move - c.predicted.Stop, remove}, // the end of the former one
			{&r.Move, c.predicted.Stop, func() error {
				one.Node = here
				return c.lab.AddContainer(ctx, one)
			}},
			{&r.Stop, c.predicted.Stop, remove},
		} {
			if err := cost(step.of, step.expected, step.do); err != nil {
				return err
			}
		}
	}
	r.Start, r.Move, r.Stop = r.Start.over(times), r.Move.over(times), r.Stop.over(times)
	return nil
}

// A container must answer within reachTime. An echo that is not answered is repeated after echoTime.
const (
	reachTime = 10 * time.Second
	echoTime  = 10 * time.Millisecond
)

// start starts a container, and sends echo requests from another node until it answers.
func (c *cluster) start(ctx context.Context, r *Nodes, one lab.Container, from *netns.Namespace) error {
	began := time.Now()
	if err := c.lab.AddContainer(ctx, one); err != nil {
		return err
	}
	added := time.Since(began)
	to, err := c.lab.Address(one.Name)
	if err != nil {
		return err
	}
	if err := reach(ctx, from, to); err != nil {
		return fmt.Errorf("container %s at %v: %w", one.Name, to, err)
	}
	r.Added, r.Reachable = append(r.Added, milliseconds(added)), append(r.Reachable, milliseconds(time.Since(began)))
	return nil
}

// talk sends packets from a container to others until each has answered.
func (c *cluster) talk(ctx context.Context, from string, others []string) error {
	if len(others) == 0 {
		return nil
	}
	source, err := c.lab.Namespace(from)
	if err != nil {
		return err
	}
	defer source.Close()
	for _, name := range others {
		to, err := c.lab.Address(name)
		if err != nil {
			return err
		}
		if err := reach(ctx, source, to); err != nil {
			return fmt.Errorf("container %s at %v: %w", name, to, err)
		}
	}
	return nil
}

func reach(ctx context.Context, from *netns.Namespace, to netip.Addr) error {
	for end := time.Now().Add(reachTime); time.Now().Before(end); {
		got, err := packet.Ping(ctx, from, to, packet.PingOptions{Timeout: echoTime})
		if err != nil {
			return err
		}
		if got.Received > 0 {
			return nil
		}
	}
	return fmt.Errorf("no answer from another node within %v", reachTime)
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// median is the median of times; 0 without any.
func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	return report.Median(all)
}

// agentArguments turn a network on, on nodes with so many mappings.
func agentArguments(network string, mappings int) []string {
	if of, _ := modules.Of(network); of.AgentArguments != nil {
		return of.AgentArguments(mappings)
	}
	return nil
}
