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

// Launch starts a command on a node or in a container: in its network namespace and the cgroup of its node, with its
// host name, and with an /etc/hosts with the names of the lab. On a node and at the orchestrator, environment variables
// direct pilaster to the daemon and folders of the lab instead of those of the machine.
func (l *Lab) Launch(name string, cmd *exec.Cmd) error {
	ns, err := l.Namespace(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	l.prependBinaries(cmd)
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
	if node := l.nodeOf(name); node != "" {
		cgroup, err := os.Open(l.folder.cgroup(node))
		if err != nil {
			return fmt.Errorf("enter the cgroup of node %s: %w", node, err)
		}
		defer cgroup.Close()
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	}
	return netns.OnThread(func() error {
		if err := unix.Setns(ns.FD(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", name, err)
		}
		if err := l.setHostname(name); err != nil {
			return fmt.Errorf("enter %s: %w", name, err)
		}
		return cmd.Start()
	})
}

// nodeOf returns a node, or that of a container; "" for another place.
func (l *Lab) nodeOf(name string) string {
	if slices.Contains(l.state.Spec.AllNodes(), name) {
		return name
	}
	c, err := l.Container(name)
	if err != nil {
		return ""
	}
	return c.Node
}

// prependBinaries puts the folder of the lab's binaries first on PATH, because binaries in other folders may be of
// another build.
func (l *Lab) prependBinaries(cmd *exec.Cmd) {
	bin := filepath.Dir(l.state.Binary)
	cmd.Env = append(cmd.Env, "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	if strings.Contains(cmd.Args[0], "/") {
		return
	}
	// exec.Command has already looked the command up on the caller's PATH.
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

// setHostname gives this thread and its children their own host name and /etc/hosts.
func (l *Lab) setHostname(name string) error {
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
	// The new mount namespace has copies of the mounts of network namespaces. Each copy would keep its network
	// namespace alive while the command runs.
	bound, err := namespaceMounts()
	if err != nil {
		return err
	}
	for _, m := range bound {
		_ = unix.Unmount(m, unix.MNT_DETACH) // fails harmlessly if the mount is not below our root
	}
	return nil
}

// namespaceMounts returns the mount points of namespaces in this thread's mount namespace.
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

// Output runs a command like Run and returns its standard output; an error includes its standard error.
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

// ExitStatus returns a command's exit status as a shell reports it: 128 plus the signal number if a signal ended it. ok
// is false if the command did not run.
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
