package datapath

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/endpoint"
)

// cost is the verifier cost and the size of one program.
type cost struct {
	Verified     int `json:"verified"`     // instructions the verifier walks, over all paths; the kernel stops at a million
	Instructions int `json:"instructions"` // as they run, before the machine's own
	Stack        int `json:"stack"`        // bytes of the deepest chain of calls; the kernel refuses more than 512
	LoadMs       int `json:"-"`            // the verifier's time; shown only, because it depends on the machine's load
}

// What every kernel enforces.
const (
	mostVerified = 1_000_000
	mostStack    = 512
)

// budgetFile is by series of kernels, then by program. `make budget` writes the entries anew.
const budgetFile = "budget.json"

// lowerFrom is a fraction of a budget. If a program's cost is below it, the budget is too high to be of use.
const lowerFrom = 0.8

// TestBudget fails if a program costs more than its budget. So a change that makes a program more expensive to load, or
// brings it nearer to a kernel's limits, shows it in the diff of the budget file.
func TestBudget(t *testing.T) {
	series := kernelSeries(t)
	budgets := map[string]map[string]cost{}
	text, err := os.ReadFile(budgetFile)
	if err == nil {
		err = json.Unmarshal(text, &budgets)
	}
	if err != nil {
		t.Fatal(err)
	}
	write := os.Getenv("PILASTER_BUDGET") == "write"
	budget, known := budgets[series]
	spent := measureCosts(t)
	for name, c := range spent {
		t.Logf(
			"%-16s %6d verified, %5d instructions, %3d bytes of stack, %3d ms",
			name,
			c.Verified,
			c.Instructions,
			c.Stack,
			c.LoadMs,
		)
		if c.Verified > mostVerified || c.Stack > mostStack {
			t.Errorf("%s: %+v is more than kernels take", name, c)
		}
	}
	if write {
		budgets[series] = withHeadroom(spent)
		must(t, writeBudgets(budgets))
		return
	}
	if !known {
		t.Logf("%s has no entry for Linux %s: only the limits of all kernels were checked", budgetFile, series)
		return
	}
	for _, complaint := range compareCosts(spent, budget) {
		t.Errorf("Linux %s: %s", series, complaint)
	}
}

// compareCosts lists the costs that are above their budget, or so far below that the budget is useless.
func compareCosts(spent, budget map[string]cost) (complaints []string) {
	for _, name := range slices.Sorted(maps.Keys(spent)) {
		allowed, known := budget[name]
		if !known {
			complaints = append(complaints, fmt.Sprintf("%s has no budget; `make budget` gives it one", name))
			continue
		}
		for _, c := range []struct {
			what           string
			spent, allowed int
		}{
			{"instructions walked by the verifier", spent[name].Verified, allowed.Verified},
			{"instructions", spent[name].Instructions, allowed.Instructions},
			{"bytes of stack", spent[name].Stack, allowed.Stack},
		} {
			switch {
			case c.spent > c.allowed:
				complaints = append(
					complaints,
					fmt.Sprintf(
						"%s: %d %s, its budget is %d; make it smaller, "+
							"or raise the budget with `make budget` and say in the commit what it buys",
						name,
						c.spent,
						c.what,
						c.allowed,
					),
				)
			case float64(c.spent) < lowerFrom*float64(c.allowed):
				complaints = append(
					complaints,
					fmt.Sprintf(
						"%s: only %d %s of a budget of %d; lower it with `make budget`, "+
							"or it will not notice what grows",
						name,
						c.spent,
						c.what,
						c.allowed,
					),
				)
			}
		}
	}
	for name := range budget {
		if _, known := spent[name]; !known {
			complaints = append(
				complaints,
				fmt.Sprintf("there is a budget for %s, which is no program; `make budget` takes it out", name),
			)
		}
	}
	return complaints
}

func TestBudgetComplains(t *testing.T) {
	budget := map[string]cost{"a": {1000, 500, 400, 100}}
	for _, c := range []struct {
		spent map[string]cost
		want  string // empty: nothing
	}{
		{map[string]cost{"a": {1000, 500, 400, 100}}, ""},
		{map[string]cost{"a": {800, 400, 320, 9000}}, ""},
		{map[string]cost{"a": {1001, 500, 400, 100}}, "1001 instructions walked"},
		{map[string]cost{"a": {1000, 501, 400, 100}}, "501 instructions,"},
		{map[string]cost{"a": {1000, 500, 401, 100}}, "401 bytes of stack"},
		{map[string]cost{"a": {799, 500, 400, 100}}, "only 799"},
		{map[string]cost{"a": {1000, 399, 400, 100}}, "only 399"},
		{map[string]cost{"a": {1000, 500, 400, 100}, "b": {}}, "b has no budget"},
		{nil, "is no program"},
	} {
		got := strings.Join(compareCosts(c.spent, budget), "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%v: got %q, want %q", c.spent, got, c.want)
		}
	}
}

// withHeadroom returns budgets for measured costs, with some room, so that a small fix needs no new budget.
func withHeadroom(spent map[string]cost) map[string]cost {
	budget := map[string]cost{}
	for name, c := range spent {
		budget[name] = cost{
			Verified:     int(math.Ceil(float64(c.Verified) * 1.05)),
			Instructions: int(math.Ceil(float64(c.Instructions) * 1.05)),
			Stack:        c.Stack, // there is little of it
		}
	}
	return budget
}

func writeBudgets(budgets map[string]map[string]cost) error {
	text, err := json.MarshalIndent(budgets, "", "\t")
	if err != nil {
		return err
	}
	// A program a line.
	text = regexp.MustCompile(`\{\s+("verified"[^}]*?)\s+\}`).ReplaceAllFunc(text, func(b []byte) []byte {
		return regexp.MustCompile(`\s+`).ReplaceAll(b, []byte(" "))
	})
	return os.WriteFile(budgetFile, append(text, '\n'), 0o644)
}

func kernelSeries(t *testing.T) string {
	var u unix.Utsname
	must(t, unix.Uname(&u))
	series := regexp.MustCompile(`^\d+\.\d+`).FindString(unix.ByteSliceToString(u.Release[:]))
	if series == "" {
		t.Fatalf("a kernel of no series: %s", u.Release[:])
	}
	return series
}

// oncacheObject has programs that live on the same hooks, and the same budget file.
const oncacheObject = "../oncache/oncache_bpfel.o"

// ilaObject has the programs of a network, which share maps with those of the data path.
const ilaObject = "../network/ila/tables/object_bpfel.o"

// evpnObject has the programs of another one.
const evpnObject = "../network/evpn/tables/object_bpfel.o"

// measureCosts loads the programs as load does for macvlans, because these need most programs, and those of the other
// objects. It reads the verifier's statistics of each program.
func measureCosts(t *testing.T) map[string]cost {
	spec, err := bpfobj.LoadSpec()
	must(t, err)
	plan := address.DefaultPlan()
	plan.Identifiers = true // with all checks
	d := newDatapath(Config{
		Device:       endpoint.Macvlan,
		NodePrefix:   netip.MustParsePrefix("fd70:696c:6100:1::/64"),
		Plan:         plan,
		VTEP4:        netip.MustParsePrefix("192.0.2.0/24"),
		DirectTunnel: true,
	})
	d.Uplinks, d.NodeFar = []netlink.Link{&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 100}}}, 101
	must(t, d.setConstants(spec, 1, 1))
	costs := costsOf(t, spec)
	spec, err = ebpf.LoadCollectionSpec(oncacheObject)
	must(t, err)
	_, err = os.Stat("/proc/sys/net/netfilter/nf_conntrack_count")
	must(t, errors.Join(
		spec.Variables["mark_mask"].Set(uint32(0xff)), // without a mask nothing is learnt
		spec.Variables["tracks"].Set(err == nil)))     // without conntrack the kernel has no lookup
	maps.Copy(costs, costsOf(t, spec))
	constants := d.constants(1, 1)
	for _, name := range []string{"sir_prefix", "own_locator", "neutral_bit"} {
		constants[name] = uint64(0x100000000000007)
	}
	constants["own_vtep4"] = uint32(0x7000a0a)
	constants["macvlan"] = false // these networks have none
	constants["mappings_pulled"] = true
	for _, object := range []string{ilaObject, evpnObject} {
		spec, err = ebpf.LoadCollectionSpec(object)
		must(t, err)
		for name, value := range constants {
			if v := spec.Variables[name]; v != nil {
				must(t, v.Set(value))
			}
		}
		maps.Copy(costs, costsOf(t, spec))
	}
	return costs
}

func costsOf(t *testing.T, spec *ebpf.CollectionSpec) map[string]cost {
	loaded, err := ebpf.NewCollectionWithOptions(
		spec,
		ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}},
	)
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		t.Fatalf("%+v", verifier)
	}
	must(t, err)
	defer loaded.Close()
	costs := map[string]cost{}
	for name, p := range loaded.Programs {
		info, err := p.Info()
		must(t, err)
		size, err := info.TranslatedSize()
		must(t, err)
		stacks := strings.Split(logged(t, p, `stack depth ([\d+]+)`), "+")
		frames := make([]int, len(stacks))
		for i := range stacks {
			frames[i] = number(t, stacks[i])
		}
		costs[name] = cost{
			Verified:     number(t, logged(t, p, `processed (\d+) insns`)),
			Instructions: size / asm.InstructionSize,
			Stack:        deepest(t, spec.Programs[name].Instructions, frames),
			LoadMs:       (number(t, logged(t, p, `verification time (\d+) usec`)) + 999) / 1000,
		}
	}
	return costs
}

func logged(t *testing.T, p *ebpf.Program, pattern string) string {
	found := regexp.MustCompile(pattern).FindStringSubmatch(p.VerifierLog)
	if found == nil {
		t.Fatalf("the verifier says nothing of %q: %s", pattern, p.VerifierLog)
	}
	return found[1]
}

func number(t *testing.T, s string) int {
	n, err := strconv.Atoi(s)
	must(t, err)
	return n
}

// deepest is the stack of the deepest chain of calls. frames are of the program and its functions in the
// order of their instructions; the kernel rounds each up to 16.
func deepest(t *testing.T, program asm.Instructions, frames []int) int {
	var names []string
	calls := map[string][]string{}
	for i := range program {
		if s := program[i].Symbol(); i == 0 || isFunction(program, s) {
			names = append(names, s)
		}
		if program[i].IsFunctionCall() || program[i].IsFunctionReference() { // a reference is a callback
			calls[names[len(names)-1]] = append(calls[names[len(names)-1]], program[i].Reference())
		}
	}
	if len(names) != len(frames) {
		t.Fatalf("the verifier reports %d functions, the object has %v", len(frames), names)
	}
	var depth func(name string) int
	depth = func(name string) int {
		below := 0
		for _, callee := range calls[name] {
			below = max(below, depth(callee))
		}
		return (frames[slices.Index(names, name)]+15)/16*16 + below
	}
	return depth(names[0])
}

// isFunction tells a function's name from a jump's target.
func isFunction(program asm.Instructions, name string) bool {
	return slices.ContainsFunc(
		program,
		func(i asm.Instruction) bool {
			return (i.IsFunctionCall() || i.IsFunctionReference()) && i.Reference() == name
		},
	)
}
