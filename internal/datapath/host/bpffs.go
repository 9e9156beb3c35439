package host

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// mountSource identifies a bpffs that we mounted.
const mountSource = "pilaster"

// MountBPFFS makes sure that dir is a folder on a bpffs.
func MountBPFFS(dir string) error {
	at := dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		// If bpffs is not mounted, /sys/fs/bpf is a folder of sysfs, where no folder can be made.
		if at = filepath.Dir(dir); !IsOn(at, unix.SYSFS_MAGIC) {
			return fmt.Errorf("make the folder for pins: %w", err)
		}
	} else if IsOn(dir, unix.BPF_FS_MAGIC) {
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

func IsOn(dir string, filesystem int64) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == filesystem
}

// CheckBPFFS returns an error for a folder of pins that does not outlive this process: a bpffs in a mount namespace of
// its own is removed with the last process in that namespace. A mount that the machine's first process sees outlives
// the agent. If the mounts of that process cannot be read, it returns nil.
func CheckBPFFS(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	at := dir
	var fs unix.Statx_t
	for unix.Statx(unix.AT_FDCWD, at, 0, unix.STATX_MNT_ID, &fs) != nil && at != "/" {
		at = filepath.Dir(at)
	}
	// proc_pid_mountinfo(5): a mount's id, its parent's, and the device that other mounts of the same have too.
	field, is := 0, fmt.Sprint(fs.Mnt_id)
	if IsOn(at, unix.BPF_FS_MAGIC) {
		field, is = 2, fmt.Sprintf("%d:%d", fs.Dev_major, fs.Dev_minor)
	}
	seen, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(seen)) {
		if fields := strings.Fields(line); len(fields) > field && fields[field] == is {
			return nil
		}
	}
	return fmt.Errorf(
		"pins in %s would be removed with the agent, and containers would lose their network: the bpffs is in the "+
			"agent's own mount namespace\n"+
			"  nothing was changed; mount bpffs on the machine (mount -t bpf bpf /sys/fs/bpf) and make it visible "+
			"to the agent, or name it with --bpffs",
		dir,
	)
}

// OurMount returns where MountBPFFS mounted a bpffs for dir; empty if it did not.
func OurMount(dir string) (string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	return mountOf(f, dir)
}

// mountOf reads mountinfo and returns the last bpffs of ours on dir or on the folder that holds it.
func mountOf(mountinfo io.Reader, dir string) (string, error) {
	mount := ""
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		// proc_pid_mountinfo(5): place is the fifth field, file system and source follow a dash.
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Split(before, " "), strings.Split(after, " ")
		if len(fields) < 5 || len(kind) < 2 || kind[0] != "bpf" || kind[1] != mountSource {
			continue
		}
		if place := netns.MountPoint(fields[4]); place == dir || place == filepath.Dir(dir) {
			mount = place
		}
	}
	return mount, lines.Err()
}
