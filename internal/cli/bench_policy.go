package cli

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/ramp"
	"pilaster.io/pilaster/internal/bench/sharing"
	"pilaster.io/pilaster/internal/bench/traffic"
)

func newBenchPolicyCommand(env Env) *cobra.Command {
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "policy",
		Short: "Compare containers with 0 to 10,000 policy rules, and netfilter with the same rules",
		Long: `Compare the speed of containers under a NetworkPolicy of 1 to 10,000 rules, the last of which admits the
client, with that of a tenant without policies, and with routed containers behind the same rules of netfilter. All are
measured in one run, in turn and in random order, as "pilaster bench datapath" does. The command then measures first
packets, which need a lookup of the rules: the program's run time for one, by number of rules and by size (table A1 of
the Nezha paper).

The command fails if a policy costs more than the gate allows, or if the run was too noisy to decide. Run it on an idle
machine. docs/reference/benchmarks.md explains scenarios, metrics and method.`,
		Example: "  pilaster bench policy --quick -o results\n  pilaster bench policy --full -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireRoot("bench"); err != nil {
				return err
			}
			forms := map[string]func() bench.Options{
				"quick": bench.QuickPolicy, "full": bench.FullPolicy, "smoke": bench.SmokePolicy,
			}
			return reportBench(c.Context(), env, forms[form()](), false, to)
		},
	}
	form = bindForms(c,
		formFlag{"quick", "three minutes (default)"},
		formFlag{"full", "fifteen minutes: more rounds, and more traffic"},
		formFlag{"smoke", smokeForm})
	bindReport(c, &to)
	return c
}

func newBenchOffloadCommand(env Env) *cobra.Command {
	var from, page string
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "offload",
		Short: "Measure what load sharing costs each node, and model its gain",
		Long: `Measure the time of each program on the way of a TCP transaction to a container, with and without a
frontend that looks up the rules, for rule sets of 1 rule to 262,144 CIDRs. Three nodes, the sender's, the backend and
the frontend, are namespaces of this machine. Transactions connect from random addresses and new ports, so that each
needs a lookup.

From these times the command computes the gain with 1, 2, 4 and 8 frontends. That is a model, not a measurement: nothing
but the programs limits the nodes. The report has the gain of each rule set, and a curve over the time of a lookup with
the point of the Nezha paper on it; the answers of a frontend per second by rules and size of packets, beside table A1
of the paper; and how many tenants' rules fit on a node and its frontends.

A folder given with -o gets report.json, and report.html with plots. Run it on an idle machine.
docs/results/offload.md explains the figures.`,
		Example: "  pilaster bench offload --quick -o results\n" +
			"  pilaster bench offload --from results/report.json --page docs/results/offload.md",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			o := map[string]func() sharing.Options{
				"quick": sharing.Quick, "full": sharing.Full, "smoke": sharing.Smoke,
			}[form()]()
			if from != "" {
				r, err := readSharing(from)
				if err != nil {
					return err
				}
				return runReport(env, to, func() (benchReport, bool, error) { return r, true, r.Fill(page) })
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if o.CPU, err = traffic.LastCPU(); err != nil {
				return err
			}
			o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), progressOf(env, "step")
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := sharing.Run(c.Context(), o)
				if err != nil {
					return nil, false, err
				}
				return r, true, r.Fill(page)
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "three minutes: fewer rounds (default)"},
		formFlag{"full", "fifteen minutes"},
		formFlag{"smoke", smokeForm})
	c.Flags().StringVar(&from, "from", "", "print this report.json of an earlier run, and measure nothing")
	c.Flags().StringVar(&page, "page", "", "Markdown file whose tables are replaced by those of the report")
	bindReport(c, &to)
	_ = c.MarkFlagFilename("from", "json")
	_ = c.MarkFlagFilename("page", "md")
	c.AddCommand(newBenchRampCommand(env))
	return c
}

func newBenchRampCommand(env Env) *cobra.Command {
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "ramp",
		Short: "Draw the load of a backend and its frontends while connections are opened at a growing rate",
		Long: `Draw the load of a backend and its frontends over time. In a lab with the real daemons, clients open
connections to a container at a growing rate, and at 70 % of a budget the command starts an offload. Load
is the run time of a node's programs: all nodes share this machine, so nothing else tells them apart. The
budget is chosen so that 70 % are reached in the middle.

The command fails if a connection fails. It needs pilaster-cni beside this program. A folder given with -o gets
report.json, and report.html with the plot. docs/results/offload.md explains the figures.`,
		Example: "  pilaster bench offload ramp -o results",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			o := map[string]func() ramp.Options{
				"quick": ramp.Quick, "full": ramp.Full, "smoke": ramp.Smoke,
			}[form()]()
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if o.Binary, err = os.Executable(); err != nil {
				return fmt.Errorf("find this program, which labs run: %w", err)
			}
			o.Name, o.Progress = "bench-ramp", func(what string) { fmt.Fprintln(env.Stderr, what) }
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := ramp.Run(c.Context(), o)
				return r, err == nil, err
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "a minute, with four frontends (default)"},
		formFlag{"full", "three minutes"},
		formFlag{"smoke", smokeForm})
	bindReport(c, &to)
	return c
}

// readSharing reads the report of an earlier run.
func readSharing(path string) (*sharing.Report, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, usage("--from: %w", err)
	}
	r := new(sharing.Report)
	if err := json.Unmarshal(b, r); err != nil || len(r.Sets) == 0 {
		return nil, usage("--from %s is no report of bench offload; use report.json of `pilaster bench offload -o "+
			"FOLDER`", path)
	}
	return r, nil
}
