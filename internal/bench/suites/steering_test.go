package suites

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/steering"
	"pilaster.io/pilaster/internal/steering/steeringtest"
)

const generatorEnv = "PILASTER_SUITES_TEST_GENERATOR"

// TestMain lets the test binary act as the traffic generator.
func TestMain(m *testing.M) {
	if os.Getenv(generatorEnv) == "" {
		os.Exit(m.Run())
	}
	if err := traffic.Generate(os.Stdin, os.Stdout); err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

// steeredBed is a network of one pair with the steering of its servers' node.
type steeredBed struct {
	*steeringBed
	of steering.Steering
}

func newSteeredBed(t *testing.T) *steeredBed {
	t.Helper()
	bed, err := newSteeringBed(filepath.Join(t.TempDir(), "w"), 1)
	return steered(t, bed, err)
}

// steered restores and closes a bed at the end of the test.
func steered(t *testing.T, bed *steeringBed, err error) *steeredBed {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	steeringtest.LockTable(t)
	b := &steeredBed{bed, steering.Steering{Dir: t.TempDir()}}
	t.Cleanup(func() {
		_, err := b.of.Reset()
		if err := errors.Join(err, bed.Close()); err != nil {
			t.Error(err)
		}
	})
	return b
}

// steer sets the steering of levels, and restores all others.
func (b *steeredBed) steer(t *testing.T, q steering.Request, levels ...string) {
	t.Helper()
	_, err := b.of.Reset()
	var devices []steering.Device
	if err == nil {
		devices, err = b.devices(levels)
	}
	if err == nil {
		err = b.of.Apply(q, devices)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// fewestCounted is the number of packets from which a share of 99 % has a meaning.
const fewestCounted = 400

// share returns the part of a level's packets that a CPU has processed. There must be enough packets.
func (b *steeredBed) share(t *testing.T, level string, cpu int) float64 {
	t.Helper()
	sum := b.sum(t, level)
	if sum < fewestCounted {
		t.Fatalf("level %s has only %d packets", level, sum)
	}
	return float64(b.levels(t)[level][cpu]) / float64(sum)
}

func (b *steeredBed) sum(t *testing.T, level string) (sum uint64) {
	t.Helper()
	for _, n := range b.levels(t)[level] {
		sum += n
	}
	return sum
}

func (b *steeredBed) levels(t *testing.T) map[string][]uint64 {
	t.Helper()
	all, err := b.packets()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// twoCPUs returns two CPUs that this process may use.
func twoCPUs(t *testing.T) (sender, other int) {
	t.Helper()
	sender, err := traffic.FirstCPU()
	if err == nil {
		other, err = traffic.LastCPU()
	}
	if err != nil {
		t.Fatal(err)
	}
	if sender == other {
		t.Skip("needs two CPUs")
	}
	return sender, other
}

func pin(thread, cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	return unix.SchedSetaffinity(thread, &set)
}

// sendDatagrams sends datagrams from a CPU. The kernel processes the receiving side there too, unless steering says
// otherwise.
func (b *steeredBed) sendDatagrams(t *testing.T, cpu, datagrams int) {
	t.Helper()
	p := b.pairs[0]
	err := p.Client.Do(func() error {
		if err := pin(0, cpu); err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		to := &unix.SockaddrInet6{Port: 9, Addr: p.Target.As16()}
		for i := range datagrams {
			if i == 20 { // neighbours are resolved
				time.Sleep(100 * time.Millisecond)
				if err := b.clear(); err != nil {
					return err
				}
			}
			if err := unix.Sendto(s, make([]byte, 100), 0, to); err != nil {
				return err
			}
			if i%50 == 0 {
				time.Sleep(time.Millisecond) // no queue overflows
			}
		}
		time.Sleep(50 * time.Millisecond) // for other CPUs' queues
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestMaskOfOneCPU: with a mask of one CPU, at least 99 % of a level's packets are processed there. Levels before it
// are processed on the sender's CPU, which shows that the level itself moves them.
func TestMaskOfOneCPU(t *testing.T) {
	b := newSteeredBed(t)
	sender, other := twoCPUs(t)
	const datagrams = 3000
	b.steer(t, steering.Request{Mode: steering.Off}, steering.Levels()...)
	b.sendDatagrams(t, sender, datagrams)
	for _, level := range steering.Levels() {
		if got := b.share(t, level, sender); got < 0.99 {
			t.Errorf("without steering, the sender's CPU processes %.3f of level %s", got, level)
		}
	}
	for i, level := range steering.Levels() {
		b.steer(t, steering.Request{Mode: steering.RPS, CPUs: []int{other}}, level)
		b.sendDatagrams(t, sender, datagrams)
		for j, at := range steering.Levels() {
			cpu := sender
			if j >= i {
				cpu = other
			}
			got := b.share(t, at, cpu)
			t.Logf("steered at %s: CPU %d processes %.4f of %s", level, cpu, got, at)
			if got < 0.99 {
				t.Errorf("steered at %s, CPU %d processes only %.3f of level %s", level, cpu, got, at)
			}
		}
	}
}

// TestLevelsOfPilaster: of an endpoint of Pilaster, level container moves no packet to another CPU, because
// bpf_redirect_peer delivers without the receive queue of its device. Level host moves all, up to the container.
func TestLevelsOfPilaster(t *testing.T) {
	var host, container steering.Device
	bed, err := buildSteeringBed(filepath.Join(t.TempDir(), "w"),
		func(b *steeringBed) ([]steering.Device, error) {
			p, err := scenario.Netpila().Build(b.wire)
			if err != nil {
				return nil, err
			}
			b.pairs = []scenario.Pair{p}
			host = steering.Device{Level: steering.Host, Name: "eth0", Netns: b.wire.Nodes[1].NS.Path()}
			container = steering.Device{Level: steering.Container, Name: "eth0", Netns: p.Server.Path()}
			return []steering.Device{container}, nil // our own program on the uplink ends the chain of programs
		})
	b := steered(t, bed, err)
	if _, err := b.devices([]string{steering.Container}); err == nil ||
		!strings.Contains(err.Error(), "bpf_redirect_peer") {
		t.Errorf("level container was not refused: %v", err)
	}
	sender, other := twoCPUs(t)
	for _, c := range []struct {
		at  steering.Device
		cpu int // that processes the packets in the container
	}{{container, sender}, {host, other}} {
		request := steering.Request{Mode: steering.RPS, CPUs: []int{other}}
		if err := b.of.Apply(request, []steering.Device{c.at}); err != nil {
			t.Fatal(err)
		}
		b.sendDatagrams(t, sender, 3000)
		got := b.share(t, steering.Container, c.cpu)
		t.Logf("steered at %s: CPU %d processes %.4f of the container's packets", c.at.Level, c.cpu, got)
		if got < 0.99 {
			t.Errorf("steered at %s: CPU %d processes only %.3f", c.at.Level, c.cpu, got)
		}
	}
}

// reader reads a stream on a thread that the test moves between CPUs.
type reader struct {
	thread chan int // its id
	port   chan int
	ended  chan error
}

// startReader starts a reader in the server's namespace, on a CPU.
func (b *steeredBed) startReader(cpu int) *reader {
	r := &reader{make(chan int, 1), make(chan int, 1), make(chan error, 1)}
	go func() {
		r.ended <- b.pairs[0].Server.Do(func() error {
			defer close(r.port)
			if err := pin(0, cpu); err != nil {
				return err
			}
			l, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(l)
			err = errors.Join(unix.Bind(l, &unix.SockaddrInet6{}), unix.Listen(l, 1))
			if err != nil {
				return err
			}
			bound, err := unix.Getsockname(l)
			if err != nil {
				return err
			}
			r.thread <- unix.Gettid()
			r.port <- bound.(*unix.SockaddrInet6).Port
			s, _, err := unix.Accept(l)
			if err != nil {
				return err
			}
			defer unix.Close(s)
			for buffer := make([]byte, 4096); ; {
				if n, err := unix.Read(s, buffer); n == 0 || err != nil {
					return err
				}
			}
		})
	}()
	return r
}

// TestFlowsFollowTheirReader: with RFS at one level, at least 95 % of its packets are processed on the reader's CPU,
// also from 100 ms after the reader has moved.
func TestFlowsFollowTheirReader(t *testing.T) {
	if err := (steering.Request{Mode: steering.RFS}).Check(); err != nil {
		if !errors.Is(err, steering.ErrNoTable) {
			t.Fatal(err)
		}
		t.Logf("not measured, RFS is refused outside of the machine's first network namespace: %v", err)
		return
	}
	b := newSteeredBed(t)
	for _, level := range steering.Levels() {
		t.Run(level, func(t *testing.T) {
			b.steer(t, steering.Request{Mode: steering.RFS}, level)
			b.followReader(t, level)
		})
	}
}

func (b *steeredBed) followReader(t *testing.T, level string) {
	sender, other := twoCPUs(t)
	r := b.startReader(other)
	port, ok := <-r.port
	if !ok {
		t.Fatal(<-r.ended)
	}
	thread := <-r.thread
	stop, sent := make(chan struct{}), make(chan error, 1)
	go func() { sent <- b.sendWrites(sender, port, stop) }()
	defer func() {
		close(stop)
		if err := errors.Join(<-sent, <-r.ended); err != nil {
			t.Error(err)
		}
	}()
	for i, cpu := range []int{other, sender, other, sender} {
		if err := pin(thread, cpu); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		if err := b.clear(); err != nil {
			t.Fatal(err)
		}
		b.waitForPackets(t, level)
		got := b.share(t, level, cpu)
		t.Logf("reader on CPU %d: it processes %.4f", cpu, got)
		if got < 0.95 {
			t.Errorf("move %d: CPU %d, on which the reader runs, processes only %.3f", i, cpu, got)
		}
	}
}

// waitForPackets waits until a level has packets enough for a share of them. A busy machine may send few.
func (b *steeredBed) waitForPackets(t *testing.T, level string) {
	t.Helper()
	for range 1000 {
		time.Sleep(20 * time.Millisecond)
		if b.sum(t, level) >= fewestCounted {
			return
		}
	}
	t.Fatalf("level %s has only %d packets", level, b.sum(t, level))
}

// sendWrites sends small segments until stop is closed.
func (b *steeredBed) sendWrites(cpu, port int, stop <-chan struct{}) error {
	return b.pairs[0].Client.Do(func() error {
		if err := pin(0, cpu); err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		err = errors.Join(unix.SetsockoptInt(s, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
			unix.Connect(s, &unix.SockaddrInet6{Port: port, Addr: b.pairs[0].Target.As16()}))
		for err == nil {
			select {
			case <-stop:
				return nil
			case <-time.After(200 * time.Microsecond):
				_, err = unix.Write(s, []byte("pilaster"))
			}
		}
		return err
	})
}

// TestSteering: the report has each mode that this machine offers and the reasons for the others, and the settings are
// restored.
func TestSteering(t *testing.T) {
	steeringtest.LockTable(t)
	client, _ := twoCPUs(t)
	steps := 0
	o := SteeringOptions{
		ClientCPU: client,
		Pairs:     []int{1, 2}, Rounds: 1, Warmup: 50 * time.Millisecond, Window: 200 * time.Millisecond, Seed: 1,
		Generator: func(ctx context.Context) *exec.Cmd {
			c := exec.CommandContext(ctx, os.Args[0])
			c.Env = append(os.Environ(), generatorEnv+"=1")
			return c
		},
		Progress: func(int, int) { steps++ },
	}
	o.Dir = filepath.Join(t.TempDir(), "bench")
	r, err := Steering(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	run := len(SteeringModes()) - len(r.NotRun)
	if steps != 2*run || len(r.Results) != 2*run || run < 3 {
		t.Errorf("got %d steps, %d results, not run %v", steps, len(r.Results), r.NotRun)
	}
	for _, x := range r.Results {
		// A tenth may be answers.
		if x.Mode == "vxlan" && x.share(steering.Overlay, client) < 0.9 {
			t.Errorf("without steering, CPU %d processes only a part: %v", client, x.Packets)
		}
		for _, level := range steering.Levels() {
			var sum uint64
			for _, n := range x.Packets[level] {
				sum += n
			}
			if sum == 0 || x.Gigabits.Median <= 0 {
				t.Errorf("%s, %d pairs: %d packets at %s, %v Gbit/s", x.Mode, x.Pairs, sum, level, x.Gigabits)
			}
		}
	}
	if _, err := os.Stat(o.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the run's folder remains: %v", err)
	}
	if _, err := os.Stat(steering.TableRecord); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record of the table remains: %v", err)
	}
	r.NotRun = append(r.NotRun, ModeNotRun{"turbo", "there is none"})
	var text, page strings.Builder
	w := tabwriter.NewWriter(&text, 0, 8, 3, ' ', 0)
	r.Table(w)
	w.Flush()
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1 pair of", "2 pairs of", "rps+", "not run: turbo: there is none"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q", want)
		}
	}
	for _, want := range []string{"<svg", "turbo was not run", "rps · container · CPU 0"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	t.Log("\n" + text.String())
}
