package ovs

import (
	"context"
	"fmt"
	"strconv"
	"strings"
)

// Dir is the run folder.
func (d *Daemons) Dir() string { return d.dir }

// SwitchPID is the process that forwards packets.
func (d *Daemons) SwitchPID() (pid int, err error) {
	text, err := daemon(d.dir)
	if err == nil {
		pid, err = strconv.Atoi(text)
	}
	return pid, err
}

// StopIn ends the daemons of a run folder, whoever started them.
func StopIn(dir string) error { return (&Daemons{dir}).Stop() }

// Purge has the datapath forget the flows that it has cached: the next packet of each is decided by the tables again.
func (d *Daemons) Purge(ctx context.Context) error {
	if _, err := ask(ctx, d.dir, "revalidator/purge"); err != nil {
		return fmt.Errorf("%s: %w", daemonName, err)
	}
	return nil
}

// Work is what the datapath in user space has done since it was started.
type Work struct {
	Packets  uint64 `json:"packets"`  // that came in by a port, tunnels' twice
	Passes   uint64 `json:"passes"`   // through its caches; a packet out of a tunnel has another
	Exact    uint64 `json:"exact"`    // of them, those that a cache of whole headers decided
	Megaflow uint64 `json:"megaflow"` // those that a cached flow decided
	Upcalls  uint64 `json:"upcalls"`  // those that the tables decided
}

// work is what ovs-vswitchd calls each.
var work = map[string]func(*Work) []*uint64{
	"packets received":         func(w *Work) []*uint64 { return []*uint64{&w.Packets, &w.Passes} },
	"packet recirculations":    func(w *Work) []*uint64 { return []*uint64{&w.Passes} },
	"simple match hits":        func(w *Work) []*uint64 { return []*uint64{&w.Exact} },
	"emc hits":                 func(w *Work) []*uint64 { return []*uint64{&w.Exact} },
	"smc hits":                 func(w *Work) []*uint64 { return []*uint64{&w.Megaflow} },
	"megaflow hits":            func(w *Work) []*uint64 { return []*uint64{&w.Megaflow} },
	"miss with success upcall": func(w *Work) []*uint64 { return []*uint64{&w.Upcalls} },
	"miss with failed upcall":  func(w *Work) []*uint64 { return []*uint64{&w.Upcalls} },
}

// Work reads it, of all threads.
func (d *Daemons) Work(ctx context.Context) (w Work, err error) {
	said, err := ask(ctx, d.dir, "dpif-netdev/pmd-stats-show")
	if err != nil {
		return w, fmt.Errorf("%s: %w", daemonName, err)
	}
	return parseWork(said)
}

func parseWork(said string) (w Work, err error) {
	known := 0
	for line := range strings.Lines(said) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		to := work[name]
		if to == nil {
			continue
		}
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return w, fmt.Errorf("%s counts %q", daemonName, strings.TrimSpace(line))
		}
		known++
		for _, sum := range to(&w) {
			*sum += n
		}
	}
	if known == 0 {
		return w, fmt.Errorf("%s counts in words that are not known: %s", daemonName, said)
	}
	return w, nil
}

// Since is what came after.
func (w Work) Since(earlier Work) Work {
	return Work{
		w.Packets - earlier.Packets,
		w.Passes - earlier.Passes,
		w.Exact - earlier.Exact,
		w.Megaflow - earlier.Megaflow,
		w.Upcalls - earlier.Upcalls,
	}
}

// Plus is of two.
func (w Work) Plus(other Work) Work {
	return Work{
		w.Packets + other.Packets,
		w.Passes + other.Passes,
		w.Exact + other.Exact,
		w.Megaflow + other.Megaflow,
		w.Upcalls + other.Upcalls,
	}
}
