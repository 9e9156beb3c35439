package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// endless measures until it is interrupted, and prints a line after each measurement.
func endless(dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	o := options(Free, dir)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR"})
	o.Rounds, o.Window = math.MaxInt32, 20*time.Millisecond
	o.Progress = func(Step) { fmt.Println("measured") }
	_, err := Run(ctx, o)
	return err
}

// TestInterrupted: if the benchmark gets an interrupt, alone or with its process group as from a terminal, it ends with
// an error that names the interrupt, and leaves nothing behind.
func TestInterrupted(t *testing.T) {
	for name, pid := range map[string]func(int) int{
		"alone": func(pid int) int { return pid },
		"group": func(pid int) int { return -pid },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "bench")
			c := exec.Command(os.Args[0])
			c.Env = append(os.Environ(), endlessEnv+"="+dir)
			c.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
			var errs bytes.Buffer
			c.Stderr = &errs
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			defer c.Process.Kill()
			if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
				t.Fatal(err, errs.String())
			}
			if err := unix.Kill(pid(c.Process.Pid), unix.SIGINT); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, out) // until it ends
			_ = c.Wait()
			if want := "interrupted: interrupt signal received; nothing was kept: only a complete run has a " +
				"report"; errs.String() != want {
				t.Errorf("got %s\nwant %s", errs.String(), want)
			}
			if c.ProcessState.ExitCode() != 1 {
				t.Error(c.ProcessState)
			}
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("folder %s still exists: %v", dir, err)
			}
		})
	}
}

// TestStopped: an interrupt also ends CheckGenerator, and a run that has not measured anything yet, with an error that
// names the interrupt.
func TestStopped(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o := tiny(t)
	_, ran := Run(ctx, o)
	_, compared := CheckGenerator(ctx, o)
	for _, err := range []error{ran, compared} {
		if err == nil || !strings.HasPrefix(err.Error(), "interrupted: ") {
			t.Error(err)
		}
	}
}

// TestNoFigures: a run fails before it measures anything if no scenario has the metrics.
func TestNoFigures(t *testing.T) {
	o := tiny(t)
	o.Scenarios = some("native")
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"PROGRAM_IN"})
	if _, err := Run(t.Context(), o); !errors.Is(err, ErrNoFigures) {
		t.Error(err)
	}
}
