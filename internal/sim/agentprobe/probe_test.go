package agentprobe

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/debugserver"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

// TestAgent: when forty nodes join, a real agent receives no message about them on netpila, and messages about each of
// them on nimitz. The agent is not fully warm, so the test tolerates some change of its memory.
func TestAgent(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for _, network := range []string{tenant.Netpila, tenant.Nimitz} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "sim") // short, for a socket
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			r, err := Run(t.Context(), Options{
				Networks: []string{
					network,
				}, Sizes: []int{20, 60}, Containers: 2, NodeContainers: 3, Followers: 10, Dir: dir,
				Binary: labtest.Binary(t),
				Name: fmt.Sprintf(
					"simagent-%s-%d",
					network[:3],
					os.Getpid(),
				), Log: slog.New(slog.DiscardHandler), Progress: func(what string) { t.Log(what) },
			})
			if err != nil {
				t.Fatal(err)
			}
			first, last := r.Lines[0].Points[0], r.Lines[0].Points[1]
			if first.Nodes != 20 || last.Nodes != 60 || last.Containers != 180 || last.Memory.Heap < 1<<20 ||
				last.Memory.Resident < last.Memory.Heap {
				t.Errorf("unexpected points: with 20 nodes %+v, with 60 nodes %+v", first, last)
			}
			more, received := 0, last.Received
			if network == tenant.Nimitz {
				more = 40
				if received.Bytes < 40*40 || received.Bytes > 100*40 || received.Messages == 0 {
					t.Errorf("with 40 more nodes the agent received %+v, want 40 to 100 bytes per node", received)
				}
			} else if received != (sim.Count{}) || first.Received != (sim.Count{}) {
				t.Errorf("the agent received %+v with 20 nodes, and %+v with 40 more; want nothing",
					first.Received, received)
			}
			if grown := change(last.Memory.Heap, first.Memory.Heap); math.Abs(grown) > 0.05 {
				t.Errorf("the live heap changed by more than 5 %%: with 20 nodes %+v, with 60 nodes %+v",
					first.Memory, last.Memory)
			}
			if is := last.entries() - first.entries(); is != more {
				t.Errorf("40 more nodes caused %d more entries, want %d: %v, %v", is, more, first.Entries, last.Entries)
			}
			var page, table bytes.Buffer
			if err := r.Page(&page); err != nil || !strings.Contains(page.String(), "<svg") {
				t.Errorf("got page %q: %v", page.String(), err)
			}
			if r.Table(&table); !strings.Contains(table.String(), "network "+network) {
				t.Errorf("got table %q", table.String())
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("files remain in the folder: %v, %v", left, err)
			}
		})
	}
}

// TestNotFlat: notFlat reports planted growth, and accepts changes within the limits.
func TestNotFlat(t *testing.T) {
	series := func(plant func(*Point)) []Point {
		var all []Point
		for _, nodes := range []int{1000, 10_000, 100_000} {
			all = append(
				all,
				Point{
					Nodes:      nodes,
					Memory:     debugserver.Memory{Heap: 4_000_000, Resident: 40_000_000},
					Entries:    map[string]int{"locals": 31},
					Heartbeats: sim.Count{Messages: 9, Bytes: 45},
				},
			)
		}
		plant(&all[2])
		return all
	}
	for _, c := range []struct {
		plant func(*Point)
		want  string
	}{
		{func(*Point) {}, ""},
		{func(p *Point) { p.Memory.Heap, p.Memory.Resident = 4_039_000, 38_100_000 }, ""},
		{func(p *Point) { p.Memory.Heap = 4_041_000 }, "live heap changed by +1.0"},
		{func(p *Point) { p.Memory.Heap = 3_959_000 }, "live heap changed by -1.0"},
		{func(p *Point) { p.Memory.Resident = 42_100_000 }, "resident memory changed by +5.25 %"},
		{func(p *Point) { p.Received = sim.Count{Messages: 1, Bytes: 24} }, "1 messages of 24 bytes"},
		{func(p *Point) { p.Entries = map[string]int{"locals": 32} }, "32 entries"},
	} {
		got := notFlat(series(c.plant))
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("got findings %q, want %q", got, c.want)
		}
	}
	for _, c := range []struct {
		line Line
		want string
	}{
		{Line{Network: tenant.Netpila, Points: series(func(*Point) {})}, "\nflat\n"},
		{Line{Network: tenant.Netpila, Points: series(func(*Point) {}), NotFlat: []string{"one"}}, "\nnot flat: one\n"},
		{Line{Network: tenant.Netpila, Points: series(func(*Point) {})[:2]}, ""}, // the run ended early
		{Line{Network: tenant.Nimitz, Points: series(func(*Point) {})}, ""},
	} {
		var table bytes.Buffer
		(&Report{Sizes: []int{1000, 10_000, 100_000}, Lines: []Line{c.line}}).Table(&table)
		if !strings.HasSuffix(table.String(), c.want) || c.want == "" && strings.Contains(table.String(), "flat") {
			t.Errorf("unexpected table for %+v: %q", c.line, table.String())
		}
	}
	growing := series(func(*Point) {}) // small growth in each step adds up to too much
	for i := range growing {
		growing[i].Memory.Heap += int64(30_000 * i)
	}
	if got := notFlat(growing); len(got) != 1 || !(&Report{Lines: []Line{{NotFlat: nil}}}).Pass() ||
		(&Report{Lines: []Line{{}, {NotFlat: got}}}).Pass() {
		t.Errorf("unexpected findings for an agent that grows: %q", got)
	}
}
