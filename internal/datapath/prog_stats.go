package datapath

import (
	"fmt"
	"reflect"
	"time"

	"github.com/cilium/ebpf"
)

// ProgStat is how often a program ran, and the total time.
type ProgStat struct {
	Count uint64
	Time  time.Duration
}

// ProgStats are the statistics of programs by name. The kernel counts while BPF statistics are on.
type ProgStats map[string]ProgStat

// ProgramStats returns the statistics of the programs that this process loaded. On a node that was upgraded, older
// programs may still run.
func (d *Datapath) ProgramStats() (ProgStats, error) { return ProgStatsOf(d.Objects.PilasterPrograms) }

// ProgStatsOf returns the statistics of programs, which are the fields of a struct that bpf2go made.
func ProgStatsOf(objects any) (ProgStats, error) {
	runs := ProgStats{}
	programs := reflect.ValueOf(objects)
	for i := range programs.NumField() {
		name := programs.Type().Field(i).Tag.Get("ebpf")
		stats, err := programs.Field(i).Interface().(*ebpf.Program).Stats()
		if err != nil {
			return nil, fmt.Errorf("statistics of %s: %w", name, err)
		}
		runs[name] = ProgStat{Count: stats.RunCount, Time: stats.Runtime}
	}
	return runs, nil
}

// Add adds another node's statistics.
func (r ProgStats) Add(other ProgStats) {
	for name, run := range other {
		r[name] = ProgStat{Count: r[name].Count + run.Count, Time: r[name].Time + run.Time}
	}
}

// Since returns the difference to earlier statistics.
func (r ProgStats) Since(earlier ProgStats) ProgStats {
	later := ProgStats{}
	for name, run := range r {
		later[name] = ProgStat{Count: run.Count - earlier[name].Count, Time: run.Time - earlier[name].Time}
	}
	return later
}
