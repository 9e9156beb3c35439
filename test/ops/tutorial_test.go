package ops_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestTutorial runs docs/tutorial/two-machines.md on one machine, and compares the output. The commands run in separate
// mount, pid and network namespaces, so that the test can use the tutorial's paths and names, and all processes end
// with the test.
func TestTutorial(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	ctx := labtest.Context(t)
	_, steps := guide(t, "../../docs/tutorial/two-machines.md")
	if len(steps) < 30 {
		t.Fatalf("the tutorial has only %d commands", len(steps))
	}
	bin := t.TempDir()
	for name, target := range map[string]string{"pilaster": labtest.Binary(t), "pilaster-cni": labtest.Binary(t) +
		"-cni", "ping": "/usr/bin/busybox"} {
		must(t, os.Symlink(target, filepath.Join(bin, name)))
	}
	inside := enclosed(ctx, t)

	// The state of the reader's shells: functions and variables.
	functions, variables, last := "", map[string]string{}, ""
	for _, s := range steps {
		switch name, _, isVariable := strings.Cut(s.command, "=fc…"); {
		case isVariable: // an address from the previous output
			addresses := regexp.MustCompile(`\bfc[0-9a-f]{2}:[0-9a-f:]+`).FindAllString(last, -1)
			if addresses == nil {
				t.Fatalf("%s: no address in the previous output\n%s", s.command, last)
			}
			variables[s.machine] += name + "=" + addresses[len(addresses)-1] + "\n"
			continue
		case strings.HasPrefix(s.command, "machine()"):
			functions = s.command + "\n"
			continue
		}
		script := s.command
		if s.machine != "" {
			script = fmt.Sprintf("%smachine %s <<'COMMAND'\n%s%s\nCOMMAND\n", functions, s.machine,
				variables[s.machine], s.command)
		}
		// Daemons need time to start. So the test repeats some commands until their output matches the tutorial.
		for started := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			out, err := inside(ctx, "export PATH="+bin+":$PATH\n"+script)
			if last = out; err == nil && s.fits(out) {
				t.Logf("%s$ %s\n%s", s.machine, s.command, out)
				break
			}
			looks := regexp.MustCompile(`^pilaster (status|node list|tenant create)`).MatchString(s.command)
			if !looks || time.Since(started) > 30*time.Second {
				t.Fatalf("%s$ %s: %v\n%s\nwant, by the tutorial,\n%s", s.machine, s.command, err, out, s.shown)
			}
		}
	}
}

// enclosed returns a function that runs a bash script in separate namespaces. Processes that scripts leave running end
// with the test.
func enclosed(ctx context.Context, t *testing.T) func(context.Context, string) (string, error) {
	t.Helper()
	const prepare = "for d in /run /var/lib; do mount -t tmpfs none $d; done; mount -t bpf none /sys/fs/bpf; mkdir " +
		"/run/reader; echo ready; exec sleep infinity"
	init := exec.Command("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc",
		"--propagation", "private", "bash", "-c", prepare)
	init.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	ready, err := init.StdoutPipe()
	must(t, err)
	must(t, init.Start())
	t.Cleanup(func() {
		_ = init.Process.Kill()
		_ = init.Wait()
	})
	_, err = ready.Read(make([]byte, 1))
	must(t, err)
	first, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", init.Process.Pid, init.Process.Pid))
	must(t, err)
	return func(ctx context.Context, script string) (string, error) {
		var out bytes.Buffer
		cmd := exec.CommandContext(ctx, "nsenter", "--target="+strings.TrimSpace(string(first)), "--mount", "--pid",
			"--net", "bash", "-c", "cd /run/reader\n"+script)
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
}
