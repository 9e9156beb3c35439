package paper

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/humanize"
)

// Scenarios and metrics of the datapath benchmark for table 1's overheads.
const (
	bare, onNetpila, onNimitz = "native", "netpila", "nimitz-ebpf"
	transactions, stream      = "UDP_RR", "TCP_STREAM"
)

func (r *run) table1(ctx context.Context, f *Figure) error {
	nimitz, netpila, err := r.both(ctx, f)
	if err != nil {
		return err
	}
	space := func(all []grown) (string, error) {
		one, err := r.cluster(ctx, all[0].result.Scenario.Network, all[0].nodes, 1)
		if err != nil {
			return "", err
		}
		_, fewer := one.entries()
		each, from, _ := slopes(all)
		return fmt.Sprintf(
			"%.2f for each further node, %.2f for each container here",
			each,
			float64(from-fewer)/float64(r.Form.Containers-1),
		), nil
	}
	spaceNimitz, err := space(nimitz)
	if err != nil {
		return err
	}
	spaceNetpila, err := space(netpila)
	if err != nil {
		return err
	}
	messages := func(all []grown) string {
		first, last := all[0], all[len(all)-1]
		return fmt.Sprintf(
			"%s at %s nodes, %s at %s: with nodes^%.2f",
			humanize.Grouped(first.messages()),
			humanize.Grouped(first.nodes),
			humanize.Grouped(
				last.messages(),
			),
			humanize.Grouped(last.nodes),
			power(all, func(g grown) float64 { return float64(g.messages()) }),
		)
	}
	r.say("the datapath, %s", humanize.Of(r.Form.Datapath, "round", "rounds"))
	report, err := r.Measure.Datapath(ctx, datapath(r.Form.Datapath))
	if err != nil {
		return err
	}
	overheads := map[string]string{}
	for _, scenario := range []string{onNimitz, onNetpila} {
		for _, metric := range []string{transactions, stream} {
			ratio, err := ratioOf(report, scenario, metric)
			if err != nil {
				return err
			}
			overheads[scenario+metric] = overhead(ratio, metric == transactions)
		}
	}
	f.Rows = []Row{
		{"space of the pipeline, NIMITZ: entries", spaceNimitz, "O(cntnr) + O(node)", "table 1"},
		{"space of the pipeline, NETPILA: entries", spaceNetpila, "O(lcl cntnr)", "table 1"},
		{"messages to grow by 10 %, NIMITZ", messages(nimitz), "O(node²)", "table 1"},
		{"messages to grow by 10 %, NETPILA", messages(netpila), "O(node)", "table 1"},
		{"throughput of the offloading channel, NIMITZ", "", "~600/s", "table 1"},
		{"throughput of the offloading channel, NETPILA", "", "N/A", "table 1"},
		{"latency relative to node to node, NIMITZ", overheads[onNimitz+transactions], "+2.5 %", "table 1"},
		{"latency relative to node to node, NETPILA", overheads[onNetpila+transactions], "0", "table 1"},
		{"throughput relative to node to node, NIMITZ", overheads[onNimitz+stream], "−2.6 %", "table 1"},
		{"throughput relative to node to node, NETPILA", overheads[onNetpila+stream], "0", "table 1"},
	}
	f.Sizes = sentences(f.Sizes, fmt.Sprintf("datapath: %s", humanize.Of(report.Settings.Rounds, "round", "rounds")))
	f.Scenario = map[string]any{
		"clusters": append(scenarios(nimitz), scenarios(netpila)...),
		"datapath": report.Settings,
	}
	f.Ran = fmt.Sprintf(
		"Entries and messages are those of the clusters of figures 17 and 18, and of one with 1 container per "+
			"node. Latency is that of a transaction (%s) and throughput that of one connection (%s) of pilaster bench "+
			"datapath (docs/reference/benchmarks.md), with %s and %s relative to %s in the same rounds.",
		transactions,
		stream,
		onNimitz,
		onNetpila,
		bare,
	)
	f.Differs = fmt.Sprintf(
		"Here the CPUs of one machine encapsulate, translate and forward by programs between namespaces, with eBPF "+
			"maps instead of a NIC's table; the paper has NICs, and servers on a wire. Without a NIC the offloading "+
			"channel is not measured. Messages are all messages between agents and orchestrator in both directions; "+
			"at the largest size, NIMITZ's list queries, which §4.1 counts, were %s of %s.",
		humanize.Grouped(nimitz[len(nimitz)-1].queries()),
		humanize.Grouped(nimitz[len(nimitz)-1].messages()),
	)
	return nil
}

func datapath(rounds int) bench.Options {
	o := bench.Quick()
	o.Form, o.Gates, o.Rounds = "paper", nil, rounds
	o.Scenarios, _ = scenario.Pick(scenario.Scenarios(), []string{bare, onNetpila, onNimitz})
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{transactions, stream})
	return o
}

func ratioOf(from *bench.Report, scenario, metric string) (report.Interval, error) {
	i := slices.IndexFunc(
		from.Results,
		func(x bench.Result) bool { return x.Scenario == scenario && x.Metric == metric },
	)
	if i < 0 || from.Results[i].Ratio == nil {
		return report.Interval{}, fmt.Errorf("the bench has no %s of %s", metric, scenario)
	}
	return *from.Results[i].Ratio, nil
}

// overhead formats a ratio of speeds; a latency is the inverse of a speed.
func overhead(r report.Interval, latency bool) string {
	if latency {
		r = report.Interval{Median: 1 / r.Median, Low: 1 / r.High, High: 1 / r.Low}
	}
	percent := func(v float64) string { return fmt.Sprintf("%+.1f", 100*(v-1)) }
	return strings.ReplaceAll(
		fmt.Sprintf("%s %% (%s to %s)", percent(r.Median), percent(r.Low), percent(r.High)),
		"-",
		"−",
	)
}
