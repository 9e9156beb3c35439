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
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/preflight"
)

func newPreflightCommand(env Env) *cobra.Command {
	config := preflight.Config{Plan: address.DefaultPlan()}
	var tokenFile, stateDir, nodePrefix string
	var out output
	c := &cobra.Command{
		Use:   "preflight",
		Short: "Check whether this machine can be a node",
		Long: `Check whether this machine can be a node, before an agent is started on it. Nothing is changed. The
command tests kernel features by using them in temporary network namespaces.

With --orchestrator and --token-file it also connects to the orchestrator, without joining. If the
machine has a node prefix, from its agent's state or --node-prefix, the command sends two packets to the
router, one of them with a false source address. The first returns if the fabric has a route to the node
prefix. The second returns if the fabric does not check source addresses.

Each check prints one line: ok, warn, fail, or todo for a check that was not possible, and what to do.
The exit status is 1 if a check failed, and 2 if nothing was checked.`,
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
			disk, _ := agent.ReadDiskState(stateDir) // an unreadable state counts as none
			if m, joined := state.Peek(stateDir); nodePrefix == "" && joined {
				config.NodePrefix = m.Prefix
				if !config.Plan.Egress.IsValid() {
					config.Plan.Egress = m.Plan.Egress
				}
			}
			for _, r := range disk.Endpoints {
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
	bindUplinks(c, &config.Uplinks)
	f.StringVar(&config.URL, "orchestrator", "", "URL of the orchestrator, https://host:port")
	f.StringVar(&tokenFile, "token-file", "", "file with the join token")
	f.TextVar(&config.Plan.Base, "base-prefix", config.Plan.Base, "the `prefix` that node /64s are allocated from")
	f.TextVar(
		&config.Plan.Private,
		"private-prefix",
		config.Plan.Private,
		"the `prefix` of the addresses that containers see",
	)
	f.TextVar(&config.Plan.Egress, "egress-prefix", config.Plan.Egress,
		"the `prefix` of the addresses that hosts outside see, if the cluster has one")
	f.StringVar(
		&nodePrefix,
		"node-prefix",
		"",
		"the /64 that the fabric routes to this node (default: from the agent's state)",
	)
	agentState(c, &stateDir)
	agentPins(c, &config.BPFFS)
	f.IntVar(&config.MTUReserve, "mtu-reserve", 0, "bytes by which the containers' MTU is smaller than the uplink's")
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
