package steering

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// tree is the sysfs of one network namespace. /sys/class/net shows the namespace of the process that mounted it, so
// each tree is a mount of its own. The mount is attached nowhere: it ends with Close.
type tree struct{ root *os.File }

func openTree(ns *netns.Namespace) (*tree, error) {
	var t *tree
	err := ns.Do(func() error {
		sysfs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return fmt.Errorf("fsopen: %w", err)
		}
		defer unix.Close(sysfs)
		if err := unix.FsconfigCreate(sysfs); err != nil {
			return fmt.Errorf("fsconfig: %w", err)
		}
		root, err := unix.Fsmount(sysfs, unix.FSMOUNT_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("fsmount: %w", err)
		}
		t = &tree{os.NewFile(uintptr(root), "sysfs")}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("mount the sysfs of %s: %w\n  nothing was changed; run as root, on Linux 5.2 or newer",
			ns.Path(), err)
	}
	return t, nil
}

func (t *tree) Close() error { return t.root.Close() }

// device returns the path of a file of a device.
func (t *tree) device(name string, file ...string) string {
	return filepath.Join(append([]string{fmt.Sprintf("/proc/self/fd/%d/class/net", t.root.Fd()), name}, file...)...)
}

// index returns the index of a device; ErrNotExist if there is none.
func (t *tree) index(device string) (int, error) { return readNumber(t.device(device, "ifindex")) }

// Files of a receive queue.
const (
	cpusFile  = "rps_cpus"
	countFile = "rps_flow_cnt"
)

// settings reads the steering files of a device. Keys are of the form rx-0/rps_cpus.
func (t *tree) settings(device string) (map[string]string, error) {
	queues, err := filepath.Glob(t.device(device, "queues", "rx-*"))
	if err != nil {
		return nil, err
	}
	if len(queues) == 0 {
		return nil, fmt.Errorf("device %s has no receive queues; nothing was changed; use a kernel with CONFIG_RPS",
			device)
	}
	all := map[string]string{}
	for _, queue := range queues {
		for _, file := range []string{cpusFile, countFile} {
			b, err := os.ReadFile(filepath.Join(queue, file))
			if err != nil {
				return nil, fmt.Errorf("device %s: %w", device, shorten(err))
			}
			all[filepath.Join(filepath.Base(queue), file)] = strings.TrimSpace(string(b))
		}
	}
	return all, nil
}

// write writes a steering file of a device.
func (t *tree) write(device, file, value string) error {
	if err := os.WriteFile(t.device(device, "queues", file), []byte(value), 0); err != nil {
		return fmt.Errorf("device %s: %s = %s: %w", device, file, value, shorten(err))
	}
	return nil
}

// facts reads what auto needs to know about a device.
func (t *tree) facts(device string, settings map[string]string) (facts, error) {
	f := facts{queues: len(settings) / 2}
	if _, err := os.Stat(t.device(device, "device")); err != nil {
		return f, nil // software devices have no parent
	}
	f.hardware = true
	domain, err := readNumber(t.device(device, "device", "numa_node"))
	if errors.Is(err, fs.ErrNotExist) || domain < 0 {
		return f, nil
	}
	if err != nil {
		return f, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/sys/devices/system/node/node%d/cpulist", domain))
	if err != nil {
		return f, fmt.Errorf("CPUs of the memory domain of %s: %w", device, err)
	}
	f.near, err = ParseCPUs(string(b))
	return f, err
}

// shorten removes the path, which is that of a file descriptor, from an error.
func shorten(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func readNumber(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, shorten(err)
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
