package suites

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/plot/plottest"
)

// TestEntries: a real switch of either kind has entries for nodes, containers and services, and none for pairs of them
// (NM2). With node CIDRs, the number of entries to other nodes is smaller by a factor: the number of containers per
// node (NM3).
func TestEntries(t *testing.T) {
	const here = 5
	steps := 0
	r, err := Entries(t.Context(), EntriesOptions{
		Switches: EntrySwitches, Nodes: []int{1, 2, 9}, Density: here, Services: 7, Dir: filepath.Join(short(t), "b"),
		Progress: func(int, int) { steps++ },
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Samples) != 2*2*2*2*3 || steps != 24 || len(r.Grows) != 4 || !r.Pass {
		t.Fatalf("got %d samples in %d steps, growth %+v", len(r.Samples), steps, r.Grows)
	}
	for _, g := range r.Grows {
		node := 1.0
		if !g.NodeCIDRs {
			node = here
		}
		// Per container: its sender and forwarding entries, and the NAT entries to services and back. Per service:
		// forwarding to and from its address, and the entries that mark both as external.
		if (g != Growth{Switch: g.Switch, NodeCIDRs: g.NodeCIDRs, Node: node, Container: 4, Service: 4}) {
			t.Errorf("%+v", g)
		}
	}
	for _, kind := range EntrySwitches {
		with, _ := r.of(kind, true)
		without, _ := r.of(kind, false)
		for _, nodes := range []int{2, 9} {
			a, b := with(nodes, here, 7), without(nodes, here, 7)
			if a.Remote != nodes-1 || b.Remote != here*a.Remote || a.Decap != 1 || a.Register != here ||
				b.Register != here {
				t.Errorf("%s, %d nodes: unexpected counts %+v and %+v", kind, nodes, a, b)
			}
		}
	}
	var table, page bytes.Buffer
	r.Table(&table)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	plottest.CheckPage(t, page.String(), 2)
	text, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(text), `"offTheSum":0`) {
		t.Errorf("%v, %s", err, text)
	}
	for _, want := range []string{"a simulated cluster", "no product of two"} {
		if !strings.Contains(table.String(), want) || !strings.Contains(page.String(), want) {
			t.Errorf("the table lacks %q", want)
		}
	}
}

// TestEntriesThatMultiply: the report fails if the number of entries includes the product of two quantities, or grows
// faster than the number of nodes.
func TestEntriesThatMultiply(t *testing.T) {
	for name, extra := range map[string]func(nodes, containers, services int) int{
		"nodes and containers": func(n, c, _ int) int { return n * c }, "nodes and services": func(n, _,
			s int) int {
			return n * s
		},
		"containers and " +
			"services": func(_, c, s int) int { return c * s }, "pairs of nodes": func(n, _,
			_ int) int {
			return n * n
		},
		"nothing": func(_, _, _ int) int { return 3 },
	} {
		r := EntriesReport{Density: 4, Services: 3}
		for _, nodes := range []int{1, 2, 5} {
			for _, containers := range []int{1, 4} {
				for _, services := range []int{1, 3} {
					all := 2 + nodes + 4*containers + 4*services + extra(nodes, containers, services)
					r.Samples = append(
						r.Samples,
						EntriesSample{
							Switch:     onEBPF,
							NodeCIDRs:  true,
							Nodes:      nodes,
							Containers: containers,
							Services:   services,
							Stages:     Counts{Forwarding: all},
						},
					)
				}
			}
		}
		if got := r.grows(); len(got) != 1 || (got[0].OffSum == 0) != (name == "nothing") {
			t.Errorf("%s: the report passed or has unexpected growth: %+v", name, got)
		}
	}
}

// short returns a folder with a short path, because the paths of sockets have a maximum length.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "nim")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
