package suites

import (
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
)

// egressReport is a report of ten rounds, in which every scenario has the speed 1000 in every metric, except one.
func egressReport(o bench.Options, of, metric string, speed float64) *bench.Report {
	r := &bench.Report{Pass: true, Settings: bench.Settings{Seed: 1, TooWide: o.TooWide}}
	for _, s := range o.Scenarios {
		for _, m := range o.Metrics {
			x := bench.Result{Scenario: s.Name, Metric: m.Name, Samples: slices.Repeat([]float64{1000}, 10)}
			if s.Name == of && m.Name == metric {
				x.Samples = slices.Repeat([]float64{speed}, 10)
			}
			r.Results = append(r.Results, x)
		}
	}
	return r
}

// TestEgressGatesNotice: each gate passes at its limit, and is the only one to fail a little below it.
func TestEgressGatesNotice(t *testing.T) {
	for _, o := range []bench.Options{QuickEgress(), FullEgress()} {
		limits := map[[2]string]float64{
			{"egress", "TCP_RR"}: 970, {"egress", "TCP_CRR"}: 1000,
			{"egress-gateway", "TCP_RR"}: 1000, {"egress-gateway", "TCP_CRR"}: 1000,
		}
		for of, limit := range limits {
			good := egressReport(o, of[0], of[1], limit)
			good.Judge(o)
			if !good.Pass || len(good.Checks) != len(limits) || len(good.NotJudged) > 0 {
				t.Errorf("%s: %v at its limit: pass %v, checks %+v, not checked %+v", o.Form, of, good.Pass,
					good.Checks, good.NotJudged)
			}
			bad := egressReport(o, of[0], of[1], limit-5)
			bad.Judge(o)
			var missed [][2]string
			for _, c := range bad.Checks {
				if c.Verdict != bench.Passed {
					missed = append(missed, [2]string{c.Scenario, c.Metric})
				}
			}
			if bad.Pass || !slices.Equal(missed, [][2]string{of}) {
				t.Errorf("%s: %v below its limit: pass %v, missed %v", o.Form, of, bad.Pass, missed)
			}
		}
	}
}

// TestEgressForms: the reference is traffic between containers, all scenarios exist, and the smoke form judges nothing.
func TestEgressForms(t *testing.T) {
	for many, o := range map[int]bench.Options{6: SmokeEgress(), 8: QuickEgress()} {
		names := scenario.Names(o.Scenarios)
		if len(names) != many || names[0] != betweenContainers || len(o.Metrics) != 4 ||
			(o.Form == "smoke") != (len(o.Gates) == 0) {
			t.Errorf("%s: scenarios %q, metrics %q, %d gates", o.Form, names, scenario.Names(o.Metrics), len(o.Gates))
		}
	}
}
