package suites

import (
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// The benchmark of the cache for VXLAN overlays compares each overlay with and without the cache in the same rounds
// (OC1). Its scenarios, metrics and rounds are those of package bench.

// SmokeOncache takes seconds. It judges nothing.
func SmokeOncache() bench.Options {
	return oncacheOptions("smoke", bench.Options{
		Rounds: 2, Warmup: 10 * time.Millisecond, Window: 50 * time.Millisecond,
	}, false)
}

// QuickOncache takes two minutes. Its gates only detect a cache that is broken or much slower.
func QuickOncache() bench.Options {
	return oncacheOptions("quick", bench.Options{
		Gates: oncacheQuickGates(), TooWide: 0.20,
		Rounds: 20, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}, false)
}

// FullOncache takes ten minutes.
func FullOncache() bench.Options {
	return oncacheOptions("full", bench.Options{
		Gates: OncacheGates(cachedOverlay, overlay), TooWide: 0.10,
		Rounds: 60, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}, true)
}

const (
	overlay       = "vxlan"
	cachedOverlay = "oncache"
	withCache     = "-oncache" // ends the name of a peer that is another peer with the cache
)

// talk is what the ONCache talk (NSDI '25) reports of the cache over Antrea's overlay: OC1, and slide 26.
var talk = map[string]string{
	"TCP_RR":    "1.36–1.41, CPU time of a byte 0.68–0.74",
	"UDP_RR":    "1.34–1.39, CPU time of a byte 0.68–0.72",
	"MEMCACHED": "1.28",
}

// oncacheOptions adds metrics and scenarios: the reference, every network with the cache, the same without it, and
// kernel VXLAN with single details of the cached one.
func oncacheOptions(form string, o bench.Options, details bool) bench.Options {
	o.Form = form
	names := []string{"native"}
	for _, s := range scenario.Scenarios() {
		if s.Uncached != "" {
			names = append(names, s.Name, s.Uncached)
		}
	}
	if details {
		names = append(names, "vxlan-tuned", "oncache-no-headroom")
	}
	o.Scenarios, _ = scenario.Pick(scenario.Scenarios(), names)
	for i := range o.Scenarios {
		if s := &o.Scenarios[i]; s.Uncached != "" {
			s.Of, s.Paper = s.Uncached, talk
		}
	}
	o.Metrics, _ = scenario.Pick(traffic.All(), []string{
		"TCP_RR", "UDP_RR", "TCP_CRR", "TCP_STREAM", "TCP_STREAM4", "MEMCACHED",
	})
	return o
}

// ComparePeers compares each peer NAME-oncache with the peer NAME, with the gates of a full run. Other peers are
// compared with kernel VXLAN.
func ComparePeers(o *bench.Options) {
	names := scenario.Names(o.Scenarios)
	known := scenario.Names(scenario.Scenarios())
	for i := range o.Scenarios {
		s := &o.Scenarios[i]
		if slices.Contains(known, s.Name) {
			continue
		}
		s.Of = overlay
		if of, cached := strings.CutSuffix(s.Name, withCache); cached && slices.Contains(names, of) {
			s.Of, s.Paper = of, talk
			if o.Form == "full" {
				o.Gates = append(o.Gates, OncacheGates(s.Name, of)...)
			}
		}
	}
}

// Limits of a full run. Those of TCP_RR, UDP_RR and CPU time are the talk's (OC1).
const (
	ofTCP = 1.36
	ofUDP = 1.34
	ofCPU = 0.74
	// Short connections and streams must not be slower: the interval must contain notSlower, or be above it. The limit
	// of the median keeps a run that is too noisy from passing. A short connection gains little: its first and last
	// packets pass the overlay, and the programs look at each and learn from some.
	notSlower       = 1.00
	notSlowerMedian = 0.95
)

// OncacheGates are the gates of a full run for an overlay with the cache, relative to the same without it.
func OncacheGates(with, without string) []bench.Gate {
	of := bench.Gate{Scenario: with, Against: without}
	gate := func(metric string, differs func(*bench.Gate)) bench.Gate {
		g := of
		g.Metric = metric
		differs(&g)
		return g
	}
	return []bench.Gate{
		gate("TCP_RR", func(g *bench.Gate) { g.AtLeast = ofTCP }),
		gate("UDP_RR", func(g *bench.Gate) { g.AtLeast = ofUDP }),
		gate("TCP_RR", func(g *bench.Gate) { g.CPU, g.AtMost = true, ofCPU }),
		gate("UDP_RR", func(g *bench.Gate) { g.CPU, g.AtMost = true, ofCPU }),
		gate("TCP_CRR", func(g *bench.Gate) { g.AtLeast, g.Reach = notSlowerMedian, notSlower }),
		gate("TCP_STREAM", func(g *bench.Gate) { g.AtLeast, g.Reach = notSlowerMedian, notSlower }),
		gate("TCP_STREAM4", func(g *bench.Gate) { g.AtLeast, g.Reach = notSlowerMedian, notSlower }),
	}
}

func oncacheQuickGates() []bench.Gate {
	return []bench.Gate{
		{Scenario: cachedOverlay, Against: overlay, Metric: "TCP_RR", AtLeast: 1.2},
		{Scenario: cachedOverlay, Against: overlay, Metric: "UDP_RR", AtLeast: 1.2},
		{Scenario: cachedOverlay, Against: overlay, Metric: "TCP_CRR", AtLeast: 0.8},
	}
}
