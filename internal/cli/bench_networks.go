package cli

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/networks"
	"pilaster.io/pilaster/internal/bench/scenario"
)

func newBenchNetworksCommand(env Env) *cobra.Command {
	var chosen, peers []string
	var flannel, from, page string
	var to reportPlace
	var form func() string
	known := networks.All()
	forms := map[string]func() networks.Options{
		"quick": networks.Quick, "full": networks.Full, "smoke": networks.Smoke,
	}
	c := &cobra.Command{
		Use:   "networks",
		Short: "Compare all networks with each other, with bare nodes and with overlays of the kernel",
		Long: `Compare all networks of this build with each other, with bare nodes, with kernel VXLAN and with what
peers build, such as Flannel, in one run and one table:

  - speed, as bench datapath measures it;
  - bytes on the wire, of a transaction and of a full segment, read from the node's fabric device;
  - entries that a node has for containers of another node, read from its kernel or Open vSwitch;
  - messages of the orchestrator when a container starts, moves and stops;
  - the time until a started container is reachable from another node;
  - the same entries and messages in a simulated cluster around two real nodes, compared with arithmetic;
  - what a network isolates and hides by design, with the tests that show it.

The command fails if a simulated cluster has other entries or messages than arithmetic predicts. No speed has a limit
here. It starts labs, and needs pilaster-cni beside this program. Run it on an idle machine. docs/networks.md explains
the figures.

A folder given with -o gets report.json, and report.html with plots. With --from, the command measures nothing and
prints an earlier report.json; with --page it replaces the tables of a Markdown file, between its marks.

Networks: ` + strings.Join(networks.Names(known), ", "),
		Example: `  pilaster bench networks --quick -o results
  pilaster bench networks --full --flannel ./flannel.sh -o results
  pilaster bench networks --networks ` + strings.Join(networks.Names(known)[:3], ",") + ` -o json
  pilaster bench networks --from results/report.json --page docs/networks.md`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if from != "" {
				r, err := readNetworks(from)
				if err != nil {
					return err
				}
				return runReport(env, to, func() (benchReport, bool, error) { return r, r.Pass, r.Fill(page) })
			}
			o := forms[form()]()
			if err := chooseNetworks(&o, known, chosen); err != nil {
				return err
			}
			if flannel != "" {
				peers = append(peers, networks.Flannel+"="+flannel)
			}
			if err := addNetworkPeers(&o, peers); err != nil {
				return err
			}
			if err := prepareNetworks(&o, env, len(chosen) > 0); err != nil {
				return err
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := networks.Run(c.Context(), o)
				if err != nil {
					return nil, false, err
				}
				return r, r.Pass, r.Fill(page)
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "seven minutes: 100 simulated nodes with 10 containers each (default)"},
		formFlag{"full", "half an hour: 1,000 simulated nodes with 80 containers each"},
		formFlag{"smoke", smokeForm})
	f := c.Flags()
	f.StringSliceVar(&chosen, "networks", nil, "these only, by name; the first one is what speeds are relative to")
	f.StringVar(&flannel, "flannel", "", "COMMAND that builds Flannel between two of our nodes, as "+
		"--peer "+networks.Flannel+"=COMMAND")
	f.StringArrayVar(&peers, "peer", nil, "NAME=COMMAND: a network that COMMAND builds between two of our nodes, "+
		"see docs/howto/benchmark-peer.md; may be repeated")
	f.StringVar(&from, "from", "", "print this report.json of an earlier run, and measure nothing")
	f.StringVar(&page, "page", "", "Markdown file whose tables are replaced by those of the report")
	bindReport(c, &to)
	_ = c.RegisterFlagCompletionFunc("networks", listed(networks.Names(known)))
	_ = c.RegisterFlagCompletionFunc("peer", cobra.NoFileCompletions)
	_ = c.MarkFlagFilename("from", "json")
	_ = c.MarkFlagFilename("page", "md")
	c.MarkFlagsMutuallyExclusive("from", "networks")
	c.MarkFlagsMutuallyExclusive("from", "flannel")
	c.MarkFlagsMutuallyExclusive("from", "peer")
	return c
}

// readNetworks reads the report of an earlier run.
func readNetworks(path string) (*networks.Report, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, usage("--from: %w", err)
	}
	r := new(networks.Report)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, usage("--from %s: %w; use report.json of `pilaster bench networks -o FOLDER`", path, err)
	}
	if r.Speed == nil {
		return nil, usage("--from %s is no report of bench networks; use report.json of `pilaster bench networks -o "+
			"FOLDER`", path)
	}
	return r, nil
}

// chooseNetworks replaces the rows by those that the user has named.
func chooseNetworks(o *networks.Options, known []networks.Network, chosen []string) error {
	if chosen == nil {
		return nil
	}
	if len(chosen) == 0 {
		return usage("--networks is empty; omit it, or name some")
	}
	for _, name := range chosen {
		if !slices.Contains(networks.Names(known), name) {
			return usage("--networks: there is no network %q; use some of %s", name,
				strings.Join(networks.Names(known), ", "))
		}
	}
	o.Networks = slices.DeleteFunc(slices.Clone(known),
		func(n networks.Network) bool { return !slices.Contains(chosen, n.Name) })
	return nil
}

// addNetworkPeers adds peers after our own rows.
func addNetworkPeers(o *networks.Options, peers []string) error {
	if err := addPeers(&o.Speed, peers); err != nil {
		return err
	}
	for _, s := range o.Speed.Scenarios {
		o.Networks = append(o.Networks, networks.Peer(s.Name))
	}
	return nil
}

// prepareNetworks finds the scenarios of all rows. A row that this machine does not support is left out, or refused if
// the user has named it.
func prepareNetworks(o *networks.Options, env Env, named bool) error {
	if err := requireRoot("bench"); err != nil {
		return err
	}
	peers := o.Speed.Scenarios
	o.Speed.Scenarios = nil
	var rows []networks.Network
	for _, n := range o.Networks {
		all := slices.Concat(scenario.Scenarios(), peers)
		i := slices.IndexFunc(all, func(s scenario.Scenario) bool { return s.Name == n.Scenario })
		can, reasons := scenario.Offered(all[i : i+1])
		if len(can) == 0 {
			if named {
				return usage("--networks: %s; nothing was measured", reasons[0])
			}
			_, reason, _ := strings.Cut(reasons[0], ": ")
			o.Missing = append(o.Missing, networks.Missing{Network: n.Name, Reason: reason})
			continue
		}
		rows, o.Speed.Scenarios = append(rows, n), append(o.Speed.Scenarios, can[0])
	}
	o.Networks = rows
	if err := prepare(&o.Speed, env); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, which labs run: %w", err)
	}
	o.Binary, o.Name = self, "bench-networks"
	if err := networks.CheckLabs(*o); err != nil {
		return fmt.Errorf("%w; nothing was measured", err)
	}
	o.Progress = func(what string) { fmt.Fprintln(env.Stderr, what) }
	return nil
}
