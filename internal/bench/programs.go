package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/datapath"
)

func directionOf(program string) traffic.Direction {
	if strings.HasSuffix(program, "_in") {
		return traffic.In
	}
	return traffic.Out
}

// perRun returns the time of a program per packet in ns, minus the time of an empty program.
func (r *run) perRun(of datapath.ProgStat) float64 {
	return float64(of.Time.Nanoseconds())/float64(of.Count) - r.emptyProgram
}

// perPacket returns the time in ns that all programs of a direction take per packet. The program with the most runs
// gives the number of packets, because every packet passes it. Between containers of one node, one of the directions
// has no program.
func (r *run) perPacket(d traffic.Direction, runs datapath.ProgStats) (ns float64, ran bool) {
	var packets uint64
	var sum float64
	for name, run := range runs {
		if directionOf(name) == d && run.Count > 0 {
			packets = max(packets, run.Count)
			sum += r.perRun(run) * float64(run.Count)
		}
	}
	return sum / float64(packets), packets > 0
}

// measurePrograms enables the kernel's run-time statistics of programs. They slow down all programs, so this is a
// separate phase after all others.
func (r *run) measurePrograms(ctx context.Context) (err error) {
	traffic, _ := traffic.MetricByName("UDP_RR")
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return fmt.Errorf("turn on the kernel's BPF statistics: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	if r.emptyProgram, err = progrun.EmptyProgram(); err != nil {
		return err
	}
	for round := range r.Rounds {
		for _, s := range r.random.Perm(len(r.pairs)) {
			pair := r.pairs[s]
			if pair.Runs == nil {
				continue
			}
			before, err := pair.Runs()
			if err != nil {
				return err
			}
			if _, err := r.sample(ctx, pair, traffic); err != nil {
				return fmt.Errorf("round %d, programs of %s: %w", round+1, r.Scenarios[s].Name, err)
			}
			after, err := pair.Runs()
			if err != nil {
				return err
			}
			r.countPrograms(s, after.Since(before))
		}
		r.step(round, "PROGRAM", 1)
	}
	return nil
}

func (r *run) countPrograms(scenario int, runs datapath.ProgStats) {
	for m, metric := range r.Metrics {
		if metric.Programs == 0 {
			continue
		}
		if ns, ran := r.perPacket(metric.Programs, runs); ran {
			taken := &r.taken[scenario][m]
			taken.values = append(taken.values, ns)
		}
	}
	for name, run := range runs {
		if run.Count > 0 {
			r.programs[scenario][name] = append(r.programs[scenario][name], r.perRun(run))
		}
	}
}
