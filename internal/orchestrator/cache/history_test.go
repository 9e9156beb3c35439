package cache

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// format lists the mappings of a response, sorted: prefix, node, and key if the response has it.
func format(r *pilasterv1.ListMappingsResponse) string {
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

// ChangedMappings returns the last change of each prefix. It returns nothing if the history lacks one of the changes.
func TestChangedMappings(t *testing.T) {
	m, _ := newTestCache()
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
	for after, want := range map[int64]string{
		10: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 11: "10.0.0.1/32 n4, 10.0.0.2/32 n3", 12: "10.0.0.1/32 n4", 14: "",
	} {
		if r, ok := m.ChangedMappings("n1", "green", after); !ok || format(r) != want || r.Revision != 14 {
			t.Errorf("after %d: %q, %v, want %q", after, format(r), ok, want)
		}
	}
	if r, _ := m.ChangedMappings("n3", "green", 11); format(r) != "10.0.0.1/32 n4, 10.0.0.2/32 n3 k" {
		t.Errorf("n3 received %q, want the key of its own mapping only", format(r))
	}
	for i := range int64(MaxHistory) {
		m.Apply(
			store.Batch{Revision: 15 + i, Events: []store.Event{has(fmt.Sprintf("10.1.%d.%d/32", i/256, i%256), "n1")}},
		)
	}
	if _, ok := m.ChangedMappings("n1", "green", 13); ok {
		t.Error("ChangedMappings returned changes although the history lacks one of them")
	}
	if r, ok := m.ChangedMappings("n1", "green", 14); !ok || len(r.Mappings) != MaxHistory {
		t.Errorf("%d mappings, %v; want %d", len(r.GetMappings()), ok, MaxHistory)
	}
}

// The cache returns a page only if no mapping of the tenant changed since the first page, and if the cache has reached
// the revision of that page.
func TestPagesFromMemory(t *testing.T) {
	m, _ := newTestCache()
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
			t.Errorf("%s: the page begins with %v and continues at %q", what, page.Mappings[0], page.Next)
		}
	}
	want("a page", "green", token(11, 499), 500, 502)
	has(12, "lime", 1)
	want("after a change of another tenant", "green", token(11, 499), 500, 502)
	want("of a later revision", "green", token(12, 499), 500, 502)
	want("of a revision that the cache has not reached", "green", token(13, 499), 0, 0)
	want("the first page", "green", "", 0, 0)
	want("of an unknown tenant", "red", token(12, 499), 0, 0)
	has(13, "green", 502)
	want("after a change", "green", token(12, 499), 0, 0)
	want("of the revision of that change", "green", token(13, 499), 500, 503)
	m.Apply(
		store.Batch{
			Revision: 14,
			Events:   []store.Event{{EndedMapping: &pilasterv1.Mapping{Tenant: "green", To: "10.0.1.246/32"}}},
		},
	)
	want("after the end of a mapping", "green", token(13, 499), 0, 0)
	want("of the revision of that end", "green", token(14, 499), 500, 502)
}
