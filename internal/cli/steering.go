package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/agent/daemon"
	"pilaster.io/pilaster/internal/choice"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/steering"
)

func newSteeringCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:   "steering",
		Short: "Set, show and restore RPS and RFS of the uplink, VXLAN devices and containers",
		Long: `Set, show and restore RPS and RFS: which CPU processes a received packet. The commands write the
kernel's settings (Documentation/networking/scaling.rst) of this machine's devices, also of those that
another container network made, and record what was set before. docs/howto/steering.md explains when
steering helps. They contact no daemon.`,
		Example: "  pilaster steering apply --mode auto --uplink eth0\n  pilaster steering status\n  pilaster " +
			"steering reset",
		Args: cobra.NoArgs,
	}
	c.AddCommand(newSteeringApply(env), newSteeringStatus(env), newSteeringReset(env))
	return c
}

// steeringFlags are the flags of a steering request.
type steeringFlags struct {
	steering.Request
	steering.Selection
	cpus string
}

func newSteeringApply(env Env) *cobra.Command {
	var o steeringFlags
	var of steeringRecord
	c := &cobra.Command{
		Use:   "apply",
		Short: "Set RPS or RFS of devices",
		Long: `Set RPS or RFS of devices, and record what was set before. A second apply of a device replaces the
settings and keeps the first record. Devices of levels that are not named stay as they are.

It writes rps_cpus and rps_flow_cnt of each receive queue (/sys/class/net/DEVICE/queues/rx-N) and, with rfs
and auto, the machine's net.core.rps_sock_flow_entries. It changes no packets, rules or routes. Without
--levels it is about the uplink and all VXLAN devices, also those of other container networks.

The settings are in force at once, for all connections, and stay until the machine or the device is gone, or
until pilaster steering reset restores what was set before the first apply. pilaster steering status shows
them, and what another program has changed since.

Modes:
  off   the CPU that receives a packet processes it
  rps   the hash of a packet's flow selects one of the CPUs
  rfs   the CPU on which the flow's reader runs processes its packets; other packets as with rps
  auto  by the kernel's scaling.rst: off where hardware queues cover the CPUs, else rfs, or rps
        where the machine's table of flows cannot be set

Levels:
  host       the uplinks
  overlay    VXLAN devices: all of this network namespace, or those that --overlay names
  container  eth0 in the network namespaces that --containers names; refused for endpoints of
             Pilaster, whose packets do not pass the receive queue of that device`,
		Example: `  pilaster steering apply --mode rps --uplink eth0
  pilaster steering apply --mode rps --uplink eth0 --levels host --cpus 2-5
  pilaster steering apply --mode rfs --uplink eth0 --overlay flannel.1
  pilaster steering apply --mode rps --levels container --containers '/run/netns/*'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.complete(c); err != nil {
				return err
			}
			if err := steeringRoot(); err != nil {
				return err
			}
			devices, err := o.Devices()
			if err != nil {
				return err
			}
			if err := of.steering().Apply(o.Request, devices); err != nil {
				return err
			}
			_, err = showSteering(env, of.steering(), &output{format: "text"})
			return err
		},
	}
	f := c.Flags()
	choice.Bind(c, &o.Mode, "mode", "off, rps, rfs or auto", steering.Modes())
	_ = c.MarkFlagRequired("mode")
	bindLevels(c, &o.Levels, "levels")
	f.StringVar(&o.cpus, "cpus", "", "CPUs that process packets, such as 0-3,6 (default: all that are online)")
	f.StringSliceVar(&o.Uplinks, "uplink", nil, "devices to the fabric; needed for level host")
	f.StringSliceVar(&o.Overlays, "overlay", nil, "VXLAN devices of level overlay (default: all)")
	f.StringSliceVar(&o.Containers, "containers", nil,
		"network namespaces of level container: paths or patterns such as '/run/netns/*'")
	f.IntVar(&o.Flows, "flows", steering.DefaultFlows, "expected number of active connections; sets the size of the "+
		"tables of rfs")
	f.IntVar(&o.HostEntries, "host-flow-entries", 0, "net.core.rps_sock_flow_entries that was set in the machine's "+
		"first network namespace; for rfs in another one")
	for _, name := range []string{"cpus", "overlay", "uplink", "flows", "host-flow-entries"} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	of.bind(c)
	return c
}

// complete checks the flags and resolves lists and patterns.
func (o *steeringFlags) complete(c *cobra.Command) (err error) {
	if c.Flags().Changed("cpus") {
		if o.CPUs, err = steering.ParseCPUs(o.cpus); err != nil {
			return usage("--cpus: %w", err)
		}
	}
	if o.Flows < 1 || o.Flows > steering.MaxFlows {
		return usage("--flows %d: use 1 to %d", o.Flows, steering.MaxFlows)
	}
	if o.HostEntries < 0 || o.HostEntries > steering.MaxFlows {
		return usage("--host-flow-entries %d: use 1 to %d", o.HostEntries, steering.MaxFlows)
	}
	var paths []string
	for _, pattern := range o.Containers {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			return usage("--containers %q: there is no such file; nothing was changed", pattern)
		}
		paths = append(paths, found...)
	}
	o.Containers = paths
	if err := o.Selection.Check(); err != nil {
		return usage("%w", err)
	}
	return nil
}

func bindLevels(c *cobra.Command, levels *[]string, flag string) {
	c.Flags().StringSliceVar(levels, flag, []string{steering.Host, steering.Overlay},
		"levels: "+strings.Join(steering.Levels(), ", "))
	_ = c.RegisterFlagCompletionFunc(flag, listed(steering.Levels()))
}

// steeringRecord is the record of what was set before, in the agent's folder. Its agent keeps its own there too.
type steeringRecord struct{ runDir string }

func (r *steeringRecord) bind(c *cobra.Command) {
	folder(c, &r.runDir, "run-dir", "PILASTER_RUN_DIR", "/run/pilaster", "agent")
}

func (r *steeringRecord) steering() steering.Steering { return steering.In(r.runDir) }

func steeringRoot() error {
	if os.Geteuid() != 0 {
		return usage("pilaster steering needs root: it writes settings of devices")
	}
	return nil
}

func newSteeringStatus(env Env) *cobra.Command {
	var of steeringRecord
	var out output
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the steering that was set",
		Long: `Show the devices whose steering was set, with their present settings. The exit status is 1 if a
device has other settings than those that apply wrote.`,
		Example: "  pilaster steering status\n  pilaster steering status -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := steeringRoot(); err != nil {
				return err
			}
			asSet, err := showSteering(env, of.steering(), &out)
			if err == nil && !asSet {
				err = &exitError{code: ExitFailed}
			}
			return err
		},
	}
	out.bind(c)
	of.bind(c)
	return c
}

// showSteering prints the status. asSet is false if a device has other settings than those that were written.
func showSteering(env Env, of steering.Steering, out *output) (asSet bool, err error) {
	s, err := of.Status()
	if err != nil {
		return false, err
	}
	changed := slices.ContainsFunc(s.Devices, func(d steering.DeviceStatus) bool { return d.Problem != "" })
	return !changed, out.print(env.Stdout, s, func(w io.Writer) { printSteering(w, s) })
}

func printSteering(w io.Writer, s *steering.Status) {
	switch {
	case s.Table == nil:
		fmt.Fprintln(w, "rps_sock_flow_entries: only in the machine's first network namespace")
	case s.TableBefore != nil:
		fmt.Fprintf(w, "rps_sock_flow_entries: %d, before %d\n", *s.Table, *s.TableBefore)
	default:
		fmt.Fprintf(w, "rps_sock_flow_entries: %d, not changed\n", *s.Table)
	}
	if len(s.Devices) == 0 {
		fmt.Fprintln(w, "no steering is set; see pilaster steering apply --help")
		return
	}
	fmt.Fprintln(w, "LEVEL\tDEVICE\tMODE\tCPUS\tQUEUES\tFLOWS\tNOTE")
	for _, d := range s.Devices {
		note := d.Reason
		switch {
		case d.Gone:
			note = "the device is gone"
		case d.Problem != "":
			note = "changed: " + d.Problem
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%s\n",
			d.Level, d.Device, d.Mode, d.CPUs, d.Queues, d.FlowCount, note)
	}
}

func newSteeringReset(env Env) *cobra.Command {
	var of steeringRecord
	c := &cobra.Command{
		Use:   "reset",
		Short: "Restore what was set before the first apply",
		Long: `Restore the settings that the devices had before the first apply, also those of an agent with
--steering, and net.core.rps_sock_flow_entries when no device needs it any more.`,
		Example: "  pilaster steering reset",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := steeringRoot(); err != nil {
				return err
			}
			restored, err := of.steering().Reset()
			for _, d := range restored {
				fmt.Fprintf(env.Stdout, "restored %v\n", d)
			}
			if err == nil && len(restored) == 0 {
				fmt.Fprintln(env.Stdout, "no steering was set")
			}
			return err
		},
	}
	of.bind(c)
	return c
}

// agentSteering are the agent's flags for the steering of its devices.
type agentSteering struct {
	mode   string
	levels []string
}

// steeringKeep leaves the steering of devices as it is.
const steeringKeep = "keep"

func (a *agentSteering) bind(c *cobra.Command) {
	choice.Bind(c, &a.mode, "steering", "RPS or RFS of the uplink and VXLAN devices: keep (as they are), off, rps, "+
		"rfs or auto, as with 'pilaster steering apply'; stays set when the agent stops",
		append([]string{steeringKeep}, steering.Modes()...))
	c.Flags().StringSliceVar(&a.levels, "steering-levels", []string{steering.Host, steering.Overlay},
		"levels of --steering: "+steering.Host+", "+steering.Overlay)
	_ = c.RegisterFlagCompletionFunc("steering-levels", listed([]string{steering.Host, steering.Overlay}))
}

// complete checks the flags, and makes the agent steer its devices.
func (a *agentSteering) complete(o *daemon.Options) error {
	if err := steering.CheckLevels(a.levels); err != nil {
		return usage("--steering-levels: %w", err)
	}
	if slices.Contains(a.levels, steering.Container) {
		return usage("--steering-levels: %s", steering.WhyNoContainer)
	}
	if a.mode == steeringKeep {
		return nil
	}
	request := steering.Request{Mode: a.mode}
	if err := request.Check(); err != nil {
		return fmt.Errorf("--steering %s: %w", a.mode, err)
	}
	of := steering.Selection{Levels: a.levels, Uplinks: o.Uplinks}
	o.Steering = func(ctx context.Context) error {
		return steering.In(o.RunDir).Follow(ctx, request, of, o.Log)
	}
	return nil
}

// steeringRemains returns the steering that was set, as objects that a reset of the node removes.
func steeringRemains(runDir string) (found []network.StaleState, err error) {
	of := steering.In(runDir)
	s, err := of.Status()
	if err != nil {
		return nil, err
	}
	for _, d := range s.Devices {
		found = append(found, network.StaleState{
			Kind: "steering of", Name: d.Device.String(),
			Remove: func() error { _, err := of.Reset(d.Device); return err },
		})
	}
	for _, dir := range of.Folders() {
		found = append(found, network.StaleState{Kind: "folder", Name: dir, Remove: func() error {
			_ = os.Remove(filepath.Join(dir, statefile.LockFile))
			return os.Remove(dir) // fails if a record is left
		}})
	}
	return found, nil
}
