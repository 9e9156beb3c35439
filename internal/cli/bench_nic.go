package cli

import (
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/nic"
)

func newBenchNICCommand(env Env) *cobra.Command {
	var figure string
	var to reportPlace
	var seed uint64
	c := &cobra.Command{
		Use:   "nic",
		Short: "Run a model of NIMITZ's offloading to a NIC; it measures nothing",
		Long: `Run a model of how NIMITZ offloads its switch's entries to a NIC, and draw the paper's figures with it: how many
entries are offloaded (7), what the insertion channel bears and preheating (8), and throughput that fluctuates by
revalidation with late counters, and what removes that (12).

It is a model and no measurement: there is no NIC, no driver and no packet. What it says depends on its assumptions,
and the report lists them with where each comes from. The same seed gives the same figures. Figure 7 takes about half
a minute, the others some seconds. docs/nic.md explains it.`,
		Example: "  pilaster bench nic -o results\n  pilaster bench nic --figure 12 --seed 7 -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			numbers := nic.Numbers
			if figure != "all" {
				n, err := strconv.Atoi(figure)
				if err != nil || !slices.Contains(nic.Numbers, n) {
					return usage("--figure %q: say one of %s", figure, strings.Join(figureNames(), ", "))
				}
				numbers = []int{n}
			}
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			report, err := nic.Draw(c.Context(), seed, numbers...)
			if err != nil {
				return err
			}
			return writeReport(env.Stdout, report, to)
		},
	}
	c.Flags().StringVar(&figure, "figure", "all", "the paper's figure: "+strings.Join(figureNames(), ", "))
	c.Flags().Uint64Var(&seed, "seed", 1, "what is random follows from it")
	bindReport(c, &to)
	_ = c.RegisterFlagCompletionFunc("figure", cobra.FixedCompletions(figureNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("seed", cobra.NoFileCompletions)
	return c
}

func figureNames() (all []string) {
	for _, n := range nic.Numbers {
		all = append(all, strconv.Itoa(n))
	}
	return append(all, "all")
}
