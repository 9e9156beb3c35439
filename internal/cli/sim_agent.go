package cli

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/sim/agentprobe"
	"pilaster.io/pilaster/internal/tenant"
)

var simNetworks = tenant.Networks()

func newSimAgentCommand(env Env) *cobra.Command {
	o := agentprobe.Options{
		Networks:       simNetworks,
		Sizes:          []int{1000, 2000, 5000, 10_000},
		Containers:     31,
		NodeContainers: 31,
		Followers:      100,
		WarmUp:         20 * time.Second,
	}
	var to reportPlace
	with, without := tenant.NetworksWith(tenant.Mappings), tenant.NetworksWithout(tenant.Mappings)
	c := &cobra.Command{
		Use:   "agent",
		Short: "Measure the memory and messages of a real agent as a simulated cluster grows",
		Long: `Start one real agent with real containers in a lab of its own. Over TLS it follows an orchestrator whose
cluster has more simulated nodes in each step. When no more messages are sent, the command measures the agent: its
live heap after a collection, its resident memory, the messages received since the step before, and the entries of its
packet path. All containers are of one tenant. The command measures an agent for each network of the tenant.

It exits with 1 if the agent of network ` + without +
			` depends on the other nodes: after the first step its heap must stay
within 1 %, its resident memory within 5 %, and it must receive nothing but heartbeats. Network ` + with +
			` has no limits:
there each node needs mappings of all others.

A folder given with -o gets report.json, and report.html with plots. It needs root; run it on an idle machine.
docs/reference/simulation.md explains what is real.`,
		Example: "  pilaster sim agent -o results\n  pilaster sim agent --sizes 1000,10000,100000 --networks " +
			tenant.DefaultNetwork + " --node-containers 4 -o json",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := o.Check(); err != nil {
				return usage("%w; nothing was simulated", err)
			}
			for _, name := range o.Networks {
				if !slices.Contains(simNetworks, name) {
					return usage("--networks %q: use %s; nothing was simulated", name, strings.Join(simNetworks, ", "))
				}
			}
			if err := checkDataDir(o.Dir); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return fmt.Errorf(
					"pilaster sim agent needs root: the agent is real, with network namespaces and eBPF programs; " +
						"nothing was simulated",
				)
			}
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			o.Name = fmt.Sprintf("simagent-%d", os.Getpid())
			o.Log = slog.New(slog.NewTextHandler(env.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
			o.Progress = func(what string) { fmt.Fprintln(env.Stderr, what) }
			report, err := agentprobe.Run(c.Context(), o)
			if report.Measured() { // some steps are complete, also after an error
				if failed := writeReport(env.Stdout, report, to); failed != nil {
					return failed
				}
			}
			if err != nil {
				return err
			}
			if !report.Pass() {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringSliceVar(&o.Networks, "networks", o.Networks, "networks of the tenant, measured one after the other")
	f.IntSliceVar(&o.Sizes, "sizes", o.Sizes, "simulated nodes in each step, in ascending order")
	f.IntVar(&o.Containers, "containers", o.Containers, "containers of the agent")
	f.IntVar(&o.NodeContainers, "node-containers", o.NodeContainers, "containers of each simulated node")
	f.IntVar(
		&o.Followers,
		"followers",
		o.Followers,
		"simulated nodes on "+with+" that follow the orchestrator, which sends each of them all mappings; the others "+
			"create their containers and end; 0 means all follow",
	)
	f.StringVar(
		&o.Dir,
		"data-dir",
		os.TempDir(),
		"folder on a real disk, for the orchestrator's etcd during the run",
	)
	_ = c.RegisterFlagCompletionFunc(
		"networks",
		cobra.FixedCompletions(simNetworks, cobra.ShellCompDirectiveNoFileComp),
	)
	for _, number := range []string{"sizes", "containers", "node-containers", "followers"} {
		_ = c.RegisterFlagCompletionFunc(number, cobra.NoFileCompletions)
	}
	_ = c.MarkFlagDirname("data-dir")
	bindReport(c, &to)
	return c
}
