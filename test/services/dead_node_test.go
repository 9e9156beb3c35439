package services_test

import (
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
)

// TestDeadNode: endpoints on a node that does not answer get no new connections, until its agent is back. Those of a
// node whose agent is dead still get them, and connections to other endpoints go on.
func TestDeadNode(t *testing.T) {
	b := newBed(t)
	b.create(&pilasterv1.Service{Name: "web"})
	b.settles("c1", web...)
	name, kept, err := b.reach("c1")
	for ; err == nil && name != "w1"; name, kept, err = b.reach("c1") {
		kept.Close()
	}
	must(t, err)
	defer kept.Close()

	must(t, b.KillNoRestart(t.Context(), lab.AgentProcess("n2")))
	for began := time.Now(); time.Since(began) < 3*time.Second; {
		if all := b.seen("c1"); len(all) > len(web) || all["w1"]+all["w2"]+all["w3"] != 30 {
			t.Fatalf("with a dead agent on n2 connections reach %v, want %v", all, web)
		}
	}
	fabric := &router{bed: b}
	revive, died := fabric.kill("n2"), time.Now()
	b.settles("c1", "w1", "w3")
	t.Logf("a dead node without a session got no new connections after %v", time.Since(died))
	must(t, echo(kept))
	revive()
	must(t, b.Start(t.Context(), lab.AgentProcess("n2")))
	b.settles("c1", web...)
}
