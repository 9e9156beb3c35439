package restart_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
)

// holdings counts each kind of resource that a container could leak.
type holdings map[string]int

// settle is the maximum time in which the kernel and the agent must release a container's resources. patience is the
// maximum time on a busy machine.
const (
	settle   = 5 * time.Second
	patience = time.Minute
)

// reread is the interval of readings. A state is stable after steady equal consecutive readings, because descriptors
// and threads of the last call may remain for a moment.
const (
	reread = 100 * time.Millisecond
	steady = 5
)

// rest waits until the resources are stable.
func rest(ctx context.Context, t *testing.T, now func() holdings) holdings {
	t.Helper()
	tick := time.NewTicker(reread)
	defer tick.Stop()
	deadline := time.Now().Add(patience)
	last, times := now(), 1
	for times < steady {
		if time.Now().After(deadline) {
			t.Fatalf("the node's resources have not become stable within %v", patience)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
		next := now()
		if times++; !maps.Equal(last, next) {
			times = 1
		}
		last = next
	}
	return last
}

// held reads the resources of a node and its agent from the kernel and the file system.
func held(ctx context.Context, t *testing.T, l *lab.Lab, p *plugin, namespaces int) holdings {
	t.Helper()
	h := holdings{}
	err := errors.Join(
		h.addLinks(l, p, namespaces), h.addPins(l.BPF(node)), h.addProcess(agentPID(ctx, t, l, node)),
		h.addFiles(filepath.Join(l.Folder(), "nodes", node)),
	)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// same waits until the node has the same resources as before.
func (h holdings) same(ctx context.Context, t *testing.T, now func() holdings) {
	t.Helper()
	most := patience
	if judgesTimes() {
		most = settle
	}
	tick := time.NewTicker(reread)
	defer tick.Stop()
	deadline := time.Now().Add(most)
	for {
		after := now()
		if maps.Equal(h, after) {
			return
		}
		if time.Now().After(deadline) {
			all := maps.Clone(h)
			maps.Copy(all, after)
			for _, thing := range slices.Sorted(maps.Keys(all)) {
				if h[thing] != after[thing] {
					t.Errorf("%s: %d before, %d at %v after the last container was removed",
						thing, h[thing], after[thing], most)
				}
			}
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
	}
}

// addLinks counts the node's links by name, and all links in the containers' namespaces.
func (h holdings) addLinks(l *lab.Lab, p *plugin, namespaces int) error {
	ns, err := l.Namespace(node)
	if err != nil {
		return err
	}
	links, err := linksOf(ns)
	if err != nil {
		return err
	}
	for _, link := range links {
		h["link "+link.Attrs().Name]++
	}
	for i := range namespaces {
		ns, err := netns.Open(p.netns(i))
		if err != nil {
			return err
		}
		links, err := linksOf(ns)
		if err != nil {
			return err
		}
		h["links in containers"] += len(links)
	}
	return nil
}

// linksOf lists the links of a namespace, and closes it.
func linksOf(ns *netns.Namespace) ([]netlink.Link, error) {
	defer ns.Close()
	handle, err := ns.Netlink()
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	return netns.List(handle.LinkList)
}

// addPins counts pins, and the entries of pinned hash maps, because the other maps have a fixed number of entries.
func (h holdings) addPins(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		h["pin "+path]++
		if entry.IsDir() || filepath.Base(filepath.Dir(path)) != "maps" {
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer m.Close()
		if m.Type() != ebpf.Hash && m.Type() != ebpf.LRUHash {
			return nil
		}
		key := make([]byte, m.KeySize())
		for err = m.NextKey(nil, key); err == nil; err = m.NextKey(key, key) {
			h["entries of "+path]++
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	})
}

var digits = regexp.MustCompile(`\d+`)

// addProcess counts a process's descriptors by target, the programs and maps of its descriptors by ID, and the network
// namespaces of its threads.
func (h holdings) addProcess(pid int) error {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	descriptors, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return err
	}
	for _, d := range descriptors {
		target, err := os.Readlink(filepath.Join(proc, "fd", d.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		}
		if err != nil {
			return err
		}
		if !strings.HasPrefix(target, "/") {
			target = digits.ReplaceAllString(target, "N") // inode numbers
		}
		h["descriptor "+target]++
	}
	objects, err := kernelObjects(pid)
	if err != nil {
		return err
	}
	for _, o := range objects {
		h[o.name]++
	}
	threads, err := filepath.Glob(filepath.Join(proc, "task/*/ns/net"))
	if err != nil {
		return err
	}
	in := map[string]bool{}
	for _, path := range threads {
		if ns, err := os.Readlink(path); err == nil { // otherwise the thread has ended
			in[ns] = true
		}
	}
	h["namespaces of threads"] = len(in)
	return nil
}

// addFiles counts files by path, including records of endpoints.
func (h holdings) addFiles(dir string) error {
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		h["file "+path]++
		return err
	})
}

// kernelObject is the map or program of a descriptor.
type kernelObject struct {
	name    string // "map 7"
	memlock int    // bytes
}

// kernelObjects reads a process's maps and programs from its fdinfo.
func kernelObjects(pid int) ([]kernelObject, error) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return nil, err
	}
	var all []kernelObject
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // closed meanwhile
		}
		var o kernelObject
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			value = strings.TrimSpace(value)
			switch key {
			case "map_id", "prog_id":
				o.name = strings.TrimSuffix(key, "_id") + " " + value
			case "memlock":
				if o.memlock, err = strconv.Atoi(value); err != nil {
					return nil, fmt.Errorf("%s: %w", path, err)
				}
			}
		}
		if o.name != "" {
			all = append(all, o)
		}
	}
	return all, nil
}
