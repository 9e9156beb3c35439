package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// FindCgroup returns the folder where the cgroup file system of version 2 is mounted. On a host that has only version 1
// it mounts one in a folder of its own, which an earlier call may have done.
func FindCgroup(own string) (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("look for cgroup2: %w", err)
	}
	if at := cgroupIn(string(b)); at != "" {
		return at, nil
	}
	if err := errors.Join(os.MkdirAll(own, 0o700), unix.Mount("none", own, "cgroup2", 0, "")); err != nil {
		return "", fmt.Errorf("mount cgroup2 on %s: %w; the kernel needs CONFIG_CGROUP_BPF; without it use "+
			"--cgroup-root none", own, err)
	}
	return own, nil
}

// cgroupIn returns the first mount of a whole cgroup file system of version 2 in a mountinfo file (proc(5)); "" if
// there is none.
func cgroupIn(mountinfo string) string {
	for line := range strings.Lines(mountinfo) {
		place, kind, both := strings.Cut(line, " - ")
		fields := strings.Fields(place)
		if both && strings.HasPrefix(kind, "cgroup2 ") && len(fields) > 4 && fields[3] == "/" {
			return filepath.Clean(fields[4])
		}
	}
	return ""
}

// CheckCgroup refuses a folder that is no cgroup of version 2.
func CheckCgroup(root string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(root, &s); err != nil {
		return fmt.Errorf("cgroup %s: %w", root, err)
	}
	if s.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is not in a cgroup file system of version 2; name a folder of one, such as "+
			"/sys/fs/cgroup/unified, or mount one: mount -t cgroup2 none DIR", root)
	}
	return nil
}
