package suites

import (
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// The benchmark of services compares a client that talks to a container through a service with one that talks to the
// container itself.

// SmokeServices takes seconds. It judges nothing.
func SmokeServices() bench.Options {
	o := serviceOptions("smoke", bench.Options{
		Rounds: 1, Warmup: 10 * time.Millisecond, Window: 50 * time.Millisecond,
	})
	o.Scenarios, _ = scenario.Pick(o.Scenarios, []string{betweenContainers, "service-connect", "service-packet"})
	return o
}

// QuickServices takes two minutes.
func QuickServices() bench.Options {
	return serviceOptions("quick", bench.Options{
		Gates: serviceGates(), TooWide: 0.10,
		Rounds: 24, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	})
}

// FullServices takes five minutes.
func FullServices() bench.Options {
	o := QuickServices()
	o.Form, o.Rounds = "full", 60
	return o
}

func serviceOptions(form string, o bench.Options) bench.Options {
	o.Form = form
	names := slices.Concat([]string{betweenContainers, withPolicies()}, scenario.Names(scenario.ServiceScenarios()))
	for _, name := range names { // in this order: the first is the reference
		s, _ := scenario.Pick(scenario.Scenarios(), []string{name})
		o.Scenarios = append(o.Scenarios, s...)
	}
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "UDP_RR", "TCP_CRR", "TCP_STREAM"})
	return o
}

// CompareKubeProxy compares services with the peers that are kube-proxy's rules: test/e2e/kube-proxy.sh by its three
// names. New connections must be faster in a run that judges.
func CompareKubeProxy(o *bench.Options) {
	const faster = 1.15
	names := scenario.Names(o.Scenarios)
	for i := range o.Scenarios {
		s := &o.Scenarios[i]
		peer := map[string]string{
			"service-connect":       kubeProxy,
			"service-connect-10000": kubeProxy + "-10000",
			"node-port":             kubeProxy + "-node-port",
		}[s.Name]
		if peer == "" || !slices.Contains(names, peer) {
			continue
		}
		s.Of = peer
		if s.Name == "service-connect-10000" && len(o.Gates) > 0 {
			o.Gates = append(o.Gates, bench.Gate{Scenario: s.Name, Against: peer, Metric: "TCP_CRR", AtLeast: faster})
		}
	}
}

const kubeProxy = "kube-proxy"

// serviceGates compare services with the backend itself; new connections on the packet path with those of a tenant with
// policies, which use the session table, too; and one service with one of many.
func serviceGates() []bench.Gate {
	const (
		connectRR  = 0.99
		connectCRR = 0.97
		packetRR   = 0.95
		ofPolicies = 1.00
		ofOne      = 0.97
	)
	return []bench.Gate{
		{Scenario: "service-connect", Against: betweenContainers, Metric: "TCP_RR", AtLeast: connectRR},
		{Scenario: "service-connect", Against: betweenContainers, Metric: "TCP_CRR", AtLeast: connectCRR},
		{Scenario: "service-packet", Against: betweenContainers, Metric: "TCP_RR", AtLeast: packetRR},
		{Scenario: "service-packet", Against: withPolicies(), Metric: "TCP_CRR", AtLeast: ofPolicies},
		{Scenario: "service-connect-10000", Against: "service-connect", Metric: "TCP_CRR", AtLeast: ofOne},
		{Scenario: "service-packet-10000", Against: "service-packet", Metric: "TCP_CRR", AtLeast: ofOne},
	}
}
