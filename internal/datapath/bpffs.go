package datapath

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// mountSource marks a bpffs that we mounted.
const mountSource = "pilaster"

// mountBPFFS makes sure that dir is a folder on a bpffs.
func mountBPFFS(dir string) error {
	at := dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		// Where nobody mounts bpffs, /sys/fs/bpf is a folder of sysfs, which takes no folders of ours.
		if at = filepath.Dir(dir); !isOn(at, unix.SYSFS_MAGIC) {
			return fmt.Errorf("make the folder for pins: %w", err)
		}
	} else if isOn(dir, unix.BPF_FS_MAGIC) {
		return nil
	}
	if err := unix.Mount(mountSource, at, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w; the packet path needs CAP_SYS_ADMIN and a kernel with bpffs", at, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the folder for pins: %w", err)
	}
	return nil
}

func isOn(dir string, filesystem int64) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == filesystem
}

// endsWithUs says so where pins in dir do not outlive this process: a bpffs mounted in a mount namespace of
// its own goes with the last process in there. What the machine's first process sees outlives us; where that
// cannot be told, nothing is said.
func endsWithUs(dir string) string {
	var fs unix.Stat_t
	if unix.Stat(dir, &fs) != nil {
		return ""
	}
	seen, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return ""
	}
	device := fmt.Sprintf("%d:%d", unix.Major(fs.Dev), unix.Minor(fs.Dev))
	for line := range strings.Lines(string(seen)) {
		// proc_pid_mountinfo(5): the device is the third field.
		if fields := strings.Fields(line); len(fields) > 2 && fields[2] == device {
			return ""
		}
	}
	return fmt.Sprintf("the bpffs of %s is mounted in this process's mount namespace alone: packets stop when the agent ends; "+
		"mount bpffs on the machine and start the agent where it is seen", dir)
}

// ourMount is where mountBPFFS mounted a bpffs for dir; empty where it did not.
func ourMount(dir string) (string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	mount := ""
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// proc_pid_mountinfo(5): place is the fifth field, file system and source follow a dash.
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) < 2 || kind[0] != "bpf" || kind[1] != mountSource {
			continue
		}
		if place := strings.ReplaceAll(fields[4], `\040`, " "); place == dir || place == filepath.Dir(dir) {
			mount = place
		}
	}
	return mount, lines.Err()
}
