package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// DefaultRoot is the default folder of labs.
const DefaultRoot = "/run/pilaster-lab"

// folder is a lab's folder; its methods return paths in it.
type folder string

func (f folder) path(elem ...string) string {
	return filepath.Join(append([]string{string(f)}, elem...)...)
}

func (f folder) state() string              { return f.path("lab.json") }
func (f folder) lock() string               { return f.path("lock") }
func (f folder) control() string            { return f.path("supervisor.sock") }
func (f folder) hosts(viewer string) string { return f.path("hosts", viewer) }
func (f folder) bpf() string                { return f.path("bpf") }
func (f folder) netns(name string) string   { return f.path("netns", name) }
func (f folder) log(name string) string     { return f.path("log", name+".log") }

func (f folder) nodeRun(name string) string     { return f.path("nodes", name, "run") }
func (f folder) agentSocket(name string) string { return f.path("nodes", name, "run", "agent.sock") }
func (f folder) nodeState(name string) string   { return f.path("nodes", name, "state") }
func (f folder) nodeBPF(name string) string     { return f.path("bpf", name) }

// cgroups is where the lab has cgroup2 mounted; cgroup is that of a node. The hierarchy is one for all labs, so the
// name has the folder of the lab in it.
func (f folder) cgroups() string { return f.path("cgroup") }
func (f folder) cgroup(node string) string {
	if node == "" {
		return f.path("cgroup", "pilaster-lab"+strings.ReplaceAll(string(f), "/", "-"))
	}
	return filepath.Join(f.cgroup(""), node)
}

func (f folder) nodeOVS(name string) string { return f.path("nodes", name, "ovs") }

func (f folder) orchestratorRun(region string) string  { return f.path("orchestrator", region, "run") }
func (f folder) orchestratorData(region string) string { return f.path("orchestrator", region, "data") }
func (f folder) orchestratorSocket(region string) string {
	return f.path("orchestrator", region, "run", "orchestrator.sock")
}
func (f folder) token(region string) string {
	return f.path("orchestrator", region, "data", "join-token")
}

// List returns the names of the labs under a root, including incomplete ones after a crash.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Choose returns name, or the only running lab if name is empty.
func Choose(root, name string) (string, error) {
	names, err := List(root)
	if err != nil {
		return "", err
	}
	if name == "" && len(names) == 1 {
		return names[0], nil
	}
	for _, n := range names {
		if n == name {
			return n, nil
		}
	}
	switch {
	case len(names) == 0:
		return "", errors.New("no lab is up; start one with: pilaster lab up -f FILE")
	case name == "":
		return "", fmt.Errorf("several labs are up: %s; name one with --lab", strings.Join(names, ", "))
	}
	return "", fmt.Errorf("no lab %q is up; running labs: %s", name, strings.Join(names, ", "))
}

// writeJSON replaces a file atomically.
func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
