package policies_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/unixrpc"
)

const (
	changes  = 120                    // in a series
	standing = 100                    // policies in addition to the changing one
	within   = 100 * time.Millisecond // for 99 of 100 changes
	series   = 4
)

// TestChangeToEnforcement: 99 of 100 policy changes are in force on both nodes within 100 ms after their commit. The
// test measures this with packets. It also logs the agents' histogram of the time since they received the
// orchestrator's message.
//
// Other load on the machine can make changes slow only temporarily, so it is enough that one of four series meets the
// limit. If the code is slow, every series is slow. The test logs all series, with the time for which tasks waited for
// a processor and with the maximum delay of the sender.
func TestChangeToEnforcement(t *testing.T) {
	l := labtest.New(t, lab.Spec{Nodes: nodes, Tenants: []lab.Tenant{{Name: "blue"}}, Containers: []lab.Container{
		{Name: "p1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "p1"}},
		{Name: "p2", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "p2"}},
	}})
	ctx := labtest.Context(t)
	p := newProber(t, l, []string{"p1", "p2"}, nil,
		func(c lab.ContainerStatus) netip.Addr { return c.Attachments[0].Address })
	documents := []string{accept("always", serverPorts[1]), accept("sometimes", serverPorts[0])}
	for i := range standing {
		documents = append(documents, accept(fmt.Sprintf("standing-%d", i), uint16(1000+i)))
	}
	changeTo(ctx, t, l, documents...)

	w := watch(ctx, t, p, []flow{{"p1", "p2"}, {"p2", "p1"}})
	w.await(t, true)
	open, counted := true, enforced(ctx, t, l, len(nodes))
	for i := range series {
		waited := pressure(t)
		begun := time.Now()
		w.late.Store(0)
		var fromCall, fromCommit []time.Duration
		for range changes {
			open = !open
			port := uint16(9)
			if open {
				port = serverPorts[0]
			}
			call := time.Now()
			changeTo(ctx, t, l, accept("sometimes", port))
			committed := time.Now()
			enforced := w.await(t, open)
			fromCall, fromCommit = append(fromCall, enforced.Sub(call)), append(fromCommit,
				max(0, enforced.Sub(committed)))
		}
		took := time.Since(begun)
		now := enforced(ctx, t, l, counted.count()+changes*len(nodes))
		agents := now.since(counted)
		counted = now
		p99, agents99 := percentile(fromCommit, 99), agents.percentile(99)
		t.Logf(
			"%d changes in %v; on both nodes, from the commit to the first affected packets: P50 %v, P99 %v, "+
				"maximum %v; from the call: P50 %v, P99 %v; agents, from the message: P50 ≤ %g s, P99 ≤ %g s; "+
				"tasks waited for a processor in %.0f %% of the time, packets up to %v",
			changes,
			took.Round(time.Millisecond),
			percentile(fromCommit, 50),
			p99,
			slices.Max(fromCommit),
			percentile(fromCall, 50),
			percentile(fromCall, 99),
			agents.percentile(50),
			agents99,
			100*(pressure(t)-waited).Seconds()/took.Seconds(),
			time.Duration(w.late.Load()),
		)
		if p99 <= within && agents99 <= within.Seconds() {
			return
		}
		t.Logf("series %d of %d exceeds the limit", i+1, series)
	}
	t.Errorf("P99 exceeds the limit in each of %d series; want at most %v", series, within)
}

// accept returns a policy that isolates all pods, and accepts datagrams to one port.
func accept(name string, port uint16) string {
	return fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": %q},
		"spec": {"podSelector": {}, "ingress": [{"ports": [{"protocol": "UDP", "port": %d}]}]}}`, name, port)
}

func changeTo(ctx context.Context, t *testing.T, l *lab.Lab, documents ...string) {
	t.Helper()
	if _, err := l.Operator().ApplyPolicies(ctx,
		connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: documents})); err != nil {
		t.Fatal(err)
	}
}

// percentile returns the nearest-rank percentile.
func percentile(of []time.Duration, p int) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[(len(sorted)*p+99)/100-1]
}

type flow struct{ from, to string }

// watched are flows whose packets the test observes.
type watched struct {
	flows  []flow
	turned chan turn
	late   atomic.Int64 // maximum delay between two rounds of packets, in ns
}

// turn is a change of a flow between open and closed. At time at, the change had happened.
type turn struct {
	flow
	open bool
	at   time.Time
}

// watch sends two datagrams on each flow every millisecond. Policies always accept the second datagram. Everything runs
// on one CPU (see prober), so when the second datagram has arrived, the first datagram has arrived or was dropped.
func watch(ctx context.Context, t *testing.T, p *prober, flows []flow) *watched {
	w := &watched{flows: flows, turned: make(chan turn, 4*len(flows))}
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- netns.OnThread(func() error { return w.run(ctx, p) }) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *watched) run(ctx context.Context, p *prober) error {
	var cpu unix.CPUSet
	cpu.Set(0)
	if err := unix.SchedSetaffinity(0, &cpu); err != nil {
		return err
	}
	open, last := map[flow]bool{}, time.Now()
	for again := time.Tick(time.Millisecond); ; {
		select {
		case <-again:
		case <-ctx.Done():
			return nil
		}
		p.round++
		for _, f := range w.flows {
			arrives, err := p.passes(f)
			if err != nil {
				return err
			}
			if arrives == open[f] {
				continue
			}
			open[f] = arrives
			select {
			case w.turned <- turn{f, arrives, time.Now()}:
			case <-ctx.Done():
				return nil
			}
		}
		now := time.Now()
		w.late.Store(max(w.late.Load(), int64(now.Sub(last))))
		last = now
	}
}

// passes reports whether a datagram arrives. It sends a second datagram that always arrives, and waits for that one.
func (p *prober) passes(f flow) (bool, error) {
	for _, port := range serverPorts {
		if err := unix.Sendto(p.clients[f.from], p.letter(0), 0, p.place(end{f.to, port})); err != nil &&
			!errors.Is(err, unix.ENOBUFS) {
			return false, fmt.Errorf("%s to %s: %w", f.from, f.to, err)
		}
	}
	var came [2]int
	for i := 1; i >= 0; i-- {
		fd := p.servers[end{f.to, serverPorts[i]}].datagrams
		if i == 1 {
			if err := readable(fd); err != nil {
				return false, fmt.Errorf("%s to %s, port %d, which is always accepted: %w", f.from, f.to,
					serverPorts[i], err)
			}
		}
		if err := p.read(fd, func(int, []byte, unix.Sockaddr) error { came[i]++; return nil }); err != nil {
			return false, err
		}
	}
	return came[0] > 0, nil
}

// readable waits until a socket is readable.
func readable(fd int) error {
	for {
		ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && ready == 0 {
			return errors.New("nothing arrived in time")
		}
		return err
	}
}

// await waits until each flow has changed exactly once, and returns the time of the last change.
func (w *watched) await(t *testing.T, open bool) (last time.Time) {
	t.Helper()
	left := slices.Clone(w.flows)
	for patient := time.After(patience); len(left) > 0; {
		select {
		case turned := <-w.turned:
			i := slices.Index(left, turned.flow)
			if i < 0 || turned.open != open {
				t.Fatalf("%v changed to open: %v, want %v for all", turned.flow, turned.open, open)
			}
			left, last = slices.Delete(left, i, i+1), turned.at
		case <-patient:
			t.Fatalf("%v of the flows did not change to open: %v", left, open)
		}
	}
	return last
}

// histogram has cumulative counts by duration; the last count is the total.
type histogram []atMost

type atMost struct {
	seconds float64
	many    int
}

// enforced returns the sum of all agents' histograms of the time from the orchestrator's message until its policies are
// in the packet path and on disk. The write to disk may be later than the change that packets show, so enforced waits
// until the histograms have the given number of observations.
func enforced(ctx context.Context, t *testing.T, l *lab.Lab, times int) histogram {
	t.Helper()
	for again := time.Tick(time.Millisecond); ; {
		h := scrape(t, l)
		if h.count() >= times {
			return h
		}
		select {
		case <-again:
		case <-ctx.Done():
			t.Fatalf("the agents' histograms have %d observations, want %d", h.count(), times)
		}
	}
}

func scrape(t *testing.T, l *lab.Lab) (sum histogram) {
	t.Helper()
	for _, node := range nodes {
		resp, err := unixrpc.Client(l.AgentSocket(node)).Get(unixrpc.URL + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		i := 0
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			var b atMost
			if _, err := fmt.Sscanf(lines.Text(), `pilaster_policy_enforce_duration_seconds_bucket{le="%g"} %d`,
				&b.seconds, &b.many); err != nil {
				continue
			}
			if i == len(sum) {
				sum = append(sum, atMost{seconds: b.seconds})
			}
			sum[i].many += b.many
			i++
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || i == 0 {
			t.Fatalf("the metrics of %s lack the histogram: %s", node, resp.Status)
		}
	}
	return sum
}

func (h histogram) since(before histogram) histogram {
	more := slices.Clone(h)
	for i := range more {
		more[i].many -= before[i].many
	}
	return more
}

func (h histogram) count() int { return h[len(h)-1].many }

// percentile returns an upper bound of the percentile, in seconds.
func (h histogram) percentile(p int) float64 {
	return h[slices.IndexFunc(h, func(b atMost) bool { return b.many*100 >= h.count()*p })].seconds
}

// pressure returns the total time since boot in which at least one task waited for a processor.
func pressure(t *testing.T) time.Duration {
	t.Helper()
	b, err := os.ReadFile("/proc/pressure/cpu")
	if err != nil {
		return 0 // this kernel does not have it
	}
	var avg10, avg60, avg300 float64
	var total int64
	if _, err := fmt.Sscanf(string(b), "some avg10=%g avg60=%g avg300=%g total=%d", &avg10, &avg60, &avg300,
		&total); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return time.Duration(total) * time.Microsecond
}
