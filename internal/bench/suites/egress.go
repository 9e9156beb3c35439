package suites

import (
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// The benchmark of egress compares containers that talk to a host outside with containers that talk to each other, and
// with the kernel's translation on the same topology.

// betweenContainers is the reference.
const betweenContainers = "netpila"

// withPolicies is the reference of new connections: its nodes have a session for each connection, as egress has.
func withPolicies() string { return scenario.RuleScenarios()[0].Name }

// SmokeEgress takes seconds. It judges nothing.
func SmokeEgress() bench.Options {
	o := egressOptions("smoke", bench.Options{
		Rounds: 1, Warmup: 10 * time.Millisecond, Window: 50 * time.Millisecond,
	})
	names := append([]string{betweenContainers}, scenario.Names(scenario.EgressScenarios())...)
	o.Scenarios, _ = scenario.Pick(o.Scenarios, names)
	return o
}

// QuickEgress takes two minutes.
func QuickEgress() bench.Options {
	return egressOptions("quick", bench.Options{
		Gates: egressGates(), TooWide: 0.10,
		Rounds: 24, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	})
}

// FullEgress takes five minutes.
func FullEgress() bench.Options {
	o := QuickEgress()
	o.Form, o.Rounds = "full", 60
	return o
}

func egressOptions(form string, o bench.Options) bench.Options {
	o.Form = form
	names := slices.Concat([]string{betweenContainers, withPolicies()}, scenario.Names(scenario.EgressScenarios()),
		[]string{"native"})
	for _, name := range names { // in this order: the first is the reference
		s, _ := scenario.Pick(scenario.Scenarios(), []string{name})
		o.Scenarios = append(o.Scenarios, s...)
	}
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "UDP_RR", "TCP_CRR", "TCP_STREAM"})
	return o
}

// egressGates compare egress with containers that talk to each other, new connections with those that have policies,
// which use the session table, too; and a gateway with the kernel's.
func egressGates() []bench.Gate {
	const (
		ofContainers = 0.97
		ofPolicies   = 1.00
		ofKernel     = 1.00
	)
	return []bench.Gate{
		{Scenario: "egress", Against: betweenContainers, Metric: "TCP_RR", AtLeast: ofContainers},
		{Scenario: "egress", Against: withPolicies(), Metric: "TCP_CRR", AtLeast: ofPolicies},
		{Scenario: "egress-gateway", Against: "egress-masquerade", Metric: "TCP_RR", AtLeast: ofKernel},
		{Scenario: "egress-gateway", Against: "egress-masquerade", Metric: "TCP_CRR", AtLeast: ofKernel},
	}
}
