package datapath

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
)

// Status reads from the kernel what it holds and counts. It enters the node's namespace once: a thread for each hook
// would cost more than all queries.
func (d *Datapath) Status() (s dpapi.Status, err error) {
	err = d.Node.Do(func() error { s, err = d.status(); return err })
	return s, err
}

func (d *Datapath) status() (dpapi.Status, error) {
	missing, notFirst, err := d.HookProblems(d.UplinkHooks())
	if err != nil {
		return dpapi.Status{}, err
	}
	guarded, unguarded, err := d.GuardedInterfaces()
	if err != nil {
		return dpapi.Status{}, err
	}
	var cutOff []string
	for _, find := range []func() ([]string, error){d.NodeProblems, d.TunnelProblems, d.GatewayProblems,
		d.ActiveOVSPorts.Problems} {
		found, err := find()
		if err != nil {
			return dpapi.Status{}, err
		}
		cutOff = append(cutOff, found...)
	}
	drops, err := d.drops()
	if err != nil {
		return dpapi.Status{}, err
	}
	problems := slices.Concat(missing, notFirst, cutOff, unguarded)
	if _, err := d.MTU(); err != nil {
		problems = append(problems, err.Error())
	}
	return dpapi.Status{
		DeviceKind:   d.config.Device,
		DeviceWhy:    d.deviceReason,
		Programs:     bpfobj.Version(),
		Healthy:      len(missing) == 0,
		FirstInChain: len(missing) == 0 && len(notFirst) == 0,
		Guarded:      guarded,
		Problems:     problems,
		Drops:        drops,
	}, nil
}

// drops adds up the counters of all CPUs and layouts. The sums are exact even if events were lost.
func (d *Datapath) drops() ([]dpapi.Drops, error) {
	var all []dpapi.Drops
	for _, r := range dropreason.All() {
		sum := dpapi.Drops{Reason: r.String()}
		for _, m := range slices.Concat(d.oldCounters, []*ebpf.Map{d.Objects.PilDropsV1}) {
			n, err := sumCounter(m, r)
			if err != nil {
				return nil, fmt.Errorf("read the drops for %s: %w", r, err)
			}
			sum.Packets += n
		}
		all = append(all, sum)
	}
	return all, nil
}

// sumCounter reads a map of counters by what all layouts share: the key is the reason, and the first word of a CPU's
// value counts packets.
func sumCounter(m *ebpf.Map, r dropreason.Reason) (packets uint64, err error) {
	values, err := m.LookupBytes(uint32(r)) // nil: a layout without this reason
	size := int(m.ValueSize()+7) &^ 7
	for ; len(values) >= size; values = values[size:] {
		packets += binary.NativeEndian.Uint64(values)
	}
	return packets, err
}

// openOldCounters opens the counters of other layouts, which stay: old programs may count there until the last hook has
// been replaced, and the sum must never decrease.
func (d *Datapath) openOldCounters() error {
	pins, err := filepath.Glob(filepath.Join(d.MapsDir(), countersPrefix+"*"))
	if err != nil {
		return err
	}
	for _, pin := range pins {
		if filepath.Base(pin) == bpfobj.PinDrops {
			continue
		}
		m, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil {
			return fmt.Errorf("open the counters %s: %w", pin, err)
		}
		d.oldCounters = append(d.oldCounters, m)
	}
	return nil
}

// countersPrefix begins the names of the counter maps in every layout.
const countersPrefix = "pil_drops"

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
