package steering

import (
	"slices"
	"strings"
	"testing"
)

func TestCPULists(t *testing.T) {
	for list, want := range map[string][]int{
		"0": {0}, "0-3,6": {0, 1, 2, 3, 6}, "3,1-2,2": {1, 2, 3}, " 5\n": {5}, "8191": {8191},
	} {
		got, err := ParseCPUs(list)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: got %v, %v", list, got, err)
		}
		again, err := ParseCPUs(FormatCPUs(got))
		if err != nil || !slices.Equal(again, want) {
			t.Errorf("%q: formatted as %s, parsed as %v, %v", list, FormatCPUs(got), again, err)
		}
		if mask, err := parseMask(formatMask(got)); err != nil || !slices.Equal(mask, want) {
			t.Errorf("%q: mask %s, parsed as %v, %v", list, formatMask(got), mask, err)
		}
	}
	for _, list := range []string{"", "x", "1-", "-1", "3-1", "0,,1", "8192", "0-99999", "1-2-3", "+1"} {
		if got, err := ParseCPUs(list); err == nil {
			t.Errorf("%q was accepted as %v", list, got)
		}
	}
}

func TestMasks(t *testing.T) {
	for _, c := range []struct {
		cpus []int
		mask string
	}{
		{nil, "0"}, {[]int{0, 1}, "3"}, {[]int{31}, "80000000"}, {[]int{32}, "1,00000000"},
		{[]int{0, 33, 64}, "1,00000002,00000001"},
	} {
		if got := formatMask(c.cpus); got != c.mask {
			t.Errorf("%v: mask %s, want %s", c.cpus, got, c.mask)
		}
		if got, err := parseMask("0000" + c.mask + "\n"); err != nil || !slices.Equal(got, c.cpus) {
			t.Errorf("%s: got %v, %v", c.mask, got, err)
		}
	}
	for _, mask := range []string{"", "x", "-1"} {
		if got, err := parseMask(mask); err == nil {
			t.Errorf("%q was accepted as %v", mask, got)
		}
	}
}

// TestPlan: the rules of scaling.rst.
func TestPlan(t *testing.T) {
	four := []int{0, 1, 2, 3}
	for _, c := range []struct {
		name    string
		mode    string
		facts   facts
		cpus    []int
		entries int
		want    plan
		reason  string // part of it
	}{
		{"off", Off, facts{queues: 1}, four, 0, plan{mode: Off}, ""},
		{"rps", RPS, facts{queues: 8, hardware: true}, four, 0, plan{mode: RPS, cpus: four}, ""},
		{"rfs, one queue", RFS, facts{queues: 1}, four, 32768, plan{mode: RFS, cpus: four, flowCount: 32768}, ""},
		{"rfs, 16 queues", RFS, facts{queues: 16}, four, 32768, plan{mode: RFS, cpus: four, flowCount: 2048}, ""},
		{"rfs, 3 queues", RFS, facts{queues: 3}, four, 1024, plan{mode: RFS, cpus: four, flowCount: 512}, ""},
		{"rfs, more queues than entries", RFS, facts{queues: 8}, four, 4,
			plan{mode: RFS, cpus: four, flowCount: 1}, ""},
		{"auto: queues cover the CPUs", Auto, facts{queues: 4, hardware: true}, four, 32768, plan{mode: Off},
			"4 hardware queues cover 4 CPUs"},
		{"auto: fewer queues", Auto, facts{queues: 2, hardware: true}, four, 32768,
			plan{mode: RFS, cpus: four, flowCount: 16384}, "fewer hardware queues than CPUs"},
		{"auto: the device's memory domain", Auto, facts{queues: 1, hardware: true, near: []int{2, 3, 9}}, four, 0,
			plan{mode: RPS, cpus: []int{2, 3}}, "memory domain"},
		{"auto: another memory domain", Auto, facts{queues: 1, hardware: true, near: []int{9}}, four, 0,
			plan{mode: RPS, cpus: four}, "fewer hardware queues"},
		{"auto: software queues interrupt no CPU", Auto, facts{queues: 4}, four, 0, plan{mode: RPS, cpus: four},
			"only the first network namespace has its table"},
		{"auto: a table of flows", Auto, facts{queues: 1}, four, 65536,
			plan{mode: RFS, cpus: four, flowCount: 65536}, "software device"},
		{"auto: one CPU", Auto, facts{queues: 1}, []int{3}, 65536, plan{mode: Off}, "one CPU"},
	} {
		got := planFor(c.mode, c.facts, c.cpus, c.entries)
		if got.mode != c.want.mode || !slices.Equal(got.cpus, c.want.cpus) || got.flowCount != c.want.flowCount ||
			!strings.Contains(got.reason, c.reason) {
			t.Errorf("%s: got %+v, want %+v with reason %q", c.name, got, c.want, c.reason)
		}
	}
}

func TestTableSize(t *testing.T) {
	for flows, want := range map[int]int{1: 1, 2: 2, 3: 4, 1000: 1024, 32768: 32768, 32769: 65536} {
		if got := tableSize(flows); got != want {
			t.Errorf("%d flows: %d entries, want %d", flows, got, want)
		}
	}
}
