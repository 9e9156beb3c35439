package mutation_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A fault is one planted in what hands something out or tells of it, which a small simulation has to notice by what must always hold.
type fault struct {
	name           string
	file, old, new string
	test           string // of internal/sim
	says           string
	quick          bool // found at once: looked for also when nobody asks for all
}

func faults() []fault {
	return []fault{
		{"prefixes twice", "internal/orchestrator/store/nodes.go",
			"t.setMark(keyPrefixMark, n+1)\n\t\t\tt.put(dirPrefixes+prefix.String(), r.Node.UUID)\n",
			"if n != 5 {\n\t\t\t\tt.setMark(keyPrefixMark, n+1)\n\t\t\t\tt.put(dirPrefixes+prefix.String(), r.Node.UUID)\n\t\t\t}\n",
			"TestEvents", "one prefix for two nodes", true},
		{"mappings not told", "internal/orchestrator/follower.go", "case e.Mapping != nil && f.has(e.Mapping.Tenant) && !f.asking:", "case e.Mapping != nil && f.has(e.Mapping.Tenant) && !f.asking && f.node.Name != \"n3\":",
			"TestNimitz", "a node does not know where a tenant is", false},
		{"snapshots twice", "internal/orchestrator/follower.go", "m.queue(f, m.snapshot(f))", "m.queue(f, m.snapshot(f))\n\t\tm.queue(f, m.snapshot(f))",
			"TestEvents", "snapshots, and it is about", false},
		{"indexes twice", "internal/endpoint/cursor.go",
			"c.next = i + 1\n\t\t\treturn i, nil", "c.next = i\n\t\t\treturn i, nil",
			"TestEvents", "one address for two containers", true},
		{"subnets kept", "internal/orchestrator/store/hosting.go",
			"if err := s.releaseAll(t, n, tenant); err != nil {\n\t\t\treturn is, err\n\t\t}\n", "",
			"TestTenantsMove", "a node does not know where a tenant is", false},
	}
}

// TestSimulationNotices plants the faults of allocators, and with MUTATION=all each; of all it looks whether their texts are still there.
func TestSimulationNotices(t *testing.T) {
	for _, f := range faults() {
		text := planted{file: f.file}.text(t)
		if n := strings.Count(text, f.old); n != 1 {
			t.Errorf("%s: found %d times in %s, must be once:\n%s", f.name, n, f.file, f.old)
			continue
		}
		if !f.quick && os.Getenv("MUTATION") != "all" {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			overlay := overlayOf(t, tree+"/"+f.file, strings.Replace(text, f.old, f.new, 1))
			run := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-ldflags=-w", "-count=1", "-run", "^"+f.test+"$", "-overlay", overlay, "./internal/sim")
			run.Dir = tree
			said, err := run.CombinedOutput()
			var failed *exec.ExitError
			if !errors.As(err, &failed) || !bytes.Contains(said, []byte(f.says)) {
				t.Errorf("the simulation does not say %q: %v\n%s", f.says, err, said)
			}
		})
	}
}
