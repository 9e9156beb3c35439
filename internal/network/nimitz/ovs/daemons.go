package ovs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

const (
	databaseName = "ovsdb-server"
	schemaPath   = "/usr/share/openvswitch/vswitch.ovsschema"
)

// Daemons is a separate Open vSwitch for a node of a lab, with its sockets, database and PID files in one folder. On a
// machine the system's service starts Open vSwitch.
type Daemons struct{ dir string }

// Start starts both daemons in a namespace and returns when they are ready. The folder's path must be short, because it
// contains sockets. An existing database is used again.
func Start(ctx context.Context, ns *netns.Namespace, dir string) (*Daemons, error) {
	d := &Daemons{dir}
	if err := d.start(ctx, ns); err != nil {
		return nil, errors.Join(fmt.Errorf("start open vswitch in %s: %w", dir, err), d.Stop())
	}
	return d, nil
}

func (d *Daemons) start(ctx context.Context, ns *netns.Namespace) error {
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	if err := d.Stop(); err != nil { // daemons of a process that was killed
		return err
	}
	db, socket := filepath.Join(d.dir, "conf.db"), filepath.Join(d.dir, "db.sock")
	if _, err := os.Stat(db); errors.Is(err, os.ErrNotExist) {
		if err := d.run(ctx, ns, "ovsdb-tool", "create", db, schemaPath); err != nil {
			return err
		}
	}
	// With --detach the first process of a daemon exits when the daemon is ready.
	if err := d.run(ctx, ns, databaseName, db, "--remote=punix:"+socket, "--pidfile", "--detach",
		"--log-file"); err != nil {
		return err
	}
	// ovs-vswitchd is ready after it has read the root row of the configuration, so that row must exist.
	c, err := openDatabase(ctx, d.dir)
	if err != nil {
		return err
	}
	defer c.close()
	if _, err := c.root(ctx); err != nil {
		return err
	}
	return d.run(ctx, ns, daemonName, "unix:"+socket, "--pidfile", "--detach", "--log-file")
}

func (d *Daemons) run(ctx context.Context, ns *netns.Namespace, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	// The daemon inherits its output. It must be a file: with a pipe, the caller would wait until the daemon ends.
	out, err := os.Create(filepath.Join(d.dir, name+".out"))
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	for _, folder := range []string{"OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"} {
		cmd.Env = append(cmd.Environ(), folder+"="+d.dir)
	}
	if err := ns.Run(cmd); err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(said)))
	}
	return nil
}

// Stop ends both daemons and returns when they are gone. The database stays.
func (d *Daemons) Stop() error { return errors.Join(d.stop(daemonName), d.stop(databaseName)) }

// find returns a pidfd of a daemon, or -1 if it does not run.
func (d *Daemons) find(name string) (int, error) {
	text, err := os.ReadFile(filepath.Join(d.dir, name+".pid"))
	if errors.Is(err, os.ErrNotExist) {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1, fmt.Errorf("%s: %w", name, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("%s: %w", name, err)
	}
	if is, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || strings.TrimSpace(string(is)) != name {
		return -1, unix.Close(fd) // the daemon is gone, and another process has its PID
	}
	return fd, nil
}

func (d *Daemons) stop(name string) error {
	fd, err := d.find(name)
	if err != nil || fd < 0 {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%s: %w", name, err)
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		case n == 0:
			return fmt.Errorf("%s has not ended within 10 s of SIGTERM", name)
		}
		return nil
	}
}

// Wait returns when one of the daemons has ended, or ctx has.
func (d *Daemons) Wait(ctx context.Context) error {
	var fds []unix.PollFd
	for _, name := range []string{daemonName, databaseName} {
		fd, err := d.find(name)
		if err != nil {
			return err
		}
		if fd < 0 {
			return fmt.Errorf("%s has ended", name)
		}
		defer unix.Close(fd)
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	for ctx.Err() == nil {
		n, err := unix.Poll(fds, 100)
		if n > 0 {
			return errors.New("a daemon of Open vSwitch has ended")
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return nil
}

// Version returns the version that ovs-vswitchd reports.
func (d *Daemons) Version(ctx context.Context) (string, error) {
	said, err := ask(ctx, d.dir, "version")
	first, _, _ := strings.Cut(said, "\n")
	return first, err
}
