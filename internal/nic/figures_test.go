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

// TestFluctuation covers NIMITZ §4.2 and fig 12 (NM9). With all causes, container 2 repeatedly falls far below its
// offered load, and container 1 does not. If one of the causes is removed, no entry in use is removed, and both
// containers are always fast.
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
		one, two, samples := does(change{"as in the paper", func(*Run, uint64) {}})
		if one.Below > 0 || one.Lowest < 0.99*containerMax {
			t.Errorf("seed %d: container 1: %+v", seed, one)
		}
		if two.Below < 10 || two.Lowest > containerMax/2 || two.Mistaken < 5000 {
			t.Errorf("seed %d: container 2 does not fluctuate: %+v", seed, two)
		}
		if falls := falls(samples); falls < 2 {
			t.Errorf("seed %d: container 2 falls %d times; want repeated falls and recoveries", seed, falls)
		}
		for _, c := range append(cures(), free) {
			one, two, _ := does(c)
			if one.Below > 0 || two.Below > 0 || two.Lowest < 0.99*containerMax || two.Mistaken > 0 {
				t.Errorf("seed %d: the effect remains with %s: %+v, %+v", seed, c.Name, one, two)
			}
		}
	}
}

// falls counts the falls of container 2 from its full rate to less than two thirds.
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

// TestLateCountersAlone: without late counters, the switch removes no entry in use, whatever the NIC's times are. With
// late counters, it removes entries in use if revalidation takes too long.
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
		t.Errorf("got %d findings; late counters have an effect in %d of 9", nine, late)
	}
}

// peakRun is figure 8's job, optionally preheated from its rehearsal.
func peakRun(demand float64, preheated bool, seed uint64) Run {
	j := ownJob()
	r := j.run(demand, seed)
	if preheated {
		r.Pinned = j.table.Pins(j.rehearsed(demand, seed))
	}
	return r
}

// TestPeak covers NIMITZ §3.3 and fig 8 (NM5): 1,000 new megaflows per second exceed the channel's rate, 600 do not,
// and preheated megaflows do not wait.
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
			c.preheated && p.backlog > 40 { // a rehearsal may lack the last few
			t.Errorf("%+v: got a queue of %d, want about %.0f", c, p.backlog, c.backlog)
		}
		if slow := c.backlog > 0; slow != (p.lowest < 0.9*400) || slow != (p.drained > time.Second) {
			t.Errorf("%+v: %+v", c, p)
		}
		if c.preheated { // with a tenth of the recorded entries, preheating is not enough for the peak
			r.Pinned = r.Pinned[:len(r.Pinned)/10]
			if samples, err = r.Do(t.Context()); err != nil {
				t.Fatal(err)
			}
			if p := peakOf(samples, peakEnd); c.demand == 1000 && p.backlog < 500 {
				t.Errorf("with a tenth preheated, only %d wait", p.backlog)
			}
		}
	}
}

// TestMatrix: the matrix has the destinations that had packets, the busiest first.
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
		t.Errorf("got matrix %v", got)
	}
	if got := traffic.Matrix(0, 3*time.Second); !slices.Equal(got, []Handle{1, 4}) {
		t.Errorf("got matrix %v; destinations with equal packets must be in order of their numbers", got)
	}
}

// TestCounts covers fig 7 on every 16th node (NM4). Mean and P95 are fitted; the peak follows from the number of nodes.
func TestCounts(t *testing.T) {
	mu, sigma := logNormal(jobMean, jobP95)
	if mean, p95 := math.Exp(mu+sigma*sigma/2), math.Exp(mu+1.6448536*sigma); math.Abs(mean-jobMean) > 1 ||
		math.Abs(p95-jobP95) > 1 {
		t.Errorf("the distribution has mean %.0f and P95 %.0f", mean, p95)
	}
	if n := jobTable().Entries; n != jobEntries {
		t.Errorf("%d entries", n)
	}
	o, err := RunJob(t.Context(), 1, 16)
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(o.Mean/jobMean-1) > 0.15 || math.Abs(o.P95/jobP95-1) > 0.2 || o.Peak < 6000 || o.Peak > jobNodes-1 {
		t.Errorf("got mean %.0f, P95 %.0f, peak %.0f over %d nodes", o.Mean, o.P95, o.Peak, len(o.Counts))
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

// TestReport: every format and every plot states that it is a model.
func TestReport(t *testing.T) {
	if _, err := Draw(t.Context(), 1, 9); err == nil ||
		!strings.Contains(err.Error(), "choose from [7 8 12]") {
		t.Errorf("figure 9: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Draw(ctx, 1, Numbers...); !errors.Is(err, context.Canceled) ||
		!strings.HasPrefix(err.Error(), "interrupted: ") {
		t.Errorf("interrupted run: got error %v", err)
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
		if !strings.Contains(s, "A model, not a measurement") {
			t.Errorf("%s lacks the note that it is a model", name)
		}
		for _, f := range r.Figures {
			for _, x := range f.Findings {
				if !strings.Contains(s, strings.ReplaceAll(x.What, "'", "&#39;")) && !strings.Contains(s, x.What) {
					t.Errorf("%s lacks %s", name, x.What)
				}
			}
		}
		if strings.Contains(s, "NaN") || strings.Contains(s, "Inf") {
			t.Errorf("%s has a value that is not a number", name)
		}
	}
	plots := strings.Count(page.String(), "<svg ")
	if plots != 5 || strings.Count(page.String(), "Model, not a measurement:</tspan>") != plots ||
		strings.Count(text.String(), "by the model:") != 2 {
		t.Errorf("got %d plots; each must state that it is a model", plots)
	}
	for seed, same := range map[uint64]bool{1: true, 2: false} {
		if again, err := Draw(t.Context(), seed, 8); err != nil ||
			reflect.DeepEqual(again.Figures[0], r.Figures[0]) != same {
			t.Errorf("seed %d: equality with seed 1: want %v; %v", seed, same, err)
		}
	}
}
