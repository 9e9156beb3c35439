package nic

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestFluctuation is NIMITZ §4.2 and fig 12 (NM9). With all causes container 2 falls far below what it would send again
// and again, and container 1 does not; with any one of them taken out, nothing in use is removed and nobody is ever
// slow.
func TestFluctuation(t *testing.T) {
	for seed := range uint64(3) {
		does := func(c change) (one, two Fluctuation, samples []Sample) {
			r := serverRun(seed)
			c.make(&r, seed)
			samples, err := r.Do(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return judge(r, samples, 0), judge(r, samples, 1), samples
		}
		one, two, samples := does(change{"as it was", func(*Run, uint64) {}})
		if one.Below > 0 || one.Lowest < 0.99*containerMax {
			t.Errorf("seed %d: container 1: %+v", seed, one)
		}
		if two.Below < 10 || two.Lowest > containerMax/2 || two.Mistaken < 5000 {
			t.Errorf("seed %d: container 2 does not fluctuate: %+v", seed, two)
		}
		if falls := falls(samples); falls < 2 {
			t.Errorf("seed %d: container 2 falls %d times: it does not come back", seed, falls)
		}
		for _, c := range append(cures(), free) {
			one, two, _ := does(c)
			if one.Below > 0 || two.Below > 0 || two.Lowest < 0.99*containerMax || two.Mistaken > 0 {
				t.Errorf("seed %d: %s, and the effect stays: %+v, %+v", seed, c.Name, one, two)
			}
		}
	}
}

// falls counts how often container 2 goes from its full rate to below two thirds.
func falls(samples []Sample) (n int) {
	up := false
	for _, s := range samples {
		if s.At < judgedFrom {
			continue
		}
		switch rate := s.Rates[1]; {
		case rate > 0.99*containerMax:
			up = true
		case rate < 0.66*containerMax && up:
			n, up = n+1, false
		}
	}
	return n
}

// TestLateCountersAlone: whatever the NIC's own times, without late counters nothing that is in use is removed; with
// them it is wherever revalidation takes too long.
func TestLateCountersAlone(t *testing.T) {
	late, nine := 0, 0
	for _, f := range drawn(t).Figures[1].Findings {
		removed := strings.HasSuffix(f.What, "removed in use")
		switch {
		case strings.HasPrefix(f.What, "the worst of these nine"):
			nine++
			if f.Value != 0 {
				t.Errorf("%s: %v", f.What, f.Value)
			}
		case removed:
			nine++
			if f.Value > 1000 {
				late++
			}
		}
	}
	if nine != 9+2 || late < 5 {
		t.Errorf("%d findings; late counters cost something in %d of 9", nine, late)
	}
}

// peakRun is figure 8's job, preheated by its rehearsal or not.
func peakRun(demand float64, preheated bool, seed uint64) Run {
	j := ownJob()
	r := j.run(demand, seed)
	if preheated {
		r.Pinned = j.table.Pins(j.rehearsed(demand, seed))
	}
	return r
}

// TestPeak is NIMITZ §3.3 and fig 8 (NM5): 1,000 new megaflows a second are more than the channel takes, 600 are not,
// and preheated ones wait for nothing.
func TestPeak(t *testing.T) {
	seconds := (peakEnd - peakBegin).Seconds()
	for _, c := range []struct {
		demand    float64
		preheated bool
		backlog   float64
	}{{1000, false, (1000 - 638) * seconds}, {600, false, 0}, {638, true, 0}, {1000, true, 0}} {
		r := peakRun(c.demand, c.preheated, 3)
		samples, err := r.Do(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		p := peakOf(samples, peakEnd)
		if off := math.Abs(float64(p.backlog) - c.backlog); off > 250 ||
			c.preheated && p.backlog > 40 { // a rehearsal may miss the last few
			t.Errorf("%+v: %d wait, want about %.0f", c, p.backlog, c.backlog)
		}
		if slow := c.backlog > 0; slow != (p.lowest < 0.9*400) || slow != (p.drained > time.Second) {
			t.Errorf("%+v: %+v", c, p)
		}
		if c.preheated { // with what another seed has shown: a part is enough, and without it the peak is not met
			r.Pinned = r.Pinned[:len(r.Pinned)/10]
			if samples, err = r.Do(t.Context()); err != nil {
				t.Fatal(err)
			}
			if p := peakOf(samples, peakEnd); c.demand == 1000 && p.backlog < 500 {
				t.Errorf("a tenth preheated, and only %d wait", p.backlog)
			}
		}
	}
}

// TestMatrix: what is recorded is what was sent to, the busiest first.
func TestMatrix(t *testing.T) {
	table := NewTable(remote(tenantA, 10, 5))
	burst := func(node int, from, to time.Duration) Flow { return table.flow(tenantA, 10, node, 0, Burst{from, to}) }
	traffic := NewTraffic(
		[]Flow{
			burst(1, 0, 2*time.Second),
			burst(4, time.Second, 9*time.Second),
			burst(1, 3*time.Second, 4*time.Second),
			burst(0, 9*time.Second, 10*time.Second),
		},
	)
	if got := traffic.Matrix(0, 9*time.Second); !slices.Equal(got, []Handle{4, 1}) {
		t.Errorf("recorded %v", got)
	}
	if got := traffic.Matrix(0, 3*time.Second); !slices.Equal(got, []Handle{1, 4}) {
		t.Errorf("recorded %v: those of as many packets come by their numbers", got)
	}
}

// TestCounts is fig 7 on every 16th node (NM4). Mean and P95 are fitted; the peak follows from how many nodes there
// are.
func TestCounts(t *testing.T) {
	mu, sigma := logNormal(jobMean, jobP95)
	if mean, p95 := math.Exp(mu+sigma*sigma/2), math.Exp(mu+1.6448536*sigma); math.Abs(mean-jobMean) > 1 ||
		math.Abs(p95-jobP95) > 1 {
		t.Errorf("fitted to mean %.0f and P95 %.0f", mean, p95)
	}
	if n := jobTable().Entries; n != jobEntries {
		t.Errorf("%d entries", n)
	}
	o, err := RunJob(t.Context(), 1, 16)
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(o.Mean/jobMean-1) > 0.15 || math.Abs(o.P95/jobP95-1) > 0.2 || o.Peak < 6000 || o.Peak > jobNodes-1 {
		t.Errorf("mean %.0f, P95 %.0f, peak %.0f of %d nodes", o.Mean, o.P95, o.Peak, len(o.Counts))
	}
}

var figures8And12 = sync.OnceValues(func() (*Report, error) { return Draw(context.Background(), 1, 8, 12) })

func drawn(t *testing.T) *Report {
	t.Helper()
	r, err := figures8And12()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestReport: every form and every plot says that it is a model.
func TestReport(t *testing.T) {
	if _, err := Draw(t.Context(), 1, 9); err == nil ||
		!strings.Contains(err.Error(), "there is one of each of [7 8 12]") {
		t.Errorf("figure 9: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Draw(ctx, 1, Numbers...); !errors.Is(err, context.Canceled) ||
		!strings.HasPrefix(err.Error(), "interrupted: ") {
		t.Errorf("a run that was interrupted: %v", err)
	}
	r := drawn(t)
	var text, page strings.Builder
	r.Table(&text)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]string{"text": text.String(), "page": page.String(), "JSON": string(data)} {
		if !strings.Contains(s, "A model and no measurement") {
			t.Errorf("%s does not say what it is", name)
		}
		for _, f := range r.Figures {
			for _, x := range f.Findings {
				if !strings.Contains(s, strings.ReplaceAll(x.What, "'", "&#39;")) && !strings.Contains(s, x.What) {
					t.Errorf("%s lacks %s", name, x.What)
				}
			}
		}
		if strings.Contains(s, "NaN") || strings.Contains(s, "Inf") {
			t.Errorf("%s has what is no number", name)
		}
	}
	plots := strings.Count(page.String(), "<svg ")
	if plots != 5 || strings.Count(page.String(), "Model, no measurement:</tspan>") != plots ||
		strings.Count(text.String(), "by the model:") != 2 {
		t.Errorf("%d plots, not all of which say that they are a model's", plots)
	}
	for seed, same := range map[uint64]bool{1: true, 2: false} {
		if again, err := Draw(t.Context(), seed, 8); err != nil ||
			reflect.DeepEqual(again.Figures[0], r.Figures[0]) != same {
			t.Errorf("seed %d, same as of seed 1: want %v; %v", seed, same, err)
		}
	}
}
