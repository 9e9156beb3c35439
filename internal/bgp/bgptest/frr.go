package bgptest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/netns"
)

// FRR is FRR's zebra and bgpd in a network namespace, with their sockets, PID files and logs in one folder.
type FRR struct {
	ns  *netns.Namespace
	dir string
	t   testing.TB
}

const (
	frrFolder    = "/usr/lib/frr"
	startTimeout = 30 * time.Second
)

// StartFRR starts both daemons with a configuration, and stops them when the test ends.
func StartFRR(t testing.TB, ns *netns.Namespace, config string) *FRR {
	t.Helper()
	// The path is short, because it contains sockets.
	dir, err := os.MkdirTemp("", "frr")
	if err != nil {
		t.Fatal(err)
	}
	f := &FRR{ns: ns, dir: dir, t: t}
	t.Cleanup(func() {
		f.Kill("bgpd")
		f.Kill("zebra")
		if t.Failed() {
			log, _ := os.ReadFile(f.path("log"))
			t.Logf("log of FRR:\n%s", log)
		}
		os.RemoveAll(dir)
	})
	if err := f.prepare(config); err != nil {
		t.Fatal(err)
	}
	f.Start("zebra")
	f.Start("bgpd")
	return f
}

func (f *FRR) path(name string) string { return filepath.Join(f.dir, name) }

// prepare makes the folder usable for the user that FRR's daemons change to.
func (f *FRR) prepare(config string) error {
	text := "log file " + f.path("log") + "\n" + config
	if err := os.WriteFile(f.path("conf"), []byte(text), 0o644); err != nil {
		return err
	}
	u, err := user.Lookup("frr")
	if err != nil {
		return fmt.Errorf("FRR is not installed: %w", err)
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return err
	}
	for _, name := range []string{"", "conf"} {
		if err := os.Chown(f.path(name), uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// Start starts a daemon that does not run.
func (f *FRR) Start(daemon string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(frrFolder, daemon), "-d", "-f", f.path("conf"),
		"-i", f.pidFile(daemon), "-z", f.path("zserv"), "--vty_socket", f.dir, "-P", "0", "-A", "127.0.0.1")
	out, err := os.Create(f.path(daemon + ".out"))
	if err != nil {
		f.t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out // a pipe would stay open in the daemon
	if err := f.ns.Run(cmd); err != nil {
		said, _ := os.ReadFile(out.Name())
		f.t.Fatalf("start %s of FRR: %v\n%s", daemon, err, said)
	}
}

func (f *FRR) pidFile(daemon string) string { return f.path(daemon + ".pid") }

// Kill kills a daemon, which sends no notification to its peers, and waits for its end.
func (f *FRR) Kill(daemon string) {
	text, err := os.ReadFile(f.pidFile(daemon))
	if err != nil {
		return // not started
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid < 2 {
		return
	}
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if syscall.Kill(pid, syscall.SIGKILL) != nil {
			break
		}
	}
	os.Remove(f.pidFile(daemon))
}

// Run runs commands of FRR's shell and returns what it prints.
func (f *FRR) Run(commands ...string) string {
	f.t.Helper()
	args := []string{"--vty_socket", f.dir}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	var out strings.Builder
	cmd := exec.Command("vtysh", args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := f.ns.Run(cmd); err != nil {
		f.t.Fatalf("vtysh %q: %v\n%s", commands, err, out.String())
	}
	return out.String()
}
