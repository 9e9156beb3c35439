package sim

import "testing"

// TestWarmUp expects the queries that NIMITZ §4.1 counts (NM7): 50 pages for each of 2,500 new nodes and 1 query for
// each of 25,000 existing nodes. This test is smaller: 2 pages for each of 52 new nodes, and 1 query for each of 520
// existing nodes. The expected time follows from the rate limit, which admits a burst of one second's queries.
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
			t.Errorf("%s: no query was refused at a limit of %d per second", s.Event, rate)
		}
		answered := q.Pages + q.Changes
		if least := float64(answered-rate) / rate; s.Acted < least {
			t.Errorf(
				"%s: %d queries took %.2f s; at a limit of %d per second want %.2f s",
				s.Event,
				answered,
				s.Acted,
				rate,
				least,
			)
		}
		if q.Refused, q.PerSecond = 0, 0; q != want {
			t.Errorf("%s: got queries %+v, want %+v", s.Event, q, want)
		}
	}
	// Mappings of new nodes' subnets reach only the new nodes: at most 52 changes for each of 52 nodes.
	if sent := r.Stages[1].Counts["Follow out delta"].Messages; sent > 2*52+52*52 {
		t.Errorf("%d changes were sent, want at most 2*52+52*52", sent)
	}
}

// TestAsking checks that querying nodes have all mappings after each event, and that they list all mappings again after
// the orchestrator restarted with compacted changes.
func TestAsking(t *testing.T) {
	t.Parallel()
	r := play(t, `{network: nimitz, mappingsBy: query, nodes: 10, containersPerNode: 3, tenants: 4, events: [
		{do: grow, by: 2}, {do: restart-job, by: 5}, {do: crash, by: 3},
		{do: shrink, by: 3}, {do: reconnect}, {do: restart-orchestrator}, {do: grow, by: 2}]}`)
	for _, s := range r.Stages[1:] {
		if s.Queries == nil || s.Queries.Changes == 0 && s.Event != RestartOrchestrator {
			t.Errorf("%s: unexpected queries %+v", s.Event, s.Queries)
		}
	}
}
