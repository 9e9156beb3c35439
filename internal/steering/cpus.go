package steering

import (
	"fmt"
	"math/big"
	"os"
	"slices"
	"strconv"
	"strings"
)

// maxCPU is the highest number of a CPU that a list may have: the limit of Linux (NR_CPUS) is 8,192 at most.
const maxCPU = 8191

// ParseCPUs parses a list of CPUs such as "0-3,6". The result is sorted and has no duplicates.
func ParseCPUs(list string) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(from, 10, 16)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(to, 10, 16)
		}
		if err != nil || last < first || last > maxCPU {
			return nil, fmt.Errorf("%q is no list of CPUs such as 0-3,6", list)
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus), nil
}

// FormatCPUs formats a list of CPUs, which must be sorted, in the form that ParseCPUs accepts. An empty list is "none".
func FormatCPUs(cpus []int) string {
	if len(cpus) == 0 {
		return "none"
	}
	var parts []string
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		part := strconv.Itoa(cpus[i])
		if j > i {
			part += "-" + strconv.Itoa(cpus[j])
		}
		parts, i = append(parts, part), j+1
	}
	return strings.Join(parts, ",")
}

// onlineCPUs returns the CPUs that are online.
func onlineCPUs() ([]int, error) {
	const file = "/sys/devices/system/cpu/online"
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("CPUs that are online: %w", err)
	}
	cpus, err := ParseCPUs(string(b))
	if err != nil {
		return nil, fmt.Errorf("CPUs that are online: %s: %w", file, err)
	}
	return cpus, nil
}

// formatMask returns the mask of CPUs as the kernel writes it: hexadecimal, in groups of 32 bits.
func formatMask(cpus []int) string {
	mask := new(big.Int)
	for _, cpu := range cpus {
		mask.SetBit(mask, cpu, 1)
	}
	digits := mask.Text(16)
	var groups []string
	for len(digits) > 8 {
		groups = append(groups, digits[len(digits)-8:])
		digits = digits[:len(digits)-8]
	}
	slices.Reverse(groups)
	return strings.Join(append([]string{digits}, groups...), ",")
}

// parseMask is the inverse of formatMask. It accepts leading zeros and groups of zeros, which the kernel writes.
func parseMask(text string) ([]int, error) {
	mask, ok := new(big.Int).SetString(strings.ReplaceAll(strings.TrimSpace(text), ",", ""), 16)
	if !ok || mask.Sign() < 0 {
		return nil, fmt.Errorf("%q is no mask of CPUs", text)
	}
	var cpus []int
	for cpu := range mask.BitLen() {
		if mask.Bit(cpu) == 1 {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}
