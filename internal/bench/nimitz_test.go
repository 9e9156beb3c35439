package bench

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/cpuprofile"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/plot/plottest"
)

// short returns a folder whose path is short enough for sockets.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "nim")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestNimitzScenarios: all measured traffic of network NIMITZ passes VXLAN. Before each first packet, the run flushes
// Open vSwitch's flow caches. Open vSwitch runs on the measured CPU.
func TestNimitzScenarios(t *testing.T) {
	o := tiny(t)
	traffic, _ := traffic.MetricByName("UDP_RR")
	for _, s := range some("nimitz-ebpf", "nimitz-ovs") {
		w, err := scenario.NewWire(filepath.Join(short(t), "w"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		}()
		p, err := s.Build(w)
		if err != nil {
			t.Fatalf("%s: %v", s.Name, err)
		}
		if err := o.share(p.Processes); err != nil {
			t.Fatal(err)
		}
		fabric, err := packet.NewCapture(w.Nodes[1].NS, "eth0", packet.IncomingOnly)
		if err != nil {
			t.Fatal(err)
		}
		defer fabric.Close()
		got, err := o.sample(t.Context(), p, traffic)
		if err != nil {
			t.Fatalf("%s: %v", s.Name, err)
		}
		tunnelled := 0
		seen, _ := fabric.Until(past(t), func(packet.Captured) bool { return false })
		for _, c := range seen {
			is, err := c.Packet()
			if err != nil {
				continue
			}
			switch udp, ok := is.Body.(packet.UDP); {
			case ok && udp.DestinationPort == pipeline.UDPPort:
				tunnelled++
			case ok:
				t.Errorf("%s: packets outside the tunnel: %+v", s.Name, is)
			}
		}
		if float64(tunnelled) < got.Ops {
			t.Errorf("%s: got %d VXLAN packets for %.0f transactions", s.Name, tunnelled, got.Ops)
		}
		if s.Name == "nimitz-ovs" {
			checkSwitches(t, o, p, traffic)
		}
	}
}

func past(t *testing.T) context.Context {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(200*time.Millisecond))
	t.Cleanup(cancel)
	return ctx
}

func checkSwitches(t *testing.T, o Options, p scenario.Pair, traffic traffic.Metric) {
	t.Helper()
	upcalls := func() (n, packets uint64) {
		before, err := p.Work(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.sample(t.Context(), p, traffic); err != nil {
			t.Fatal(err)
		}
		after, err := p.Work(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		did := after.Since(before)
		if did.Packets == 0 || did.Passes != did.Exact+did.Megaflow+did.Upcalls {
			t.Errorf("unexpected work of Open vSwitch: %+v", did)
		}
		return did.Upcalls, did.Packets
	}
	if n, packets := upcalls(); n > packets/10 { // the kernel's own multicast packets may be among them
		t.Errorf("got %d upcalls for %d packets with cached flows", n, packets)
	}
	if err := p.Fresh(); err != nil {
		t.Fatal(err)
	}
	if n, _ := upcalls(); n < 4 {
		t.Errorf("got %d upcalls for first packets on two nodes in both directions", n)
	}
	for _, pid := range p.Processes {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(pid, &set); err != nil || set.Count() != 1 || !set.IsSet(o.CPU) {
			t.Errorf("process %d may run on %d CPUs, %v", pid, set.Count(), err)
		}
	}
}

// TestProfileCounts: each sample of a window adds its share of each transaction's time to one place.
func TestProfileCounts(t *testing.T) {
	at := func(ns int64, pid uint32, address uint64) cpuprofile.Sample {
		return cpuprofile.Sample{Address: address, PID: pid, At: ns}
	}
	p := &profile{places: map[string][]float64{}, functions: map[spot]float64{}}
	p.count([]cpuprofile.Sample{
		at(
			9,
			1,
			5,
		), at(10, 1, 5), at(15, 1, 6), at(20, 2, 5), at(15, 1, cpuprofile.KernelFrom+5), at(16, 3,
			cpuprofile.KernelFrom+5), at(21, 2, 5),
	}, traffic.Answer{From: 10, To: 20, Ops: 2}, cpuprofile.Workers{1: cpuprofile.ByGenerator, 2: cpuprofile.BySwitch},
		cpuprofile.Symbols{{Address: cpuprofile.KernelFrom, Name: "vxlan_rcv"}})
	each := float64(cpuprofile.Period.Nanoseconds()) / 2
	for name, want := range map[string]float64{cpuprofile.ByGenerator: 2 * each, cpuprofile.BySwitch: each,
		"VXLAN and tunnels of the kernel": each, cpuprofile.ByOthers: each, cpuprofile.Elsewhere: 0} {
		if got := p.places[name]; !slices.Equal(got, []float64{want}) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	if !slices.Equal(p.total, []float64{4 * each}) || p.ops != 2 ||
		p.each()[spot{cpuprofile.BySwitch, cpuprofile.BySwitch}] != each {
		t.Errorf("got total %v of %v transactions: %v", p.total, p.ops, p.functions)
	}
}

// TestProfiles: every sample counts for one place, and the times of all places add up to the total.
func TestProfiles(t *testing.T) {
	o := tiny(t)
	o.Dir = filepath.Join(short(t), "b")
	o.Scenarios, o.Window = some("netpila", "nimitz-ebpf", "nimitz-ovs"), 300*time.Millisecond
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"UDP_RR", "PROGRAM_OUT"})
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	ns := func(p Profile, place string) float64 {
		i := slices.IndexFunc(p.Places, func(s Spent) bool { return s.Place == place })
		return p.Places[i].Ns.Median
	}
	for i, name := range []string{"netpila", "nimitz-ebpf", "nimitz-ovs"} {
		p := r.Profiles[i]
		var sum float64
		for _, s := range p.Places {
			if s.Place != cpuprofile.ByOthers {
				sum += s.Ns.Median
			}
		}
		if p.Scenario != name || !(p.Total.Median > 0) || sum < 0.999*p.Total.Median || sum > 1.001*p.Total.Median {
			t.Errorf("%s: the places add up to %v, want the total of %+v", name, sum, p)
		}
		if (ns(p, cpuprofile.BySwitch) > 0) != (name == "nimitz-ovs") || (p.Work != nil) != (name == "nimitz-ovs") {
			t.Errorf("%s: unexpected time of Open vSwitch: %v, %+v", name, ns(p, cpuprofile.BySwitch), p.Work)
		}
		if len(p.Most) == 0 || (p.Most[0].More > 0) != (name != "netpila") {
			t.Errorf("%s: unexpected largest functions %+v", name, p.Most)
		}
	}
	if ns(
		r.Profiles[1],
		"VXLAN and tunnels of the kernel",
	)+ns(
		r.Profiles[1],
		"our programs",
	)+ns(
		r.Profiles[1],
		"the programs' tables, helpers and hooks",
	) == 0 {
		t.Errorf("unexpected places of nimitz-ebpf: %+v", r.Profiles[1].Places)
	}
	var table, page bytes.Buffer
	r.Table(&table)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	plottest.CheckPage(t, page.String(), 2+2+3)
	for _, want := range []string{"by that of", "Open vSwitch, in user space", "upcalls"} {
		if !strings.Contains(table.String(), want) || !strings.Contains(page.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &table)
		}
	}
}

// TestBeside: comparisons are medians of the rounds' ratios.
func TestBeside(t *testing.T) {
	o := tiny(t)
	o.Scenarios = some("native", "netpila", "netpila-macvlan", "nimitz-ebpf")
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "FIRST_RTT"})
	r := reported(
		t,
		o,
		[][][]float64{{{100, 200}, {1, 1}}, {{80, 160}, {4, 4}}, {{90, 180}, {2, 2}}, {{40, 80}, {8, 8}}},
	)
	var got []string
	for _, c := range r.Beside {
		got = append(got, strings.Join(c.cells(), " "))
	}
	if want := []string{
		"TCP_RR more netpila nimitz-ebpf 2.000 2.000–2.000 1.000", "TCP_RR more netpila-macvlan nimitz-ebpf 2.250 " +
			"2.250–2.250 1.000",
		"FIRST_RTT less netpila nimitz-ebpf 0.500 0.500–0.500 ", "FIRST_RTT less netpila-macvlan nimitz-ebpf 0.250 " +
			"0.250–0.250 ",
	}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	var page bytes.Buffer
	if err := r.Page(&page); err != nil || !strings.Contains(page.String(), "NP11") {
		t.Errorf("the page does not name the claim: %v", err)
	}
	plottest.CheckPage(t, page.String(), 3)
}
