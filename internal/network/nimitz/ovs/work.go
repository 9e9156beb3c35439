package ovs

import (
	"context"
	"fmt"
	"strconv"
	"strings"
)

// Dir returns the run folder.
func (d *Daemons) Dir() string { return d.dir }

// SwitchPID returns the PID of ovs-vswitchd, which forwards packets.
func (d *Daemons) SwitchPID() (pid int, err error) {
	text, err := daemon(d.dir)
	if err == nil {
		pid, err = strconv.Atoi(text)
	}
	return pid, err
}

// StopIn ends the daemons of a run folder, also if another process started them.
func StopIn(dir string) error { return (&Daemons{dir}).Stop() }

// Purge empties the datapath's flow cache: the next packet of each flow goes through the tables again.
func (d *Daemons) Purge(ctx context.Context) error {
	if _, err := ask(ctx, d.dir, "revalidator/purge"); err != nil {
		return fmt.Errorf("%s: %w", daemonName, err)
	}
	return nil
}

// Work holds the counters of the userspace datapath since its start.
type Work struct {
	Packets  uint64 `json:"packets"`  // received by a port; tunnel packets count twice
	Passes   uint64 `json:"passes"`   // lookups in its caches; a packet from a tunnel needs two
	Exact    uint64 `json:"exact"`    // hits of the exact-match caches
	Megaflow uint64 `json:"megaflow"` // hits of the megaflow cache
	Upcalls  uint64 `json:"upcalls"`  // misses, which the tables decide
}

// work maps the names that ovs-vswitchd prints to the fields.
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

// Work reads the counters, summed over all threads.
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
		return w, fmt.Errorf("%s prints other counters than expected: %s", daemonName, said)
	}
	return w, nil
}

// Since returns the difference to an earlier reading.
func (w Work) Since(earlier Work) Work {
	return Work{
		w.Packets - earlier.Packets,
		w.Passes - earlier.Passes,
		w.Exact - earlier.Exact,
		w.Megaflow - earlier.Megaflow,
		w.Upcalls - earlier.Upcalls,
	}
}

// Plus returns the sum of two.
func (w Work) Plus(other Work) Work {
	return Work{
		w.Packets + other.Packets,
		w.Passes + other.Passes,
		w.Exact + other.Exact,
		w.Megaflow + other.Megaflow,
		w.Upcalls + other.Upcalls,
	}
}
