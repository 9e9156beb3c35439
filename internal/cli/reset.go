package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/agent/daemon"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/network"
)

// resetOptions are the flags of node reset.
type resetOptions struct {
	stateDir, runDir, bpffs string
	networks                resetFlags
	yes, force              bool
	out                     output
}

// removedView is a removed object, as JSON.
type removedView struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

func newNodeReset(env Env) *cobra.Command {
	o := resetOptions{networks: newResetFlags()}
	c := &cobra.Command{
		Use:   "reset",
		Short: "Remove everything of the agent from this machine",
		Long: `Remove everything of the agent from this machine: devices, eBPF programs, maps and their pins, the bpffs
if the agent mounted it, its Open vSwitch bridges, the gateway's namespace, the node's address and its
route, the agent's socket and its state. The steering of devices is restored. Other settings of the
machine need no reset: the agent changes only settings of its own devices.

Stop the agent and remove the containers first. --force continues although containers are left; they
lose their network permanently. Unlike the other node commands, this one works on this machine and
contacts no orchestrator: the cluster keeps the node until you run 'pilaster node delete NAME' there.`,
		Example: "  pilaster node reset\n  pilaster node reset --yes -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if os.Geteuid() != 0 {
				return usage("pilaster node reset needs root: it removes devices and eBPF programs")
			}
			return reset(env, o)
		},
	}
	f := c.Flags()
	agentState(c, &o.stateDir)
	folder(c, &o.runDir, "run-dir", "PILASTER_RUN_DIR", "/run/pilaster", "agent")
	agentPins(c, &o.bpffs)
	o.networks.bind(c)
	f.BoolVar(&o.yes, "yes", false, "do not ask")
	f.BoolVar(&o.force, "force", false, "continue although containers are attached")
	o.out.bind(c)
	return c
}

func reset(env Env, o resetOptions) (err error) {
	steered, err := steeringRemains(o.runDir)
	if err != nil {
		return err
	}
	after := slices.Concat(o.networks.after(o.runDir), steered)
	remains, err := daemon.FindStaleState(o.stateDir, o.runDir, after)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remains.Close()) }()
	kernel, err := datapath.StaleState(remains.Prefix, remains.Egress, o.bpffs)
	if err != nil {
		return err
	}
	if attached := attached(remains, kernel); len(attached) > 0 && !o.force {
		return fmt.Errorf(
			"containers are attached to this node: %s\n  nothing was changed; remove them first, or use --force: "+
				"they lose their network permanently",
			strings.Join(attached, ", "),
		)
	}
	before, err := o.networks.before()
	if err != nil {
		return err
	}
	all := slices.Concat(before, kernel, after, remains.Files)
	if len(all) > 0 && !o.yes && !confirmed(env, all, remains.Prefix) {
		return errors.New("not confirmed\n  nothing was changed; use --yes to skip the question")
	}
	return removeAll(env, o.out, all)
}

// attached names the containers that would lose their network. It uses the records of endpoints, or the devices if
// there are no records.
func attached(r *daemon.StaleState, kernel []network.StaleState) []string {
	if len(r.Endpoints) > 0 {
		return r.Endpoints
	}
	var devices []string
	for _, l := range kernel {
		if l.Kind == network.StateDevice {
			devices = append(devices, "the container of device "+l.Name)
		}
	}
	return devices
}

func confirmed(env Env, all []network.StaleState, prefix netip.Prefix) bool {
	for _, l := range all {
		fmt.Fprintf(env.Stderr, "%s %s\n", l.Kind, l.Name)
	}
	if prefix.IsValid() {
		fmt.Fprintf(env.Stderr, "This node has prefix %v, which is never allocated again.\n", prefix)
	}
	fmt.Fprint(env.Stderr, "Remove all of it? [y/N] ")
	answer, _ := bufio.NewReader(env.Stdin).ReadString('\n') // the end of input counts as no
	if !strings.HasSuffix(answer, "\n") {
		fmt.Fprintln(env.Stderr)
	}
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes"
}

// removeAll removes all objects, also after a failure, and prints the removed ones.
func removeAll(env Env, out output, all []network.StaleState) error {
	removed := []removedView{}
	var errs []error
	for _, l := range all {
		if err := l.Remove(); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s %s was not removed: %w", l.Kind, l.Name, err))
			continue
		}
		removed = append(removed, removedView{l.Kind, l.Name})
	}
	if len(errs) > 0 {
		errs = append(errs, errors.New("fix the cause and run the command again"))
	}
	err := out.print(env.Stdout, struct {
		Removed []removedView `json:"removed"`
	}{removed}, func(w io.Writer) {
		for _, r := range removed {
			fmt.Fprintf(w, "removed\t%s\t%s\n", r.Kind, r.Name)
		}
		if len(all) == 0 {
			fmt.Fprintln(w, "nothing of the agent is on this machine")
		}
	})
	return errors.Join(append(errs, err)...)
}
