package datapath

import (
	"encoding/binary"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/follow"
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
	problems := slices.Concat(missing, notFirst, cutOff, unguarded, d.UplinkProblems())
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

// MeasureWork makes the kernel count the run time of all programs until it is closed.
func (d *Datapath) MeasureWork() (io.Closer, error) {
	counting, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("turn on the kernel's BPF statistics: %w", err)
	}
	return counting, nil
}

// requests are the programs that only the agent runs.
var requests = []string{
	bpfobj.PilasterProgPilSweep, bpfobj.PilasterProgPilKeepSession, bpfobj.PilasterProgPilSetKey,
	bpfobj.PilasterProgPilWhy, bpfobj.PilasterProgPilTryAction, bpfobj.PilasterProgPilTryCipher,
}

// standInWork is what the programs of traces have done in the place of others.
type standInWork struct {
	mu    sync.Mutex
	runs  map[*follow.Programs]bool
	ended ProgStats
}

func (w *standInWork) begin(p *follow.Programs) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.runs == nil {
		w.runs, w.ended = map[*follow.Programs]bool{}, ProgStats{}
	}
	w.runs[p] = true
}

func (w *standInWork) end(p *follow.Programs) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.runs, p)
	return w.ended.addPrograms(p.Shared())
}

// addTo adds the work of all traces until now.
func (w *standInWork) addTo(all ProgStats) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	all.Add(w.ended)
	for p := range w.runs {
		if err := all.addPrograms(p.Shared()); err != nil {
			return err
		}
	}
	return nil
}

// Work returns what the programs have done for packets while the kernel counted. The kernel counts the time of a tail
// call for the program that made it. The programs of networks with an object file of their own are not included.
func (d *Datapath) Work() (w dpapi.Work, err error) {
	all, err := d.ProgramStats()
	if err == nil {
		err = d.standInWork.addTo(all)
	}
	if err != nil {
		return w, err
	}
	for name, s := range all {
		if slices.Contains(requests, name) {
			continue
		}
		w.Total += s.Time
		switch runs := (dpapi.Runs{Count: s.Count, Time: s.Time}); name {
		case bpfobj.PilasterProgPilUplinkIn:
			w.FromFabric = runs
		case bpfobj.PilasterProgPilTunnelIn:
			w.FromTunnel = runs
		case bpfobj.PilasterProgPilUplinkOut:
			w.ToFabric = runs
		}
	}
	return w, nil
}

// DevicePackets returns how many packets each device of this node has received, by number.
func (d *Datapath) DevicePackets() (map[int]uint64, error) {
	links, err := d.Netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("read the counters of devices: %w", err)
	}
	all := make(map[int]uint64, len(links))
	for _, l := range links {
		if s := l.Attrs().Statistics; s != nil {
			all[l.Attrs().Index] = s.RxPackets
		}
	}
	return all, nil
}

// ProgStatsOf returns the statistics of programs, which are the fields of a struct that bpf2go made.
func ProgStatsOf(objects any) (ProgStats, error) {
	all := map[string]*ebpf.Program{}
	programs := reflect.ValueOf(objects)
	for i := range programs.NumField() {
		all[programs.Type().Field(i).Tag.Get("ebpf")] = programs.Field(i).Interface().(*ebpf.Program)
	}
	runs := ProgStats{}
	return runs, runs.addPrograms(all)
}

// addPrograms adds the statistics of programs by name.
func (r ProgStats) addPrograms(all map[string]*ebpf.Program) error {
	for name, program := range all {
		stats, err := program.Stats()
		if err != nil {
			return fmt.Errorf("statistics of %s: %w", name, err)
		}
		r.Add(ProgStats{name: {Count: stats.RunCount, Time: stats.Runtime}})
	}
	return nil
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
