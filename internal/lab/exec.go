package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Launch starts a command as if on a node or in a container: in its network namespace, with its
// host name, and with an /etc/hosts that knows the names of the lab. On a node and at the orchestrator the
// environment leads pilaster to the lab's daemon and its folders, and not to the machine's.
func (l *Lab) Launch(name string, cmd *exec.Cmd) error {
	ns, err := l.Namespace(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	l.leadToBinaries(cmd)
	if r, _, ok := l.state.Spec.at(func(r Region) bool { return r.place() == name }); ok {
		cmd.Env = append(cmd.Env, "PILASTER_ORCHESTRATOR_SOCKET="+l.folder.orchestratorSocket(r.Name),
			"PILASTER_DATA_DIR="+l.folder.orchestratorData(r.Name))
	}
	if slices.Contains(l.state.Spec.AllNodes(), name) {
		cmd.Env = append(
			cmd.Env,
			"PILASTER_AGENT_SOCKET="+l.AgentSocket(name),
			"PILASTER_RUN_DIR="+l.folder.nodeRun(name),
			"PILASTER_STATE_DIR="+l.folder.nodeState(name),
			"PILASTER_BPFFS="+l.folder.nodeBPF(name),
		)
	}
	return netns.OnThread(func() error {
		if err := unix.Setns(ns.FD(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", name, err)
		}
		if err := l.disguise(name); err != nil {
			return fmt.Errorf("enter %s: %w", name, err)
		}
		return cmd.Start()
	})
}

// leadToBinaries puts the folder of the lab's own binaries first on the path: one found elsewhere may be of another
// build.
func (l *Lab) leadToBinaries(cmd *exec.Cmd) {
	bin := filepath.Dir(l.state.Binary)
	cmd.Env = append(cmd.Env, "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	if strings.Contains(cmd.Args[0], "/") {
		return
	}
	// The command itself was looked up before, on the caller's path.
	if ours, err := exec.LookPath(filepath.Join(bin, cmd.Args[0])); err == nil {
		cmd.Path, cmd.Err = ours, nil
	}
}

// Run starts a command like Launch and waits for it.
func (l *Lab) Run(name string, cmd *exec.Cmd) error {
	if err := l.Launch(name, cmd); err != nil {
		return err
	}
	return cmd.Wait()
}

// disguise gives this thread, and what it starts, a host name and an /etc/hosts of its own.
func (l *Lab) disguise(name string) error {
	viewer := nodeHosts
	if c, err := l.Container(name); err == nil {
		viewer = c.Tenant
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWUTS); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount(l.folder.hosts(viewer), "/etc/hosts", "", unix.MS_BIND, ""); err != nil &&
		!errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("hosts: %w", err)
	}
	// A copy of a namespace's mount would keep that namespace alive for as long as the command.
	bound, err := namespaceMounts()
	if err != nil {
		return err
	}
	for _, m := range bound {
		_ = unix.Unmount(m, unix.MNT_DETACH) // perhaps not below our root: no harm
	}
	return nil
}

// namespaceMounts lists where this thread sees namespaces mounted.
func namespaceMounts() ([]string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var mounts []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); slices.Contains(fields, "nsfs") {
			mounts = append(mounts, fields[4])
		}
	}
	return mounts, nil
}

// Output runs a command like Run and returns what it prints; its standard error is in the error.
func (l *Lab) Output(ctx context.Context, name string, argv ...string) (string, error) {
	var out, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := l.Run(name, cmd); err != nil {
		return out.String(), fmt.Errorf(
			"%s: %s: %w\n%s",
			name,
			strings.Join(argv, " "),
			err,
			strings.TrimSpace(complaint.String()),
		)
	}
	return out.String(), nil
}

// ExitStatus is the status a shell would give a command that Run ran: 128 and the signal where
// one ended it. ok is false where the command did not run at all.
func ExitStatus(err error) (status int, ok bool) {
	if err == nil {
		return 0, true
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0, false
	}
	if w, is := exit.Sys().(syscall.WaitStatus); is && w.Signaled() {
		return 128 + int(w.Signal()), true
	}
	return exit.ExitCode(), true
}
