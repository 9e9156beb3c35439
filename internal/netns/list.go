package netns

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Others returns the paths of the machine's network namespaces but the calling thread's, one of each: those of
// processes, and those that are mounted where this process or the machine's first sees it.
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
	// Those that runtimes mount may be in the machine's mount namespace alone.
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
	processes, _ := filepath.Glob("/proc/[0-9]*/ns/net") // the pattern is a good one: there is no other error
	for _, path := range processes {
		if name, err := os.Readlink(path); err == nil { // else it has ended
			add(name, path)
		}
	}
	return paths, nil
}

// IsPersistent reports whether the machine's first process sees a mount of the namespace: other mounts end with
// this process. An error means that the mounts cannot be read.
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

// MountPoint undoes what the kernel does to a path of mountinfo.
func MountPoint(field string) string { return unescaped.Replace(field) }

var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
