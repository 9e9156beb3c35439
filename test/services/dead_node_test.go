package services_test

import (
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
)

const (
	deadAgent = 8 * time.Second  // longer than a node without a session has before it can be marked
	noticed   = 30 * time.Second // the bound of docs/howto/services.md
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

	agent := lab.AgentProcess("n3")
	must(t, b.KillNoRestart(t.Context(), agent))
	for began := time.Now(); time.Since(began) < deadAgent; {
		if all := b.seen("c1"); len(all) > len(web) || all["w1"]+all["w2"]+all["w3"] != 30 {
			t.Fatalf("with a dead agent on n3 connections reach %v, want %v", all, web)
		}
	}
	must(t, b.Start(t.Context(), agent))

	fabric := &router{bed: b}
	revive, died := fabric.kill("n2"), time.Now()
	// An established connection to a dead node would take as long as TCP waits, so only new ones are judged.
	for all := b.seen("c1"); all["w1"]+all["w3"] != 30; all = b.seen("c1") {
		if time.Since(died) > noticed+30*connectTime {
			t.Fatalf("%v after its death, a dead node still gets connections: %v", time.Since(died), all)
		}
	}
	t.Logf("a dead node got no new connections after %v", time.Since(died))
	must(t, echo(kept))
	revive()
	b.settles("c1", web...)
}
