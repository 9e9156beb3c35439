package lab

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// supervisorPatience bounds how long the supervisor may take to stop its processes.
const supervisorPatience = 2 * killAfter

// Down removes a lab: its processes, namespaces, pins, mounts and folder. It also removes an incomplete lab, such as
// after a crash.
func Down(ctx context.Context, root, name string) error {
	f := folder(filepath.Join(cmp.Or(root, DefaultRoot), name))
	if _, err := os.Stat(string(f)); err != nil {
		return fmt.Errorf("lab %s: %w", name, err)
	}
	if err := f.clean(ctx); err != nil {
		return fmt.Errorf("lab %s is not completely down: %w; the rest is in %s; run down again", name, err, f)
	}
	return nil
}

// Down takes the lab down.
func (l *Lab) Down(ctx context.Context) error {
	return Down(ctx, filepath.Dir(string(l.folder)), l.Name())
}

func (f folder) clean(ctx context.Context) error {
	if err := f.endSupervisor(ctx); err != nil {
		return err
	}
	if err := f.killInside(ctx); err != nil {
		return err
	}
	// Remove the pins before the unmount: another mount namespace may still have the bpffs mounted, and then each pin
	// would keep a program or a map alive.
	pins, err := os.ReadDir(f.bpf())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, p := range pins {
		if !p.IsDir() {
			continue // created by the kernel in every bpffs
		}
		if err := os.RemoveAll(f.nodeBPF(p.Name())); err != nil {
			return err
		}
	}
	if err := f.removeCgroups(ctx); err != nil {
		return err
	}
	mounts, err := mountsBelow(string(f))
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	if err := os.RemoveAll(string(f)); err != nil {
		return err
	}
	// The last lab removes the root folder.
	if err := os.Remove(filepath.Dir(string(f))); err != nil && !errors.Is(err, unix.ENOTEMPTY) &&
		!errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// cgroupPatience bounds how long the processes in a cgroup may take to end.
const cgroupPatience = 10 * time.Second

// removeCgroups kills what is left in the cgroups of the nodes, and removes them. The kernel removes a process from its
// cgroup a moment after its end.
func (f folder) removeCgroups(ctx context.Context) error {
	nodes, err := os.ReadDir(f.cgroup(""))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var all []string
	for _, n := range nodes {
		if n.IsDir() {
			all = append(all, f.cgroup(n.Name()))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cgroupPatience)
	defer cancel()
	for _, dir := range append(all, f.cgroup("")) {
		// Kernels before 5.14 have no such file.
		err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("kill what is in cgroup %s: %w", dir, err)
		}
		for {
			err := unix.Rmdir(dir)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) {
				return fmt.Errorf("remove cgroup %s: %w", dir, err)
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
				return fmt.Errorf("remove cgroup %s: %w; processes are still in it", dir, err)
			}
		}
	}
	return nil
}

func (f folder) endSupervisor(ctx context.Context) error {
	pid, err := supervisorPID(f)
	if err != nil || pid == 0 {
		return err
	}
	p, ok := openProcess(pid, func() bool {
		now, err := supervisorPID(f)
		return err == nil && now == pid
	})
	if !ok {
		return nil
	}
	defer p.close()
	return p.end(ctx, supervisorPatience)
}

// killInside kills the processes in the lab's namespaces, until there are none.
func (f folder) killInside(ctx context.Context) error {
	paths, err := filepath.Glob(f.netns("*"))
	if err != nil {
		return err
	}
	namespaces := map[uint64]bool{}
	for _, path := range paths {
		ns, err := netns.Open(path)
		if err != nil {
			continue // created but never mounted
		}
		inode, err := ns.Inode()
		ns.Close()
		if err != nil {
			return err
		}
		namespaces[inode] = true
	}
	for {
		found, err := inside(namespaces)
		if err != nil || len(found) == 0 {
			return err
		}
		for _, p := range found {
			err = errors.Join(err, p.signal(unix.SIGKILL))
		}
		for _, p := range found {
			err = errors.Join(err, p.wait(ctx))
			p.close()
		}
		if err != nil {
			return err
		}
	}
}

// Leftovers lists remaining parts of a lab that is down: its folder, mounts, processes with the folder in their command
// line, and its agents' devices in the namespace of this process.
func Leftovers(root, name string) ([]string, error) {
	dir := filepath.Join(cmp.Or(root, DefaultRoot), name)
	var left []string
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		left = append(left, "folder "+dir)
	}
	mounts, err := mountsBelow(dir)
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		left = append(left, "mount "+m)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, path := range commands {
		// A process that has ended meanwhile is not a leftover.
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(dir+"/")) {
			left = append(left, "process "+string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	links, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if strings.HasPrefix(l.Name, hostDevicePrefix) {
			left = append(left, "device "+l.Name)
		}
	}
	return left, nil
}

// hostDevicePrefix is the prefix of the node's side of every container's device.
const hostDevicePrefix = "pil"

// mountsBelow returns the mounts below a folder, the deepest first.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var mounts []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// Field 5 is the mount point; the lab's names need no unescaping.
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			mounts = append(mounts, fields[4])
		}
	}
	slices.Reverse(mounts)
	return mounts, nil
}
