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

// Symbols are the kernel's functions and its programs' by their addresses.
type Symbols []Symbol

// Symbol is a function.
type Symbol struct {
	Address uint64
	Name    string
}

// tagged is what the kernel calls a program's function.
var tagged = regexp.MustCompile(`^bpf_prog_[0-9a-f]{16}_`)

// ofPrograms begins the names of programs' functions.
const ofPrograms = "bpf: "

// ReadSymbols are those of now: programs come and go.
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
		return nil, errors.New("/proc/kallsyms hides where functions are (sysctl kernel.kptr_restrict)")
	}
	slices.SortStableFunc(all, func(a, b Symbol) int { return cmp.Compare(a.Address, b.Address) })
	return all, lines.Err()
}

// KernelFrom is where the addresses of the kernel begin; those below are processes'.
const KernelFrom = 1 << 63

// Name of the function that an instruction is in.
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
