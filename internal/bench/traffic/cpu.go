package traffic

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// idle is the idle time of CPUs since boot. The kernel counts idle time exactly, in hundredths of a second. It only
// samples the time of processes and interrupts, and charges softirqs to the interrupted process.
type idle struct{ Cpus, Seconds float64 }

// ReadIdle returns the idle time of one CPU, or of all for -1.
func ReadIdle(cpu int) (idle, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return idle{}, err
	}
	defer f.Close()
	var sum idle
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		number, isCPU := strings.CutPrefix(fields[0], "cpu")
		if !isCPU || number == "" || cpu >= 0 && number != strconv.Itoa(cpu) {
			continue
		}
		for _, field := range fields[4:6] { // idle, and iowait
			hundredths, err := strconv.ParseFloat(field, 64)
			if err != nil {
				return idle{}, fmt.Errorf("/proc/stat: %w", err)
			}
			sum.Seconds += hundredths / 100
		}
		sum.Cpus++
	}
	if sum.Cpus == 0 {
		return idle{}, fmt.Errorf("/proc/stat has no CPU %d", cpu)
	}
	return sum, nil
}

// LastCPU returns the highest CPU that this process may use, because the lowest one handles most interrupts.
func LastCPU() (int, error) {
	cpus, err := usableCPUs()
	if err != nil {
		return 0, err
	}
	return cpus[len(cpus)-1], nil
}

// FirstCPU returns the lowest CPU that this process may use.
func FirstCPU() (int, error) {
	cpus, err := usableCPUs()
	if err != nil {
		return 0, err
	}
	return cpus[0], nil
}

func usableCPUs() (cpus []int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read the CPU affinity: %w", err)
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) == 0 {
		return nil, errors.New("no CPU to run on")
	}
	return cpus, nil
}

// CPUTimes are the times of all CPUs since boot, by number of the CPU.
type CPUTimes map[int]cpuTime

// cpuTime has times in hundredths of a second.
type cpuTime struct{ all, idle, softirq float64 }

// CPUShare has the parts of a CPU's time: 0 to 1. The kernel samples the time in softirqs, with a resolution of
// hundredths of a second, unless it accounts interrupts exactly.
type CPUShare struct {
	CPU     int     `json:"cpu"`
	Idle    float64 `json:"idle"`
	Softirq float64 `json:"softirq"`
}

// ReadCPUTimes reads the times of all CPUs.
func ReadCPUTimes() (CPUTimes, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return nil, err
	}
	times := CPUTimes{}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		number, isCPU := strings.CutPrefix(fields[0], "cpu")
		cpu, err := strconv.Atoi(number)
		if !isCPU || err != nil { // other lines, and the sum
			continue
		}
		var t cpuTime
		for i, field := range fields[1:9] { // up to steal; guest is part of user
			hundredths, err := strconv.ParseFloat(field, 64)
			if err != nil {
				return nil, fmt.Errorf("/proc/stat: %w", err)
			}
			t.all += hundredths
			switch i {
			case 3, 4: // idle, and iowait
				t.idle += hundredths
			case 6:
				t.softirq = hundredths
			}
		}
		times[cpu] = t
	}
	return times, nil
}

// Since returns the shares of the time since before, by number of the CPU.
func (t CPUTimes) Since(before CPUTimes) (all []CPUShare) {
	for _, cpu := range slices.Sorted(maps.Keys(t)) {
		now, then := t[cpu], before[cpu]
		if total := now.all - then.all; total > 0 {
			all = append(all, CPUShare{cpu, (now.idle - then.idle) / total, (now.softirq - then.softirq) / total})
		}
	}
	return all
}
