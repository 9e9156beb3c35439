package bench

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Report is a whole run, samples included, so that anyone can do the sums again.
type Report struct {
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	Machine  Machine   `json:"machine"`
	Settings Settings  `json:"settings"`
	Results  []Result  `json:"results"`
	// Lost datagrams had no echo in 100 ms; each costs UDP_RR that much.
	Lost int  `json:"lost"`
	Pass bool `json:"pass"`
}

type Machine struct {
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"`
}

type Settings struct {
	Rounds     int    `json:"rounds"`
	WarmupMs   int64  `json:"warmupMs"`
	WindowMs   int64  `json:"windowMs"`
	CPU        int    `json:"cpu"` // of client and server both
	Congestion string `json:"congestion"`
	Seed       uint64 `json:"seed"`
}

// Result is one metric of one scenario.
type Result struct {
	Scenario string    `json:"scenario"`
	About    string    `json:"about"`
	Metric   string    `json:"metric"`
	Unit     string    `json:"unit"`
	Median   float64   `json:"median"`
	Samples  []float64 `json:"samples"` // by round
	// Ratio is the median over the rounds of this sample over the reference's of the same round.
	Ratio   Interval `json:"ratio"`
	AtLeast float64  `json:"atLeast,omitempty"`
	Verdict Verdict  `json:"verdict"`
}

// Verdict says whether a ratio reached what was asked of it.
type Verdict string

const (
	NotJudged Verdict = ""
	Passed    Verdict = "ok"
	TooLow    Verdict = "too low"
	TooNoisy  Verdict = "too noisy"
)

// tooWide is the width of an interval from which on a run tells nothing.
const tooWide = 0.10

func judge(ratio Interval, atLeast float64) Verdict {
	switch {
	case atLeast == 0:
		return NotJudged
	case ratio.High-ratio.Low > tooWide:
		return TooNoisy
	case ratio.Median < atLeast:
		return TooLow
	}
	return Passed
}

func (o Options) report(started time.Time, samples [][][]float64, lost int, random *rand.Rand) *Report {
	r := &Report{
		Started: started.UTC().Truncate(time.Second),
		Seconds: time.Since(started).Round(100 * time.Millisecond).Seconds(),
		Machine: Machine{Kernel: kernel(), Arch: runtime.GOARCH, CPUs: runtime.NumCPU()},
		Settings: Settings{
			Rounds: o.Rounds, WarmupMs: o.Warmup.Milliseconds(), WindowMs: o.Window.Milliseconds(),
			CPU: o.CPU, Congestion: congestion, Seed: o.Seed,
		},
		Lost: lost,
		Pass: true,
	}
	for s, scenario := range o.Scenarios {
		for m, metric := range o.Metrics {
			ratios := make([]float64, o.Rounds)
			for i := range ratios {
				ratios[i] = samples[s][m][i] / samples[0][m][i]
			}
			ratio := bootstrap(ratios, random)
			verdict := judge(ratio, scenario.AtLeast)
			r.Pass = r.Pass && (verdict == Passed || verdict == NotJudged)
			r.Results = append(r.Results, Result{
				Scenario: scenario.Name, About: scenario.About, Metric: metric.Name, Unit: metric.Unit,
				Median: median(samples[s][m]), Samples: samples[s][m],
				Ratio: ratio, AtLeast: scenario.AtLeast, Verdict: verdict,
			})
		}
	}
	return r
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return string(u.Release[:bytes.IndexByte(u.Release[:], 0)])
}

// Table writes the results for a person; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	s := r.Settings
	fmt.Fprintf(w, "%d rounds of %d ms in random order, client and server on CPU %d, %s, Linux %s; a software datapath between namespaces\n\n",
		s.Rounds, s.WindowMs, s.CPU, s.Congestion, r.Machine.Kernel)
	fmt.Fprintf(w, "metric\tscenario\tmedian\tof %s\t95 %%\t\n", r.Results[0].Scenario)
	for _, metric := range r.metrics() {
		for _, x := range r.Results {
			if x.Metric != metric {
				continue
			}
			fmt.Fprintf(w, "%s\t%s\t%s %s\t", x.Metric, x.Scenario, figure(x.Median), x.Unit)
			if x.Scenario == r.Results[0].Scenario {
				fmt.Fprint(w, "1\t\t\n")
				continue
			}
			fmt.Fprintf(w, "%.3f\t%.3f–%.3f\t%s\n", x.Ratio.Median, x.Ratio.Low, x.Ratio.High, x.verdict())
		}
	}
	if r.Lost > 0 {
		fmt.Fprintf(w, "\n%d datagrams were lost\n", r.Lost)
	}
}

func (r *Report) metrics() []string {
	var names []string
	for _, x := range r.Results {
		if x.Scenario == r.Results[0].Scenario {
			names = append(names, x.Metric)
		}
	}
	return names
}

func (x Result) verdict() string {
	switch x.Verdict {
	case NotJudged:
		return ""
	case Passed:
		return fmt.Sprintf("ok: at least %.2f", x.AtLeast)
	case TooNoisy:
		return fmt.Sprintf("too noisy to tell: the interval is wider than %.2f; no pass", tooWide)
	}
	return fmt.Sprintf("too low: below %.2f", x.AtLeast)
}

// figure is a number as people read it: "135,012" and "41.2".
func figure(v float64) string {
	if v < 1000 {
		return fmt.Sprintf("%.1f", v)
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
