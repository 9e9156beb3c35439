package host

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestCgroupIn(t *testing.T) {
	const (
		v1     = "30 25 0:26 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu\n"
		v2     = "31 25 0:27 / /sys/fs/cgroup/unified rw,relatime shared:6 - cgroup2 cgroup2 rw\n"
		inside = "32 25 0:27 /kubepods/pod1 /sys/fs/cgroup rw,relatime - cgroup2 cgroup rw\n"
	)
	for name, c := range map[string]struct{ mountinfo, want string }{
		"version 1 only":        {v1, ""},
		"both":                  {v1 + v2, "/sys/fs/cgroup/unified"},
		"a part of a hierarchy": {inside, ""},
		"nothing":               {"\n", ""},
	} {
		if got := cgroupIn(c.mountinfo); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestCheckCgroup(t *testing.T) {
	dir := t.TempDir()
	if err := CheckCgroup(dir); err == nil || !strings.Contains(err.Error(), "not in a cgroup file system") {
		t.Errorf("a folder that is no cgroup: %v", err)
	}
	if err := CheckCgroup(filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that does not exist was accepted")
	}
}
