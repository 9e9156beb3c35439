package datapath

import (
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/dpapi"
)

// TestKeepSessions: the sessions of an endpoint can be read and added again, as on the node that a container moves to.
func TestKeepSessions(t *testing.T) {
	b := newSessionBench(t, 64*slotsPerBucket)
	own, opened := b.b1.record.ID, ports(1000, 8)
	for _, port := range opened {
		b.begin(t, port, true)
	}
	b.openFrom(t, b.b2, blue, 3000, true)
	all, err := b.datapath.EndpointSessions(own)
	must(t, err)
	if len(all) != len(opened) {
		t.Fatalf("%d sessions: %+v; want %d", len(all), all, len(opened))
	}
	must(t, b.datapath.deleteSessions(own))
	b.voidVerdicts(t)
	if b.knows(t, opened[0]) {
		t.Fatal("a deleted session is found")
	}
	unknown := slices.Clone(all)
	for i := range unknown {
		unknown[i].State.Version++
	}
	keep := func(all []dpapi.Session, left int) {
		t.Helper()
		if n, err := b.datapath.KeepSessions(own, all); err != nil || n != left {
			t.Errorf("%d sessions are left, %v; want %d", n, err, left)
		}
	}
	keep(unknown, len(all)) // of a build with other states
	keep(all, 0)
	keep(all, 0)
	if got, err := b.datapath.EndpointSessions(own); err != nil || len(got) != len(all) {
		t.Errorf("a session that is known is added again: %d, %v; want %d", len(got), err, len(all))
	}
	if used, _ := b.usage(t, b.b1, blue); used != int64(len(all)) {
		t.Errorf("%d sessions are counted, want %d", used, len(all))
	}
	for _, port := range opened {
		if !b.knows(t, port) {
			t.Errorf("the connection from port %d is not known", port)
		}
	}
}
