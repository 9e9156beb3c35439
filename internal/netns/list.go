package netns

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Others returns one path for each network namespace of the machine, except the calling thread's. It finds the
// namespaces of processes, and those that are mounted in the mount namespace of this process or of the machine's first
// process.
func Others() ([]string, error) {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("own network namespace: %w", err)
	}
	known := map[string]bool{own: true}
	var paths []string
	add := func(name, path string) {
		if strings.HasPrefix(name, "net:[") && !known[name] {
			known[name] = true
			paths = append(paths, path)
		}
	}
	// Namespaces that container runtimes mount may be visible only in the mount namespace of process 1.
	for _, seen := range []struct{ process, root string }{{"self", ""}, {"1", "/proc/1/root"}} {
		mounts, err := os.ReadFile(filepath.Join("/proc", seen.process, "mountinfo"))
		if err != nil {
			return nil, fmt.Errorf("mounts: %w", err)
		}
		// Fields: id, parent, device, root, mount point, … ; root is the name of a namespace.
		for line := range strings.Lines(string(mounts)) {
			if fields := strings.Fields(line); len(fields) > 4 {
				add(fields[3], seen.root+MountPoint(fields[4]))
			}
		}
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/ns/net") // Glob fails only if the pattern is malformed
	for _, path := range processes {
		if name, err := os.Readlink(path); err == nil { // otherwise the process has ended
			add(name, path)
		}
	}
	return paths, nil
}

// IsPersistent reports whether the namespace is mounted in the mount namespace of process 1. A mount elsewhere may
// disappear when this process ends. An error means that the mounts cannot be read.
func (n *Namespace) IsPersistent() (bool, error) {
	inode, err := n.Inode()
	if err != nil {
		return false, err
	}
	mounts, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return false, fmt.Errorf("mounts of the machine: %w", err)
	}
	name := fmt.Sprintf("net:[%d]", inode)
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[3] == name {
			return true, nil
		}
	}
	return false, nil
}

// MountPoint unescapes a path from mountinfo.
func MountPoint(field string) string { return unescaped.Replace(field) }

var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
