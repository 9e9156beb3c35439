package control

import (
	"context"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
)

func TestPauses(t *testing.T) {
	for _, c := range []struct {
		n                     int
		spread, least, jitter time.Duration
	}{
		{0, 0, 250 * time.Millisecond, 250 * time.Millisecond},
		{2, 0, time.Second, time.Second},
		{50, 0, 15 * time.Second, 15 * time.Second},
		{0, 25 * time.Second, 250 * time.Millisecond, 25 * time.Second},
		{50, 25 * time.Second, 15 * time.Second, 25 * time.Second},
		{0, 1000 * time.Hour, 250 * time.Millisecond, maxSpread},
	} {
		if least, jitter := pauseBefore(c.n, c.spread); least != c.least || jitter != c.jitter {
			t.Errorf("before try %d with a spread of %v: at least %v and up to %v more", c.n, c.spread, least, jitter)
		}
	}
}

// Nodes whose streams break reconnect within the spread that the orchestrator has set.
func TestComesBackWithinTheSpread(t *testing.T) {
	b := newLinkBed(t)
	core := agenttest.New(t)
	spreads := make(chan time.Duration, 1)
	b.link.config.Wait = func(ctx context.Context, _ int,
		spread time.Duration) error {
		spreads <- spread
		return ctx.Err()
	}
	defer b.run(core)()
	<-b.cluster.hosted
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4,
		Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{}}, SpreadMs: 1000}
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4, Event: &pilasterv1.FollowResponse_Heartbeat{},
		SpreadMs: 2500}
	b.cluster.events <- nil
	if got := <-spreads; got != 2500*time.Millisecond {
		t.Errorf("it waits up to %v longer", got)
	}
}
