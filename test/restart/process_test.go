package restart_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
)

func agentPID(ctx context.Context, t *testing.T, l *lab.Lab, node string) int {
	t.Helper()
	states, err := l.Processes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(states, func(s lab.ProcessState) bool { return s.Name == lab.AgentProcess(node) })
	if i < 0 || states[i].PID == 0 {
		t.Fatalf("no agent runs on %s: %+v", node, states)
	}
	return states[i].PID
}

// peakMemory returns the maximum resident memory of a process in bytes, and the pages of files that are a part of it.
func peakMemory(pid int) (peak, files int, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for field, value := range map[string]*int{"VmHWM": &peak, "RssFile": &files} {
		_, after, found := strings.Cut(string(b), "\n"+field+":")
		if _, scanned := fmt.Sscan(after, value); !found || scanned != nil {
			err = errors.Join(err, fmt.Errorf("process %d has no %s", pid, field))
		}
		*value <<= 10
	}
	return peak, files, err
}

// tick is the unit of CPU time in /proc/PID/stat.
const tick = 10 * time.Millisecond

// cpuTime returns the CPU time of all threads of a process, including ended ones.
func cpuTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may contain anything; utime and stime are the 12th and 13th field after it.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("unexpected /proc/%d/stat: %q", pid, b)
	}
	user, err := strconv.Atoi(fields[11])
	if err != nil {
		return 0, err
	}
	system, err := strconv.Atoi(fields[12])
	return time.Duration(user+system) * tick, err
}

// mapMemory returns the kernel memory of a process's maps, in bytes.
func mapMemory(pid int) (sum int, err error) {
	objects, err := kernelObjects(pid)
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{}
	for _, o := range objects {
		if strings.HasPrefix(o.name, "map ") && !seen[o.name] {
			sum += o.memlock
		}
		seen[o.name] = true
	}
	return sum, nil
}
