package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const (
	generatorEnv = "PILASTER_BENCH_TEST_GENERATOR"
	endlessEnv   = "PILASTER_BENCH_TEST_ENDLESS" // folder of a run that does not end by itself
	datapathEnv  = "PILASTER_BENCH_TEST_BUILD"   // folder of a run as a build of the program
)

// TestMain lets the test binary act as the traffic generator, as a run that a test interrupts, and as another build.
func TestMain(m *testing.M) {
	var err error
	switch dir := os.Getenv(endlessEnv); {
	case os.Getenv(generatorEnv) != "":
		err = traffic.Generate(os.Stdin, os.Stdout)
	case dir != "":
		err = endless(dir)
	case os.Getenv(datapathEnv) != "" && slices.Contains(os.Args, "datapath"):
		err = runAsBuild(context.Background(), os.Getenv(datapathEnv))
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

func tiny(t *testing.T) Options {
	t.Helper()
	cpu, err := traffic.LastCPU()
	if err != nil {
		t.Fatal(err)
	}
	return options(cpu, filepath.Join(t.TempDir(), "bench"))
}

func options(cpu int, dir string) Options {
	return Options{
		Scenarios: some(
			"native",
			"netpila",
		), Metrics: traffic.Metrics(), Gates: QuickGates(), TooWide: 0.1, Rounds: 1, CPU: cpu, Seed: 1,
		Warmup: time.Millisecond, Window: 5 * time.Millisecond,
		Dir: dir,
		Generator: func(ctx context.Context) *exec.Cmd {
			c := exec.CommandContext(ctx, os.Args[0])
			c.Env = append(os.Environ(), generatorEnv+"=1")
			return c
		},
		Progress: func(Step) {},
	}
}

// TestRunOfAllScenarios does not check speeds. It checks that traffic passes in every scenario, also if the kernel must
// split segments.
func TestRunOfAllScenarios(t *testing.T) {
	o := tiny(t)
	o.Scenarios, _ = scenario.Offered(scenario.Scenarios())
	if labtest.Device() == endpoint.Netkit { // the others are those of runs with another device
		o.Scenarios = slices.DeleteFunc(o.Scenarios, func(s scenario.Scenario) bool {
			return s.Name != "native" && !strings.Contains(s.Name, endpoint.Netkit)
		})
	}
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "TCP_STREAM_CUT"})
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range o.Scenarios {
		for _, m := range o.Metrics {
			if x := r.find(s.Name, m.Name); x == nil || len(x.Samples) != 1 || !(x.Samples[0] > 0) {
				t.Errorf("unexpected figures of %s %s: %+v", s.Name, m.Name, x)
			}
		}
	}
}

// TestRunOfAllMetrics measures every metric, and checks that the run leaves no files.
func TestRunOfAllMetrics(t *testing.T) {
	o := tiny(t)
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range o.Scenarios {
		for _, m := range o.Metrics {
			x := r.find(s.Name, m.Name)
			if ours := strings.HasPrefix(s.Name, "netpila"); m.Programs != 0 && !ours {
				if x != nil {
					t.Errorf("got figures of %s, which has no programs, for %s", s.Name, m.Name)
				}
				continue
			}
			if x == nil || len(x.Samples) != 1 || !(x.Samples[0] > 0) {
				t.Errorf("unexpected figures of %s %s: %+v", s.Name, m.Name, x)
			}
		}
	}
	if i := slices.IndexFunc(r.Programs, func(p Program) bool {
		return p.Scenario == "netpila" &&
			p.Name == "pil_container" && p.Ns.Median > 0
	}); i < 0 ||
		!(r.EmptyProgramNs > 0) {
		t.Errorf("unexpected programs %+v, empty program %v ns", r.Programs, r.EmptyProgramNs)
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("folder %s still exists: %v", o.Dir, err)
	}
}

func TestRunInRounds(t *testing.T) {
	o := tiny(t)
	o.Metrics, o.Rounds, o.CPU = o.Metrics[:2], 2, Free
	var steps []Step
	o.Progress = func(s Step) { steps = append(steps, s) }
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(steps, []Step{{1, "TCP_RR", 0.25}, {1, "UDP_RR", 0.5}, {2, "TCP_RR", 0.75}, {2, "UDP_RR", 1}}) {
		t.Errorf("unexpected progress %v", steps)
	}
	for _, x := range r.Results {
		if len(x.Samples) != 2 || x.Ratio.Low > x.Ratio.Median || x.Ratio.Median > x.Ratio.High {
			t.Errorf("unexpected figures of %s %s: %+v", x.Scenario, x.Metric, x)
		}
		if x.Scenario == "native" && *x.Ratio != (report.Interval{Median: 1, Low: 1, High: 1}) {
			t.Errorf("got ratio %+v of native to itself, want 1", x.Ratio)
		}
	}
	if len(r.Checks) != 2 || r.Checks[0].Scenario != "netpila" || r.Checks[0].Metric != "TCP_RR" ||
		r.Checks[0].Verdict == "" {
		t.Errorf("unexpected checks %+v", r.Checks)
	}
}

// TestRunAfterACrash: a killed run leaves bound namespaces, a mounted bpffs and running daemons. The next run removes
// them.
func TestRunAfterACrash(t *testing.T) {
	o := tiny(t)
	o.Dir = filepath.Join(short(t), "b")
	var left []int
	for _, s := range some("netpila", "nimitz-ovs") {
		w, err := scenario.NewWire(filepath.Join(o.Dir, s.Name))
		if err != nil {
			t.Fatal(err)
		}
		p, err := s.Build(w)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, p.Processes...)
		for _, n := range w.Nodes {
			n.NS.Close()
		}
	}
	o.Metrics = o.Metrics[:1]
	if _, err := Run(t.Context(), o); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("folder %s still exists: %v", o.Dir, err)
	}
	for _, pid := range left {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil {
			t.Errorf("process %d, %s, still runs", pid, exe)
		}
	}
	if len(left) == 0 {
		t.Error("the killed run left no process, so the test shows nothing")
	}
}

func TestOneRunAtATime(t *testing.T) {
	o := tiny(t)
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "another bench") {
		t.Errorf("a second concurrent run: got error %v", err)
	}
}

// TestRunOfABrokenScenario: if no traffic passes in a scenario, the run returns an error that names the scenario, and
// no figures.
func TestRunOfABrokenScenario(t *testing.T) {
	o := tiny(t)
	o.Scenarios = append(
		o.Scenarios[:1:1],
		scenario.Scenario{Name: "cut", Build: func(w *scenario.Wire) (p scenario.Pair, err error) {
			p, _ = scenario.Native(w)
			p.Client, err = w.Namespace("alone")
			return p, err
		}},
	)
	_, err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "TCP_RR of cut: client: ") ||
		!strings.Contains(err.Error(), "network is unreachable") {
		t.Errorf("got error %v", err)
	}
}

// TestNoOperations: a window without an operation is an error. Otherwise the report would have infinite times, which
// JSON cannot represent.
func TestNoOperations(t *testing.T) {
	m, _ := traffic.MetricByName("UDP_RR")
	var to taken
	if err := to.add(m, traffic.Answer{Seconds: 0.08, Busy: 0.08}); err == nil ||
		!strings.Contains(err.Error(), "no transaction in 0.080 s") {
		t.Errorf("no operation: %v", err)
	}
	if err := to.add(m, traffic.Answer{Seconds: 0.08, Ops: 4, Busy: -0.01}); err != nil ||
		!slices.Equal(to.values, []float64{50}) || !slices.Equal(to.cpu, []float64{0}) {
		t.Errorf("four operations: %+v, %v", to, err)
	}
}

func TestGenerateRefuses(t *testing.T) {
	for _, in := range []string{"", "{}", `{"Metric":"SCTP_RR"}`, `{"Metric":"TCP_RR","Target":"nonsense"}`} {
		if err := traffic.Generate(strings.NewReader(in), &bytes.Buffer{}); err == nil {
			t.Errorf("got progress %q", in)
		}
	}
}

// TestCompare: our generator and well-known tools measure the same quantities. On a busy machine a round can be wrong
// by a factor of ten. This test detects only a misread unit, which is a factor of a thousand. `pilaster bench check`
// compares exactly.
func TestCompare(t *testing.T) {
	o := tiny(t)
	o.Window = 300 * time.Millisecond
	all, err := CheckGenerator(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(tools()) {
		t.Fatalf("%d comparisons", len(all))
	}
	for _, a := range all {
		if a.Ratio.Median < 0.01 || a.Ratio.Median > 100 || a.Verdict == "" {
			t.Errorf("%s: our generator measured %v, and %s measured %v", a.Metric, a.Ours, a.Tool, a.Theirs)
		}
	}
}

// peerScript connects the containers by its own veth pair, and starts a process that outlives "up".
const peerScript = `#!/bin/sh -e
case $1 in
up)
	test -d "$BENCH_DIR" -a -n "$BENCH_ADDRESS_1" -a -n "$BENCH_ADDRESS4_2" -a -e "$BENCH_NODE_2"
	test "$BENCH_UPLINK" = eth0
	sleep 60 & echo $! > "$BENCH_DIR/pid"
	in1="nsenter --net=$BENCH_CONTAINER_1" in2="nsenter --net=$BENCH_CONTAINER_2"
	$in1 ip link add eth0 index 50 type veth peer name eth0 netns "$BENCH_CONTAINER_2"
	$in1 ip addr add 10.9.0.1/24 dev eth0; $in2 ip addr add 10.9.0.2/24 dev eth0
	$in1 ip link set eth0 up; $in2 ip link set eth0 up
	echo building; echo "$PEER_SERVER" ;;
down)
	kill "$(cat "$BENCH_DIR/pid")"; echo gone > "$PEER_TEST" ;;
esac
`

func TestPeer(t *testing.T) {
	for _, server := range []string{"10.9.0.2", "10.9.0.2:5201 10.9.0.2:5201"} {
		t.Run(server, func(t *testing.T) { testPeer(t, server) })
	}
}

func testPeer(t *testing.T, server string) {
	folder := t.TempDir()
	script, gone := filepath.Join(folder, "peer.sh"), filepath.Join(folder, "gone")
	t.Setenv("PEER_TEST", gone)
	t.Setenv("PEER_SERVER", server)
	if err := os.WriteFile(script, []byte(peerScript), 0o700); err != nil {
		t.Fatal(err)
	}
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "UDP_PPS"})
	o.Scenarios = append(some("native"), scenario.Peer("other", script))
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if x := r.find("other", "UDP_PPS"); x == nil || !(x.Median > 0) {
		t.Errorf("unexpected figures of the peer: %+v", r.Results)
	}
	if _, err := os.Stat(gone); err != nil {
		t.Errorf("the command did not run with down: %v", err)
	}
}

func TestPeerThatFails(t *testing.T) {
	for script, says := range map[string]string{
		"echo no etcd >&2; exit 3":              "up: exit status 3: no etcd",
		"test $1 = down || echo server":         `"server": not the server's address`,
		"test $1 = down || echo 10.9.0.2 up":    `"10.9.0.2 up": not the server's [ADDRESS]:PORT`,
		"test $1 = up || exit 4; echo 10.9.0.2": "down: exit status 4",
	} {
		file := filepath.Join(t.TempDir(), "peer.sh")
		if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		err := scenario.Once(
			filepath.Join(t.TempDir(), "w"),
			scenario.Peer("other", file),
			func(scenario.Pair) error { return nil },
		)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", script, err)
		}
	}
}

func TestIdleTime(t *testing.T) {
	all, err := traffic.ReadIdle(Free)
	if err != nil || all.Cpus < 1 || all.Seconds <= 0 {
		t.Errorf("unexpected list of all: %+v, %v", all, err)
	}
	cpu, err := traffic.LastCPU()
	if err != nil {
		t.Fatal(err)
	}
	if one, err := traffic.ReadIdle(cpu); err != nil || one.Cpus != 1 || one.Seconds <= 0 ||
		one.Seconds > all.Seconds+1 {
		t.Errorf("unexpected choice: %+v of %+v, %v", one, all, err)
	}
	if _, err := traffic.ReadIdle(100_000); err == nil {
		t.Error("found CPU 100,000")
	}
}
