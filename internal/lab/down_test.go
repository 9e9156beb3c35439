package lab_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// machineState lists what a lab could leave behind: links, mounts, processes and its folder.
func machineState(t *testing.T, name string) []string {
	t.Helper()
	var all []string
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		// Ignore devices that other tests create meanwhile.
		if l.Name == lab.Orchestrator || strings.HasPrefix(l.Name, "pil") || slices.Contains(small.Nodes, l.Name) {
			all = append(all, "link "+l.Name)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if at := strings.Fields(line)[4]; strings.Contains(at, name) {
			all = append(all, "mount "+at)
		}
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		if b, err := os.ReadFile(c); err == nil && strings.Contains(string(b), "/"+name+"/") {
			all = append(all, "process "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	if _, err := os.Stat(filepath.Join(lab.DefaultRoot, name)); err == nil {
		all = append(all, "folder")
	}
	slices.Sort(all)
	return all
}

// specOf returns a spec for a lab. unchanged fails the test if the machine's links, mounts or processes have changed
// since the call of specOf.
func specOf(t *testing.T) (spec lab.Spec, unchanged func(after string)) {
	t.Helper()
	spec = small
	spec.Name = labtest.Name(t)
	before := machineState(t, spec.Name)
	return spec, func(after string) {
		t.Helper()
		if now := machineState(t, spec.Name); !slices.Equal(before, now) {
			t.Errorf("%s:\ngot  %q\nwant %q", after, now, before)
		}
	}
}

func up(ctx context.Context, t *testing.T, spec lab.Spec) *lab.Lab {
	t.Helper()
	l, err := lab.Up(ctx, spec, lab.Options{Binary: labtest.Binary(t)})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestDownLeavesNothing(t *testing.T) {
	spec, unchanged := specOf(t)
	ctx := labtest.Context(t)
	before := machineState(t, spec.Name)
	l := up(ctx, t, spec)
	if during := machineState(t, spec.Name); len(during) < len(before)+8 {
		t.Errorf("machineState does not list the running lab: %q", during)
	}
	if _, err := lab.Up(ctx, spec, lab.Options{Binary: labtest.Binary(t)}); err == nil ||
		!strings.Contains(err.Error(), "lab down "+spec.Name) {
		t.Errorf("a second up of the same lab returned %v", err)
	}
	if err := l.Down(ctx); err != nil {
		t.Fatal(err)
	}
	unchanged("down")
}

func TestDownCleansUpAfterACrash(t *testing.T) {
	spec, unchanged := specOf(t)
	ctx := labtest.Context(t)
	l := up(ctx, t, spec)
	// The supervisor is gone, and a command of another process still runs in a container.
	left := exec.CommandContext(ctx, "sleep", "1000")
	ended := make(chan error, 1)
	go func() { ended <- l.Run("b1", left) }()
	s, err := l.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.Supervisor, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(l.Folder(), "lab.json")); err != nil { // as if only partly written
		t.Fatal(err)
	}
	if err := lab.Down(ctx, "", spec.Name); err != nil {
		t.Fatal(err)
	}
	if status, _ := lab.ExitStatus(<-ended); status != 128+9 {
		t.Errorf("the command in the container ended with status %d, want 128+9 (SIGKILL)", status)
	}
	unchanged("down after a crash")
}

func TestUpThatIsInterruptedLeavesNothing(t *testing.T) {
	spec, unchanged := specOf(t)
	for _, stage := range []string{"fabric", "orchestrator", "agents", "containers"} {
		ctx, cancel := context.WithCancel(labtest.Context(t))
		defer cancel()
		_, err := lab.Up(ctx, spec, lab.Options{Binary: labtest.Binary(t), Progress: func(what string) {
			if strings.Contains(what, stage) {
				cancel()
			}
		}})
		if err == nil {
			t.Errorf("%s: Up succeeded despite the interrupt", stage)
		}
		t.Logf("%s: %v", stage, err)
		unchanged(stage)
	}
}

func TestUpSaysWhyADaemonDoesNotStart(t *testing.T) {
	spec := small
	spec.Name = labtest.Name(t)
	_, err := lab.Up(
		labtest.Context(t),
		spec,
		lab.Options{Binary: labtest.Binary(t), AgentArgs: []string{"--no-such-flag"}},
	)
	if err == nil || !strings.Contains(err.Error(), "agent-n1 did not start") ||
		!strings.Contains(err.Error(), "unknown flag: --no-such-flag") {
		t.Errorf("%v", err)
	}
}
