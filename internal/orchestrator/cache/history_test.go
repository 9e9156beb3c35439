package cache

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// inWords is what an answer has, in order: prefixes with their nodes, and with their keys where they are told.
func inWords(r *pilasterv1.ListMappingsResponse) string {
	var all []string
	for _, m := range r.Mappings {
		all = append(all, strings.TrimSpace(m.To+" "+m.Name+" "+m.Key))
	}
	for _, m := range r.EndedMappings {
		all = append(all, "not "+m.To)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// Of each prefix the last change counts, however often it went from node to node; what is forgotten is not told in
// part.
func TestChanged(t *testing.T) {
	m, _ := newTestModel()
	has := func(to, node string) store.Event {
		return store.Event{Mapping: &pilasterv1.Mapping{Tenant: "green", To: to, Name: node, Key: "k"}}
	}
	gone := func(to string) store.Event {
		return store.Event{EndedMapping: &pilasterv1.Mapping{Tenant: "green", To: to}}
	}
	m.Apply(store.Batch{Revision: 11, Events: []store.Event{has("10.0.0.1/32", "n1"), has("10.0.0.2/32", "n2")}})
	m.Apply(
		store.Batch{
			Revision: 12,
			Events:   []store.Event{gone("10.0.0.1/32"), gone("10.0.0.2/32"), has("10.0.0.2/32", "n3")},
		},
	)
	app(m, 13, "green")
	m.Apply(
		store.Batch{
			Revision: 14,
			Events: []store.Event{
				has("10.0.0.1/32", "n4"),
				{Mapping: &pilasterv1.Mapping{Tenant: "lime", To: "10.0.0.9/32"}},
			},
		},
	)
	for after, want := range map[int64]string{10: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 11: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 12: "10.0.0.1/32 n4", 14: ""} {
		if r, ok := m.ChangedMappings("n1", "green", after); !ok || inWords(r) != want || r.Revision != 14 {
			t.Errorf("after %d: %q, %v, want %q", after, inWords(r), ok, want)
		}
	}
	if r, _ := m.ChangedMappings("n3", "green", 11); inWords(r) != "10.0.0.1/32 n4, 10.0.0.2/32 n3 k" {
		t.Errorf("n3 is told %q of its own", inWords(r))
	}
	for i := range int64(MaxHistory) {
		m.Apply(
			store.Batch{Revision: 15 + i, Events: []store.Event{has(fmt.Sprintf("10.1.%d.%d/32", i/256, i%256), "n1")}},
		)
	}
	if _, ok := m.ChangedMappings("n1", "green", 13); ok {
		t.Error("something of it is forgotten, and it is told")
	}
	if r, ok := m.ChangedMappings("n1", "green", 14); !ok || len(r.Mappings) != MaxHistory {
		t.Errorf("%d mappings, %v", len(r.GetMappings()), ok)
	}
}

// A page comes from memory as long as nothing of its tenant has changed since the first, and what this orchestrator
// Knows is as new.
func TestPagesFromMemory(t *testing.T) {
	m, _ := newTestModel()
	has := func(revision int64, tenant string, numbers ...int) {
		b := store.Batch{Revision: revision}
		for _, i := range numbers {
			b.Events = append(
				b.Events,
				store.Event{
					Mapping: &pilasterv1.Mapping{
						Tenant: tenant,
						To:     fmt.Sprintf("10.0.%d.%d/32", i/256, i%256),
						Name:   "n1",
					},
				},
			)
		}
		m.Apply(b)
	}
	var many []int
	for i := range store.MappingsPage + 2 {
		many = append(many, i)
	}
	has(11, "green", many...)
	token := func(revision int64, after int) string { return fmt.Sprintf("%d:0a00%04x/32", revision, after) }
	want := func(what, tenant, token string, from, to int) {
		t.Helper()
		page, ok := m.Page(tenant, token)
		if ok != (to > from) || len(page.Mappings) != to-from {
			t.Errorf("%s: %d mappings, %v; want %d", what, len(page.Mappings), ok, to-from)
			return
		}
		if ok && (page.Mappings[0].To != fmt.Sprintf("10.0.%d.%d/32", from/256, from%256) || page.Next != "") {
			t.Errorf("%s: begins with %v and goes on at %q", what, page.Mappings[0], page.Next)
		}
	}
	want("a page", "green", token(11, 499), 500, 502)
	has(12, "lime", 1)
	want("after a change of another tenant", "green", token(11, 499), 500, 502)
	want("of a later revision", "green", token(12, 499), 500, 502)
	want("of one that is not read yet", "green", token(13, 499), 0, 0)
	want("the first", "green", "", 0, 0)
	want("no tenant", "red", token(12, 499), 0, 0)
	has(13, "green", 502)
	want("after a change", "green", token(12, 499), 0, 0)
	want("after it", "green", token(13, 499), 500, 503)
	m.Apply(
		store.Batch{
			Revision: 14,
			Events:   []store.Event{{EndedMapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.1.246/32"}}},
		},
	)
	want("after one that ended", "green", token(13, 499), 0, 0)
	want("without it", "green", token(14, 499), 500, 502)
}
