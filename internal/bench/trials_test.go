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

// Before every first packet the scenario is told to forget, and a scenario that cannot fails the run.
func TestFreshBeforeEachFirstPacket(t *testing.T) {
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"FIRST_RTT", "NEXT_RTT"})
	forgot, fails := 0, error(nil)
	o.Scenarios = []scenario.Scenario{{Name: "forgetful", Build: func(w *scenario.Wire) (scenario.Pair, error) {
		p, err := scenario.Native(w)
		p.Fresh = func() error { forgot++; return fails }
		return p, err
	}}}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if forgot < 2*16 || forgot%16 != 0 { // both metrics of the same trials: a warm-up and a window of sixteen at least
		t.Errorf("forgot %d times", forgot)
	}
	fails = errors.New("cannot forget")
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), "FIRST_RTT of forgetful: void what is cached: cannot forget") {
		t.Errorf("ran: %v", err)
	}
}

// Trials of all scenarios take turns, and in every turn each has one, from the first to the last.
func TestTrialsTakeTurns(t *testing.T) {
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"FIRST_RTT"})
	// Some of their processes are long at work before the first turn, and that must tell nothing about the last.
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
		t.Errorf("%d trials of %d scenarios", len(turns), scenarios)
	}
	for turn := range slices.Chunk(turns, scenarios) {
		if slices.Sort(turn); !slices.Equal(turn, []int{0, 1, 2}) {
			t.Fatalf("a turn is of scenarios %v", turn)
		}
	}
}

// A server of trials waits for its client's however long those of others take: its socket's patience ends here while it
// has none.
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
		t.Fatalf("an echo of %d bytes, %v", n, err)
	}
	if _, err := unix.Write(client, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("at its end: %v", err)
	}
}

// A scenario that has nothing to forget has as much written before a first packet as netpila has.
func TestNothingToForget(t *testing.T) {
	o := tiny(t)
	idle, err := scenario.NewUnusedMap()
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
		t.Errorf("%d writes, %v; a generation a node are two", writes, err)
	}
}
