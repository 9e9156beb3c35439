package cache

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// TestNextLoad: when nodes report, and which reports are recorded.
func TestNextLoad(t *testing.T) {
	load := func(node string, own float64) *pilasterv1.NodeLoad {
		return &pilasterv1.NodeLoad{
			Node: node, Measured: true, Own: own, Rules: 100, RulesCapacity: 1000, Sessions: 10, SessionsCapacity: 1000,
			Tenants:  []*pilasterv1.TenantLoad{{Tenant: "red", Load: own}},
			Fronting: []*pilasterv1.FrontingLoad{{Tenant: "red", Backend: "n2", Load: 0.1}},
		}
	}
	changed := func(change func(l *pilasterv1.NodeLoad)) *pilasterv1.NodeLoad {
		l := proto.CloneOf(load("n1", 0.2))
		change(l)
		return l
	}
	m, _ := newTestCache()
	revision := int64(10)
	apply := func(e store.Event) {
		revision++
		m.Apply(store.Batch{Revision: revision, Events: []store.Event{e}})
	}
	session := store.Session{Orchestrator: "o", Instance: "i", Stream: "s"}
	connected := store.Event{Session: &store.NodeSession{Node: "n1", Session: session}}
	on, off := true, false
	member := func(node, frontend string) store.Event {
		return store.Event{Tenant: &pilasterv1.Tenant{Name: "red", Offloads: []*pilasterv1.Offload{
			{Node: node, Frontends: []*pilasterv1.Frontend{{Node: frontend}}},
		}}}
	}
	for _, c := range []struct {
		what    string
		event   store.Event
		after   time.Duration // the last record
		load    *pilasterv1.NodeLoad
		next    time.Duration
		measure bool
		record  bool
	}{
		{"loads are not needed", connected, 0, load("n1", 0.9), time.Minute, false, false},
		{"auto", store.Event{OffloadAuto: &on}, 0, load("n1", 0.2), 10 * time.Second, true, true},
		{"without packet loads", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Measured = false }),
			10 * time.Second, true, false},
		{"a busy node", store.Event{}, 0, load("n1", 0.4), time.Second, true, true}, // with what it does for others
		{"a full table", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Rules = 500 }), time.Second, true,
			true},
		{"many sessions", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Sessions = 900 }),
			10 * time.Second, true, true},
		{"recorded", store.Event{Load: load("n1", 0.2)}, time.Hour, load("n1", 0.2), 10 * time.Second, true, false},
		{"a small change", store.Event{}, 0, load("n1", 0.24), 10 * time.Second, true, false},
		{"a change", store.Event{}, 0, load("n1", 0.26), 10 * time.Second, true, true},
		{"few rules more", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Rules = 149 }), 10 * time.Second,
			true, false},
		{"more rules", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Rules = 151 }), 10 * time.Second,
			true, true},
		{"more sessions", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Sessions = 61 }), 10 * time.Second,
			true, true},
		{"another tenant", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Tenants[0].Tenant = "blue" }),
			10 * time.Second, true, true},
		{"no fronting any more", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Fronting = nil }),
			10 * time.Second, true, true},
		{"more fronting", store.Event{}, 0, changed(func(l *pilasterv1.NodeLoad) { l.Fronting[0].Load = 0.16 }),
			10 * time.Second, true, true},
		{"a frontend, without auto", store.Event{OffloadAuto: &off}, 0, load("n1", 0.2), time.Minute, false, false},
		{"a frontend", member("n2", "n1"), 0, load("n1", 0.2), time.Second, true, true},
		{"a frontend again", store.Event{Load: load("n1", 0.2)}, 59 * time.Second, load("n1", 0.2), time.Second, true,
			false},
		{"a frontend, later", store.Event{}, time.Minute, load("n1", 0.2), time.Second, true, true},
		{"a backend that is not there", member("n1", "n2"), 0, load("n1", 0.2), time.Minute, false, false},
		{"a backend", store.Event{Hosting: &pilasterv1.Hosting{Tenant: "red", Node: "n1"}}, 0, load("n1", 0.9),
			time.Second, true, true},
		{"its stream ends", store.Event{Session: &store.NodeSession{Node: "n1"}}, 0, load("n1", 0.2), time.Second, true,
			true},
	} {
		if c.event != (store.Event{}) {
			apply(c.event)
		}
		now := m.Loads["n1"].At.Add(c.after)
		next, measure, record := m.NextLoad(now, c.load)
		if next != c.next || measure != c.measure || record != c.record {
			t.Errorf("%s: next after %v, measure %v, record %v; want %v, %v, %v", c.what, next, measure, record, c.next,
				c.measure, c.record)
		}
	}
	apply(member("n1", "n2"))
	large := load("n1", 0)
	large.Tenants = nil
	for name, l := range map[string]*pilasterv1.TenantLoad{
		"red": {}, "large": {Load: 0.05}, "rules": {Rules: 50}, "small": {Load: 0.049, Rules: 49},
		"had": {Load: 0.025}, "had-less": {Load: 0.024},
	} {
		l.Tenant = name
		large.Tenants = append(large.Tenants, l)
	}
	last := &pilasterv1.NodeLoad{Tenants: []*pilasterv1.TenantLoad{{Tenant: "had"}, {Tenant: "had-less"}}}
	for i := range maxTenantLoads - 3 {
		large.Tenants = append(large.Tenants, &pilasterv1.TenantLoad{Tenant: fmt.Sprint("t", i), Load: 1})
	}
	m.keepLarge(large, last)
	var kept []string
	for _, l := range large.Tenants {
		if l.Load < 1 {
			kept = append(kept, l.Tenant)
		}
	}
	if want := []string{"had", "large", "red", "rules"}; !slices.Equal(kept, want) {
		t.Errorf("kept %q, want %q", kept, want)
	}
	large.Tenants[0].Load, large.Tenants = 1, append(large.Tenants, &pilasterv1.TenantLoad{Tenant: "t", Load: 1})
	m.keepLarge(large, last)
	if n := len(large.Tenants); n != maxTenantLoads+1 || !slices.ContainsFunc(
		large.Tenants, func(l *pilasterv1.TenantLoad) bool { return l.Tenant == "red" }) {
		t.Errorf("kept %d, want the largest %d and red", n, maxTenantLoads)
	}
	for _, c := range []struct {
		auto, member bool
		own          float64
		age          time.Duration
		fresh        bool
	}{
		{false, false, 0.9, 0, false},
		{false, true, 0.1, 89 * time.Second, true},
		{false, true, 0.1, 90 * time.Second, false},
		{true, false, 0.1, time.Hour, true},
		{true, false, 0.4, 89 * time.Second, true}, // with what it does for others
		{true, false, 0.4, 90 * time.Second, false},
	} {
		m.OffloadAuto = c.auto
		now := time.Now()
		if fresh := m.IsFresh(now, Load{load("n1", c.own), now.Add(-c.age)}, c.member); fresh != c.fresh {
			t.Errorf("%+v: fresh %v", c, fresh)
		}
	}
	m.OffloadAuto = false
	apply(connected)
	apply(member("n2", "n3"))
	apply(store.Event{Load: load("n1", 0.2)})
	apply(store.Event{OffloadAuto: &on})
	if len(m.Loads) != 0 {
		t.Error("the report from before auto is used")
	}
	apply(store.Event{Load: load("n1", 0.2)})
	apply(store.Event{OffloadAuto: &off})
	if len(m.Loads) != 0 {
		t.Error("the report of a node without part in an offload is used without auto")
	}
	m.Apply(store.Batch{Revision: revision + 1, Whole: true, Events: []store.Event{{Load: load("n1", 0.2)}}})
	if len(m.Loads) != 0 {
		t.Error("the report of a node without a stream is used")
	}
}
