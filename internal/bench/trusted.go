package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/netns"
)

// tool is another traffic generator for one of our metrics.
type tool struct {
	metric string
	// server and client return command lines; both get the server's address.
	server, client func(at string) []string
	// figure parses the client's output, in the metric's unit.
	figure func(said []byte) (float64, error)
}

// tools returns well-known generators in Debian. sockperf supports only IPv4, so our generator uses IPv4 in this
// comparison too. sockperf's shortest message has 14 bytes.
func tools() []tool {
	sockperf := func(metric string, protocol ...string) tool {
		return tool{
			metric: metric,
			server: func(at string) []string { return append([]string{"sockperf", "server", "-i", at}, protocol...) },
			client: func(at string) []string {
				return append(
					[]string{"sockperf", "ping-pong", "-i", at, "-m", "14", "-t", "1", "--full-rtt"},
					protocol...)
			},
			figure: roundTripRate,
		}
	}
	iperf := func(metric, flows string) tool {
		return tool{
			metric: metric,
			server: func(at string) []string { return []string{"iperf3", "-s", "-1", "-B", at} },
			client: func(at string) []string {
				return []string{
					"iperf3",
					"-c",
					at,
					"-P",
					flows,
					"-C",
					traffic.Congestion,
					"-l",
					strconv.Itoa(traffic.StreamBlock),
					"-t",
					"1",
					"-J",
				}
			},
			figure: received,
		}
	}
	return []tool{sockperf("TCP_RR", "--tcp"), sockperf("UDP_RR"), iperf("TCP_STREAM", "1"), iperf("TCP_STREAM4", "4")}
}

var roundTrip = regexp.MustCompile(`Summary: Round trip is ([0-9.]+) usec`)

// roundTripRate returns round trips per second from sockperf's output.
func roundTripRate(said []byte) (float64, error) {
	m := roundTrip.FindSubmatch(said)
	if m == nil {
		return 0, fmt.Errorf("no round trip in %q", said)
	}
	micros, err := strconv.ParseFloat(string(m[1]), 64)
	return 1e6 / micros, err
}

// received returns Gbit/s from iperf3's output.
func received(said []byte) (float64, error) {
	var all struct {
		End struct {
			SumReceived struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	err := json.Unmarshal(said, &all)
	bits := all.End.SumReceived.BitsPerSecond
	if err == nil && bits == 0 {
		err = fmt.Errorf("no sum in %q", said)
	}
	return bits / 1e9, err
}

// Agreement compares a metric that our generator measured with the same metric from another generator.
type Agreement struct {
	Metric string          `json:"metric"`
	Tool   string          `json:"tool"`
	Unit   string          `json:"unit"`
	Ours   float64         `json:"ours"`   // median
	Theirs float64         `json:"theirs"` // median
	Ratio  report.Interval `json:"ratio"`  // ours / theirs in the same round
	// Verdict is Passed if both agree.
	Verdict Verdict `json:"verdict"`
	// Samples by round, ours and theirs.
	Samples [2][]float64 `json:"samples"`
}

// generatorGate is the permitted range for the ratio of two generators, which do slightly different work between two
// packets.
var generatorGate = Gate{AtLeast: 0.8, AtMost: 1.25}

// generatorTooWide is the width from which an interval gives no verdict.
const generatorTooWide = 0.25

// FewestRounds is the minimum for a 95 % interval: with fewer samples, the probability that all are on one side of the
// true median exceeds 5 %.
const FewestRounds = 6

// LacksTools returns an error that names the other generators that are not installed.
func LacksTools() error {
	for _, t := range tools() {
		if _, err := exec.LookPath(t.client("")[0]); err != nil {
			return fmt.Errorf("%w; install Debian's iperf3 and sockperf", err)
		}
	}
	return nil
}

// Agreements are the results of a run.
type Agreements []Agreement

// Agree reports whether all agree.
func (a Agreements) Agree() bool {
	return !slices.ContainsFunc(a, func(x Agreement) bool { return x.Verdict != Passed })
}

// CheckGenerator measures traffic between nodes in turn with our generator and with the other generators, with the
// options of a run.
func CheckGenerator(ctx context.Context, o Options) (_ Agreements, err error) {
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	w, err := scenario.NewWire(filepath.Join(o.Dir, "compare"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	pair, _ := scenario.Native(w)
	pair.Target = w.Nodes[1].Underlay4
	random := rand.New(rand.NewPCG(o.Seed, 0))
	var all Agreements
	for _, t := range tools() {
		m, _ := traffic.MetricByName(t.metric)
		var ours, theirs []float64
		for round := range o.Rounds {
			// In random order.
			for _, mine := range random.Perm(2) {
				if mine == 1 {
					got, err := o.sample(ctx, pair, m)
					if err != nil {
						return nil, fmt.Errorf("%s: %w", m.Name, err)
					}
					ours = append(ours, m.Value(got))
					continue
				}
				got, err := o.run(ctx, t, pair)
				if err != nil {
					return nil, err
				}
				theirs = append(theirs, got)
			}
			o.Progress(
				Step{
					Round:  round + 1,
					Metric: m.Name,
					Part:   float64(len(all)*o.Rounds+round+1) / float64(len(tools())*o.Rounds),
				},
			)
		}
		ratio := report.Bootstrap(report.Ratios(ours, theirs), random)
		all = append(all, Agreement{
			Metric: m.Name, Tool: t.client("")[0], Unit: m.Unit, Ours: report.Median(ours),
			Theirs: report.Median(theirs),
			Ratio:  ratio, Verdict: generatorGate.judge(ratio, generatorTooWide),
			Samples: [2][]float64{ours, theirs},
		})
	}
	return all, nil
}

// run measures once with a tool. The tool's server does not report when it listens, so run retries the client.
func (o Options) run(ctx context.Context, t tool, p scenario.Pair) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*traffic.DialTimeout)
	defer cancel()
	server := t.server(p.Target.String())
	s := exec.CommandContext(ctx, server[0], server[1:]...)
	if err := p.Server.Do(func() error { return o.launch(s) }); err != nil {
		return 0, err
	}
	defer func() {
		s.Process.Kill()
		s.Wait()
	}()
	for {
		said, err := o.output(ctx, p.Client, t.client(p.Target.String()))
		if err == nil { // iperf3 also prints this for a refused connection
			var figure float64
			if figure, err = t.figure(said); err == nil {
				return figure, nil
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%s: %w", t.metric, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (o Options) output(ctx context.Context, ns *netns.Namespace, line []string) ([]byte, error) {
	c := exec.CommandContext(ctx, line[0], line[1:]...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := ns.Do(func() error { return o.launch(c) }); err != nil {
		return nil, err
	}
	if err := c.Wait(); err != nil {
		return nil, fmt.Errorf(
			"%s: %w: %s %s",
			line[0],
			err,
			bytes.TrimSpace(errs.Bytes()),
			bytes.TrimSpace(out.Bytes()),
		)
	}
	return out.Bytes(), nil
}

// Table writes the agreements for a terminal; columns are separated by tabs.
func (a Agreements) Table(w io.Writer) {
	fmt.Fprint(w, "metric\ttool\tours\ttheirs\tratio\t95 %\tverdict\n")
	for _, x := range a {
		verdict := string(x.Verdict)
		switch x.Verdict {
		case TooNoisy:
			verdict += " to tell"
		case TooLow, TooHigh:
			verdict += fmt.Sprintf(": not between %.2f and %.2f", generatorGate.AtLeast, generatorGate.AtMost)
		}
		fmt.Fprintf(
			w,
			"%s\t%s\t%s %s\t%s\t%.3f\t%v\t%s\n",
			x.Metric,
			x.Tool,
			report.Figure(x.Ours),
			x.Unit,
			report.Figure(x.Theirs),
			x.Ratio.Median,
			x.Ratio,
			verdict,
		)
	}
}
