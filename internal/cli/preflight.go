package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/preflight"
)

func newPreflightCommand(env Env) *cobra.Command {
	config := preflight.Config{Plan: address.DefaultPlan()}
	var tokenFile, stateDir, nodePrefix string
	var out output
	c := &cobra.Command{
		Use:   "preflight",
		Short: "See whether this machine can be a node",
		Long: `See whether this machine can be a node, before an agent is started on it. Nothing is changed. Features
of the kernel are tried by using them, in network namespaces made for that and gone afterwards.

With --orchestrator and --token-file it also calls at the orchestrator, without joining. A machine that has a prefix,
by its agent's state or --node-prefix, sends its router two packets for it, one with a false source: the first
comes back where the fabric has the node's route, the second where it checks no sources.

A line a check: ok, warn, fail, or todo for what could not be checked, and what to do. The exit status is 1 where
something failed, and 2 where nothing was checked.`,
		Example: `  pilaster preflight --uplink eth0
  pilaster preflight --uplink eth0 --orchestrator https://[2001:db8::1]:7070 --token-file /etc/pilaster/join-token`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := config.Plan.Validate(); err != nil {
				return &exitError{ExitUsage, err}
			}
			if config.MTUReserve < 0 {
				return usage("--mtu-reserve %d is negative", config.MTUReserve)
			}
			if tokenFile != "" {
				b, err := os.ReadFile(tokenFile)
				if err != nil {
					return usage("--token-file: %w; nothing was checked", err)
				}
				config.Token = string(b)
			}
			if nodePrefix != "" {
				p, err := parseNodePrefix(nodePrefix)
				if err != nil {
					return err
				}
				config.NodePrefix = p
			}
			state, _ := agent.ReadDiskState(stateDir) // what cannot be read is of no node that could be told about
			if cluster := state.Node.Cluster; nodePrefix == "" && cluster != nil {
				config.NodePrefix = cluster.Prefix
			}
			for _, r := range state.Endpoints {
				if r != nil {
					config.Endpoints = append(config.Endpoints, *r)
				}
			}
			slices.SortFunc(config.Endpoints, func(a, b endpoint.Record) int { return cmp.Compare(a.ID, b.ID) })
			results := preflight.Run(c.Context(), config)
			if err := out.print(env.Stdout, results, func(w io.Writer) { showResults(w, results) }); err != nil {
				return err
			}
			if preflight.Failed(results) {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&config.Uplink, "uplink", "", "device to the fabric")
	f.StringVar(&config.URL, "orchestrator", "", "URL of the orchestrator, https://host:port")
	f.StringVar(&tokenFile, "token-file", "", "file with the join token")
	f.TextVar(&config.Plan.Base, "base-prefix", config.Plan.Base, "the `prefix` node /64s are cut from")
	f.TextVar(
		&config.Plan.Private,
		"private-prefix",
		config.Plan.Private,
		"the `prefix` of the addresses containers see",
	)
	f.StringVar(
		&nodePrefix,
		"node-prefix",
		"",
		"the /64 that the fabric routes to this node (default: as the agent's state says)",
	)
	agentState(c, &stateDir)
	agentPins(c, &config.BPFFS)
	f.IntVar(&config.MTUReserve, "mtu-reserve", 0, "bytes the containers' MTU stays below the uplink's")
	bindDevice(c, &config.Device)
	_ = c.MarkFlagRequired("uplink")
	c.MarkFlagsRequiredTogether("orchestrator", "token-file")
	out.bind(c)
	return c
}

func showResults(w io.Writer, results []preflight.Result) {
	for _, r := range results {
		fmt.Fprintf(w, "%s\t%s\t%s", r.State, r.Check, r.Says)
		if r.Do != "" {
			fmt.Fprintf(w, "; %s", r.Do)
		}
		fmt.Fprintln(w)
	}
}
