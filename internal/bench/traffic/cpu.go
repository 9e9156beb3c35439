package traffic

import (
	"bufio"
	"errors"
	"fmt"
	"os"
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
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, fmt.Errorf("read the CPU affinity: %w", err)
	}
	for cpu := len(set)*64 - 1; cpu >= 0; cpu-- {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("no CPU to run on")
}
