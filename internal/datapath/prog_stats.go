package datapath

import (
	"fmt"
	"reflect"
	"time"

	"github.com/cilium/ebpf"
)

// ProgStat is how often a program ran, and how long that took in all.
type ProgStat struct {
	Count uint64
	Time  time.Duration
}

// ProgStats are those of all programs by name, counted while the kernel's BPF statistics were on.
type ProgStats map[string]ProgStat

// ProgStats reads what the programs that this process loaded have done. On a node that was upgraded, older
// ones may still be at work.
func (d *Datapath) ProgramStats() (ProgStats, error) { return ProgStatsOf(d.Objects.PilasterPrograms) }

// ProgStatsOf reads what programs have done; they are the fields of a struct that bpf2go made.
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

// Add counts another node's in.
func (r ProgStats) Add(other ProgStats) {
	for name, run := range other {
		r[name] = ProgStat{Count: r[name].Count + run.Count, Time: r[name].Time + run.Time}
	}
}

// Since are the runs that came after earlier ones.
func (r ProgStats) Since(earlier ProgStats) ProgStats {
	later := ProgStats{}
	for name, run := range r {
		later[name] = ProgStat{Count: run.Count - earlier[name].Count, Time: run.Time - earlier[name].Time}
	}
	return later
}
