package sim

import "testing"

// TestWarmUp: the queries are those that NIMITZ §4.1 counts (NM7), 50 pages for each of 2,500 new nodes and 1 for each
// of 25,000 others there; here 2 pages for each of 52 and 1 for each of 520. The time follows from the throttle, which
// lets a second's share through at once.
func TestWarmUp(t *testing.T) {
	t.Parallel()
	const rate = 200
	r := play(
		t,
		"{network: nimitz, mappingsBy: query, nodes: 520, containersPerNode: 1, listRate: 200, events: [{do: grow, "+
			"by: 10%, listFirst: true}]}",
	)
	for i, want := range []Queries{{Pages: 520 + 2}, {Pages: 52 * 2, Changes: 520}} {
		s := r.Stages[i]
		q := *s.Queries
		if i > 0 && q.Refused == 0 {
			t.Errorf("%s: no query was refused at %d a second", s.Event, rate)
		}
		answered := q.Pages + q.Changes
		if least := float64(answered-rate) / rate; s.Acted < least {
			t.Errorf(
				"%s: %d queries took %.2f s, and %d a second are let through in %.2f s",
				s.Event,
				answered,
				s.Acted,
				rate,
				least,
			)
		}
		if q.Refused, q.PerSecond = 0, 0; q != want {
			t.Errorf("%s: queries are %+v, want %+v", s.Event, q, want)
		}
	}
	// Of new nodes' subnets only the new nodes are received: at most each of 52 of 52.
	if sent := r.Stages[1].Counts["Follow out delta"].Messages; sent > 2*52+52*52 {
		t.Errorf("%d changes were sent", sent)
	}
}

// TestAsking: nodes that ask know where everything is, whatever happens between two queries; where the orchestrator
// began anew they list everything.
func TestAsking(t *testing.T) {
	t.Parallel()
	r := play(t, `{network: nimitz, mappingsBy: query, nodes: 10, containersPerNode: 3, tenants: 4, events: [
		{do: grow, by: 2}, {do: restart-job, by: 5}, {do: crash, by: 3}, {do: shrink, by: 3}, {do: reconnect}, {do: restart-orchestrator}, {do: grow, by: 2}]}`)
	for _, s := range r.Stages[1:] {
		if s.Queries == nil || s.Queries.Changes == 0 && s.Event != RestartOrchestrator {
			t.Errorf("%s: queries are %+v", s.Event, s.Queries)
		}
	}
}
