package cpuprofile

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Symbols are the functions of the kernel and of eBPF programs, by address.
type Symbols []Symbol

// Symbol is a function.
type Symbol struct {
	Address uint64
	Name    string
}

// tagged is the prefix of an eBPF program's function in /proc/kallsyms.
var tagged = regexp.MustCompile(`^bpf_prog_[0-9a-f]{16}_`)

// ofPrograms is the prefix of functions of eBPF programs in reports.
const ofPrograms = "bpf: "

// ReadSymbols reads the current symbols. They change when programs are loaded and unloaded.
func ReadSymbols() (all Symbols, err error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, fmt.Errorf("names of the kernel's functions: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 || !strings.ContainsAny(fields[1], "tTwW") {
			continue
		}
		at, err := strconv.ParseUint(fields[0], 16, 64)
		if err != nil {
			return nil, fmt.Errorf("/proc/kallsyms: %w", err)
		}
		if at != 0 {
			all = append(all, Symbol{at, tagged.ReplaceAllString(fields[2], ofPrograms)})
		}
	}
	if len(all) == 0 {
		return nil, errors.New("/proc/kallsyms hides the functions' addresses (sysctl kernel.kptr_restrict)")
	}
	slices.SortStableFunc(all, func(a, b Symbol) int { return cmp.Compare(a.Address, b.Address) })
	return all, lines.Err()
}

// KernelFrom is the lowest address of the kernel; lower ones belong to processes.
const KernelFrom = 1 << 63

// Name returns the name of the function that contains an instruction.
func (s Symbols) Name(instruction uint64) string {
	i, exact := slices.BinarySearchFunc(
		s,
		instruction,
		func(of Symbol, at uint64) int { return cmp.Compare(of.Address, at) },
	)
	if !exact {
		i--
	}
	if i < 0 {
		return "unknown"
	}
	return s[i].Name
}
