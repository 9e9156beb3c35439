package datapath

import (
	"fmt"
	"reflect"
	"time"

	"github.com/cilium/ebpf"
)

// Run is how often a program ran, and how long that took in all.
type Run struct {
	Count uint64
	Time  time.Duration
}

// Runs are those of all programs by name, counted while the kernel's BPF statistics were on.
type Runs map[string]Run

// Runs reads what the programs that this process loaded have done. On a node that was upgraded, older
// ones may still be at work.
func (d *Datapath) Runs() (Runs, error) { return RunsOf(d.objects.pilasterPrograms) }

// RunsOf reads what programs have done; they are the fields of a struct that bpf2go made.
func RunsOf(objects any) (Runs, error) {
	runs := Runs{}
	programs := reflect.ValueOf(objects)
	for i := range programs.NumField() {
		name := programs.Type().Field(i).Tag.Get("ebpf")
		stats, err := programs.Field(i).Interface().(*ebpf.Program).Stats()
		if err != nil {
			return nil, fmt.Errorf("statistics of %s: %w", name, err)
		}
		runs[name] = Run{Count: stats.RunCount, Time: stats.Runtime}
	}
	return runs, nil
}

// Add counts another node's in.
func (r Runs) Add(other Runs) {
	for name, run := range other {
		r[name] = Run{Count: r[name].Count + run.Count, Time: r[name].Time + run.Time}
	}
}

// Since are the runs that came after earlier ones.
func (r Runs) Since(earlier Runs) Runs {
	later := Runs{}
	for name, run := range r {
		later[name] = Run{Count: run.Count - earlier[name].Count, Time: run.Time - earlier[name].Time}
	}
	return later
}
