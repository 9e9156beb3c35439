package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/netns"
)

// TestFreshBeforeEachFirstPacket: the run calls Fresh before every first packet, and fails if Fresh fails.
func TestFreshBeforeEachFirstPacket(t *testing.T) {
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"FIRST_RTT", "NEXT_RTT"})
	calls, fails := 0, error(nil)
	o.Scenarios = []scenario.Scenario{{Name: "cached", Build: func(w *scenario.Wire) (scenario.Pair, error) {
		p, err := scenario.Native(w)
		p.Fresh = func() error { calls++; return fails }
		return p, err
	}}}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if calls < 2*16 || calls%16 != 0 { // both metrics use the same trials: a warm-up and a window of at least sixteen
		t.Errorf("Fresh was called %d times", calls)
	}
	fails = errors.New("test error")
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), "FIRST_RTT of cached: invalidate the cache: test error") {
		t.Errorf("got error %v", err)
	}
}

// TestTrialsTakeTurns: in each turn, every scenario has one trial.
func TestTrialsTakeTurns(t *testing.T) {
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"FIRST_RTT"})
	// Some generators start long before the first turn. This must not affect the last turn.
	o.Warmup = 30 * time.Millisecond
	o.Generator = func(ctx context.Context) *exec.Cmd {
		c := exec.CommandContext(ctx, "sh", "-c", `sleep 0.05; exec "$0"`, os.Args[0])
		c.Env = append(os.Environ(), generatorEnv+"=1")
		return c
	}
	var turns []int
	const scenarios = 3
	o.Scenarios = nil
	for i := range scenarios {
		o.Scenarios = append(
			o.Scenarios,
			scenario.Scenario{Name: fmt.Sprint("number", i), Build: func(w *scenario.Wire) (scenario.Pair, error) {
				p, err := scenario.Native(w)
				p.Fresh = func() error { turns = append(turns, i); return nil }
				return p, err
			}},
		)
	}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if len(turns) < 2*16*scenarios || len(turns)%scenarios != 0 {
		t.Errorf("got %d trials of %d scenarios", len(turns), scenarios)
	}
	for turn := range slices.Chunk(turns, scenarios) {
		if slices.Sort(turn); !slices.Equal(turn, []int{0, 1, 2}) {
			t.Fatalf("one turn has trials of scenarios %v", turn)
		}
	}
}

// TestServerWaitsForItsTrial: a server waits for its client's next trial without a timeout, because trials of other
// scenarios may take any time. The test waits longer than the socket's timeout.
func TestServerWaitsForItsTrial(t *testing.T) {
	ns, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Remove(ns.Path())
	defer ns.Close()
	var sockets [2]int
	for i := range sockets {
		err := ns.Do(func() (err error) {
			sockets[i], err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(sockets[i])
	}
	server, client := sockets[0], sockets[1]
	bound := unix.Bind(server, &unix.SockaddrInet6{Addr: netip.IPv6Loopback().As16()})
	at, err := unix.Getsockname(server)
	if err := errors.Join(bound, err, traffic.Socket(server).Wait(time.Millisecond),
		traffic.Socket(client).Wait(traffic.DialTimeout), unix.Connect(client, at)); err != nil {
		t.Fatal(err)
	}
	m, _ := traffic.MetricByName("FIRST_RTT")
	ended := make(chan error, 1)
	go func() {
		_, err := m.Traffic.Serve(traffic.Socket(server), m)
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("the server did not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	buffer := []byte{0}
	if _, err := unix.Write(client, buffer); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(client, buffer); n != 1 {
		t.Fatalf("got an echo of %d bytes: %v", n, err)
	}
	if _, err := unix.Write(client, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the server ended with %v", err)
	}
}

// TestNothingToForget: before a first packet, the run does as many map writes for a scenario without a cache as for
// netpila.
func TestNothingToForget(t *testing.T) {
	o := tiny(t)
	idle, err := newUnusedMap()
	if err != nil {
		t.Fatal(err)
	}
	r := &run{Options: o, idle: idle}
	defer r.close()
	for _, s := range some("native") {
		if err := r.build(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.pairs[0].Fresh(); err != nil {
		t.Fatal(err)
	}
	var writes uint32
	if err := idle.Lookup(uint32(0), &writes); err != nil || writes != 2 {
		t.Errorf("got %d writes, want two (one generation per node): %v", writes, err)
	}
}
