package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/lab"
)

// Options of a run.
type Options struct {
	Binary  string // the pilaster binary; pilaster-cni is in the same folder
	Command string // its name in printed commands
	Root    string // folder of labs; lab.DefaultRoot when empty
	Keep    bool   // leave the lab up
}

// spec is the demo's lab. Both tenants are on n1 and n3, so that isolation is tested on one node and across the fabric.
var spec = lab.Spec{
	Name:    "demo",
	Nodes:   []string{"n1", "n2", "n3"},
	Outside: []lab.OutsideHost{{Name: internet}},
	Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}},
	Containers: []lab.Container{
		{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
		{Name: "b2", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
		{Name: "b3", Node: "n3", Tenant: "blue", Labels: map[string]string{"app": "db"}},
		{Name: "r1", Node: "n1", Tenant: "red", Labels: map[string]string{"app": "web"}},
		{Name: "r2", Node: "n2", Tenant: "red", Labels: map[string]string{"app": "web"}},
		{Name: "r3", Node: "n3", Tenant: "red", Labels: map[string]string{"app": "web"}},
	},
}

// downTime is the timeout for the removal of the lab, also after an interrupt.
const downTime = time.Minute

// Run runs the demo and prints what it measures. The error names the checks that failed.
func Run(ctx context.Context, out io.Writer, o Options) error {
	before, err := lab.Leftovers(o.Root, spec.Name)
	if err != nil {
		return err
	}
	started := time.Now()
	l, err := lab.Up(ctx, spec, lab.Options{Root: o.Root, Binary: o.Binary})
	if err != nil {
		return err
	}
	p := &proof{lab: l, out: out}
	p.print("%-100sup in %.1f s", fmt.Sprintf("%s · %d nodes, %d tenants, %d containers on this machine",
		"pilaster demo", len(spec.Nodes), len(spec.Tenants), len(spec.Containers)), time.Since(started).Seconds())
	err = p.run(ctx)
	if o.Keep && ctx.Err() == nil {
		p.print("\nEverything above was measured in this run. The lab is still up; look at it, then remove it:")
		for _, line := range lookAround(o.Command) {
			p.print("  %s", line)
		}
		return err
	}
	// The lab is removed also after an interrupt.
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
	defer cancel()
	if downErr := p.down(cleanup, o, before); downErr != nil {
		return errors.Join(err, downErr)
	}
	if err == nil {
		p.print(
			"\nEverything above was measured in this run. With KEEP=1 make demo the lab stays up; then: %s",
			lookAround(o.Command)[0],
		)
	}
	return err
}

func lookAround(command string) []string {
	ping := command + " lab ping b1 b3"
	if _, err := exec.LookPath("ping"); err == nil {
		ping = command + " lab exec b1 -- ping b3"
	}
	return []string{
		ping,
		command + " lab exec b1 -- ip -6 addr",
		command + " lab exec n1 -- " + command + " monitor --type drop",
		command + " lab status",
		command + " lab down",
	}
}

func (p *proof) down(ctx context.Context, o Options, before []string) error {
	if err := p.lab.Down(ctx); err != nil {
		return err
	}
	after, err := lab.Leftovers(o.Root, spec.Name)
	if err != nil {
		return err
	}
	after = slices.DeleteFunc(after, func(thing string) bool { return slices.Contains(before, thing) })
	if len(after) > 0 {
		return fmt.Errorf("not removed: %s", strings.Join(after, ", "))
	}
	p.print("\nLab removed: no process, namespace, mount, pin or device is left.")
	return nil
}

// proof is one run of all checks on a lab: its output, and the failed checks.
type proof struct {
	lab    *lab.Lab
	out    io.Writer
	failed []string
}

func (p *proof) print(format string, args ...any) {
	fmt.Fprintln(p.out, strings.TrimRight(fmt.Sprintf(format, args...), " "))
}

// check records a failure unless ok, and returns ok.
func (p *proof) check(ok bool, format string, args ...any) bool {
	if !ok {
		p.failed = append(p.failed, fmt.Sprintf(format, args...))
	}
	return ok
}

func (p *proof) run(ctx context.Context) error {
	err := p.sections(ctx)
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}
	if err != nil {
		p.failed = append(p.failed, err.Error())
	}
	if len(p.failed) > 0 {
		return fmt.Errorf("checks failed:\n  %s", strings.Join(p.failed, "\n  "))
	}
	return nil
}

func (p *proof) sections(ctx context.Context) error {
	// First packets are measured before all other traffic.
	first, err := p.firstPackets(ctx)
	if err != nil {
		return err
	}
	for _, section := range []func(context.Context) error{
		p.reach,
		p.places,
		func(ctx context.Context) error { return p.speed(ctx, first) },
		p.entries,
		p.attacks,
		p.outside,
		p.service,
	} {
		p.print("")
		if err := section(ctx); err != nil {
			return err
		}
	}
	return nil
}

// drops reads every node's counters.
func (p *proof) drops(ctx context.Context) (map[string]map[string]uint64, error) {
	all := map[string]map[string]uint64{}
	for _, node := range spec.Nodes {
		drops, err := p.lab.Drops(ctx, node)
		if err != nil {
			return nil, err
		}
		all[node] = drops
	}
	return all, nil
}

// counterTime is how long counters may lag behind the packets.
const counterTime = 5 * time.Second

// dropsSince waits until at least the expected number of packets was dropped, and returns how much each counter rose.
// It leaves out the neighbour discovery and multicast listener messages of containers, which come at any time.
func (p *proof) dropsSince(
	ctx context.Context,
	before map[string]map[string]uint64,
	expected uint64,
) (map[string]map[string]uint64, error) {
	deadline := time.Now().Add(counterTime)
	for {
		now, err := p.drops(ctx)
		if err != nil {
			return nil, err
		}
		rise, sum := map[string]map[string]uint64{}, uint64(0)
		for node, drops := range now {
			rise[node] = map[string]uint64{}
			for reason, n := range drops {
				n -= before[node][reason]
				if n == 0 || reason == "nd-ignored" || reason == "mld-ignored" {
					continue
				}
				rise[node][reason] = n
				sum += n
			}
		}
		if sum >= expected || time.Now().After(deadline) {
			return rise, nil
		}
	}
}

// short is the first and the last group of an address.
func short(address string) string {
	groups := strings.Split(address, ":")
	return groups[0] + ":…:" + groups[len(groups)-1]
}
