package mutation_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// fault is a planted fault in the allocation or distribution of addresses, or in the distribution of endpoints of
// services. A small simulation must detect it.
type fault struct {
	name           string
	file, old, new string
	test           string // of internal/sim
	says           string
	quick          bool // detected quickly: also run without MUTATION=all
}

func faults() []fault {
	return []fault{
		{
			"prefixes twice", "internal/orchestrator/store/nodes.go",
			`t.setMark(keyPrefixMark, n+1)
			t.put(dirPrefixes+prefix.String(), r.Node.UUID)
`,
			`if n != 5 {
				t.setMark(keyPrefixMark, n+1)
				t.put(dirPrefixes+prefix.String(), r.Node.UUID)
			}
`,
			"TestEvents", "one prefix for two nodes", true,
		},
		{
			"mappings not sent", "internal/orchestrator/cache/subscriber.go",
			"case e.Mapping != nil && f.receives(e.Mapping):",
			`case e.Mapping != nil && f.receives(e.Mapping) && f.Node.Name != "n3":`,
			"TestNimitz", "a node lacks mappings of a tenant", false,
		},
		{
			"snapshots twice", "internal/orchestrator/cache/subscriber.go",
			"m.enqueue(f, m.snapshot(f))",
			`m.enqueue(f, m.snapshot(f))
		m.enqueue(f, m.snapshot(f))`,
			"TestEvents", "; each stream may begin with one", false,
		},
		{"indexes twice", "internal/endpoint/cursor.go",
			"c.next = i + 1\n\t\t\treturn i, nil", "c.next = i\n\t\t\treturn i, nil",
			"TestEvents", "one address for two containers", true},
		{"subnets kept", "internal/orchestrator/store/hosting.go",
			"if err := s.releaseAll(t, n, tenant); err != nil {\n\t\t\treturn is, err\n\t\t}\n", "",
			"TestTenantsMove", "a node lacks mappings of a tenant", false},
		{
			"endpoint changes not sent", "internal/orchestrator/cache/cache.go",
			"m.queueShared(f, all)\n",
			`if s := all.GetDelta().GetSlices(); len(s) == 0 || !s[0].Endpoints[0].NotReady || f.Node.Name != "n4" {
				m.queueShared(f, all)
			}
`,
			"TestChangeEndpoint", "did not reach node n4", false,
		},
		{
			"endpoint changes sent to all nodes", "internal/orchestrator/cache/cache.go",
			`	for f := range to {
		if all != nil && f.hosted[tenant] &&`,
			`	leaks := len(all.GetDelta().GetSlices()) > 0
	for _, f := range m.Subscribers {
		to[f] = to[f] || leaks
	}
	maps.DeleteFunc(to, func(_ *Subscriber, is bool) bool { return !is })
	for f := range to {
		if all != nil && (leaks || f.hosted[tenant]) &&`,
			"TestChangeEndpoint", "that do not host the tenant with changes of endpoints", false,
		},
	}
}

// TestSimulationNotices plants the quick faults, or all faults with MUTATION=all. It always checks that the old texts
// of all faults are in the sources.
func TestSimulationNotices(t *testing.T) {
	for _, f := range faults() {
		text := planted{file: f.file}.text(t)
		if n := strings.Count(text, f.old); n != 1 {
			t.Errorf("%s: found %d times in %s, want once:\n%s", f.name, n, f.file, f.old)
			continue
		}
		if !f.quick && os.Getenv("MUTATION") != "all" {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			overlay := overlayOf(t, tree+"/"+f.file, strings.Replace(text, f.old, f.new, 1))
			run := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-ldflags=-w", "-count=1",
				"-run", "^"+f.test+"$", "-overlay", overlay, "./internal/sim")
			run.Dir = tree
			said, err := run.CombinedOutput()
			var failed *exec.ExitError
			if !errors.As(err, &failed) || !bytes.Contains(said, []byte(f.says)) {
				t.Errorf("the simulation's output lacks %q: %v\n%s", f.says, err, said)
			}
		})
	}
}
