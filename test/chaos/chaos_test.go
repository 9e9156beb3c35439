package chaos_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	concurrent = 16              // number of clients
	few        = 60              // changes in a short run
	healing    = 2 * time.Minute // maximum time until everything works again after the last fault
)

// TestChaos makes clients perform PILASTER_CHAOS_CHANGES changes while faults of every kind occur, and checks the
// clients' logs. PILASTER_CHAOS_SEED determines the random choices.
func TestChaos(t *testing.T) {
	changes, long := setting(t, "PILASTER_CHAOS_CHANGES", few)
	seed, given := setting(t, "PILASTER_CHAOS_SEED", 0)
	if !given {
		seed = int(rand.Uint32())
	}
	t.Logf("PILASTER_CHAOS_SEED=%d", seed)

	n := newNetwork(t)
	etcd := startEtcd(t, n)
	servers, places := startOrchestrators(t, n, etcd)
	began := time.Now()
	reader := dialFrom(t, etcd[0].host, "http://127.0.0.1:2379")
	ready(t, reader, places)
	t.Logf("three members of etcd and two orchestrators serve after %v", time.Since(began).Round(time.Millisecond))

	w := work{Places: places, Dir: t.TempDir(), Seed: uint64(seed), Clients: concurrent, Changes: int64(changes)}
	crowd := startClients(t, n.host("nodes", 100, nodeSide), w)
	counts := &tally{count: map[string]int{}}
	kinds := [][]fault{storeFaults(etcd), orchestratorFaults(servers)}
	injecting, stop := context.WithCancel(t.Context())
	all, arms := make(chan struct{}, len(kinds)), make(chan struct{}, len(kinds))
	for i, some := range kinds {
		go func() {
			defer func() { arms <- struct{}{} }()
			inject(injecting, t, rand.New(rand.NewPCG(uint64(seed), uint64(i))), some, long, counts,
				func() { all <- struct{}{} })
		}()
	}
	for range kinds {
		select { // let the clients work until every fault of each kind has occurred
		case <-all:
		case <-crowd.ended:
		}
	}
	crowd.mayEnd()
	progress := time.NewTicker(20 * time.Second)
	defer progress.Stop()
	for running := true; running; {
		select {
		case <-crowd.ended:
			running = false
		case <-progress.C:
			t.Logf("%v: %s changes; %v", time.Since(began).Round(time.Second), crowd.progress(), counts)
		}
	}
	stop()
	for range kinds {
		<-arms
	}
	if crowd.err != nil {
		t.Fatalf("clients: %v", crowd.err)
	}
	for _, some := range kinds {
		for _, f := range some {
			if counts.count[f.name] == 0 {
				t.Errorf("fault did not occur: %s", f.name)
			}
		}
	}
	healed := time.Now()
	ready(t, reader, places)
	t.Logf("everything serves again %v after the last fault", time.Since(healed).Round(time.Millisecond))

	log, err := readLogs(w.Dir, concurrent)
	if err != nil {
		t.Fatal(err)
	}
	f := readFinal(t, reader)
	for _, wrong := range judge(log, f) {
		t.Error(wrong)
	}
	for _, p := range places {
		compare(t, p, f)
	}
	report(t, log, f, counts, changes, time.Since(began))
}

// setting returns a number from the environment, or the given default.
func setting(t *testing.T, name string, other int) (n int, given bool) {
	t.Helper()
	text, given := os.LookupEnv(name)
	if !given {
		return other, false
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		t.Fatalf("%s=%q is not a number", name, text)
	}
	return n, true
}

// report summarizes the run, and fails the test if the run had too few changes or faults.
func report(t *testing.T, log []entry, f final, faults *tally, changes int, took time.Duration) {
	calls := &tally{count: map[string]int{}}
	outcomes := map[string]int{}
	changed := 0
	for _, e := range log {
		outcomes[e.Outcome]++
		calls.add(e.Ask+": "+e.Outcome, 1)
		if e.Outcome == done && e.Ask != resolve {
			changed++
		}
	}
	t.Logf("%d calls by %d clients in %v: %d changes acknowledged; %v", len(log), concurrent, took.Round(time.Second),
		changed, calls)
	t.Logf("faults: %v", faults)
	t.Logf("the store has %d nodes, %d deleted ones, %d prefixes, %d tenants and %d tenant ids", len(f.nodes),
		len(f.deleted), len(f.prefixes), len(f.tenants), len(f.tenantIDs))
	if changed < changes {
		t.Errorf("got %d changes, want %d", changed, changes)
	}
	for _, outcome := range []string{done, refused, unknown} {
		if outcomes[outcome] == 0 {
			t.Errorf("no call had the outcome %q: the faults did not affect the clients", outcome)
		}
	}
}

// crowd is the process with all clients.
type crowd struct {
	cmd    *exec.Cmd
	mayEnd func() error
	ended  chan struct{}
	err    error
	last   chan string
}

func startClients(t *testing.T, h *host, w work) *crowd {
	t.Helper()
	text, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	c := &crowd{cmd: exec.Command(os.Args[0]), ended: make(chan struct{}), last: make(chan string, 1)}
	c.last <- "0"
	c.cmd.Env = append(os.Environ(), asClients+"="+string(text))
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var complaint strings.Builder
	c.cmd.Stderr = &complaint
	in, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.mayEnd = in.Close
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.start(c.cmd); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(c.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			<-c.last
			c.last <- lines.Text()
		}
		if err := c.cmd.Wait(); err != nil {
			c.err = fmt.Errorf("%w: %s", err, complaint.String())
		}
	}()
	t.Cleanup(func() {
		c.cmd.Process.Kill()
		<-c.ended
	})
	return c
}

func (c *crowd) progress() string {
	text := <-c.last
	c.last <- text
	return text
}

// await retries until ask succeeds.
func await(t *testing.T, what string, ask func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), healing)
	defer cancel()
	for {
		once, cancel := context.WithTimeout(ctx, patience)
		err := ask(once)
		cancel()
		if err == nil {
			return
		}
		if !sleep(ctx, 100*time.Millisecond) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}
