package preflight

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/join"
)

// If the clocks differ by more than an hour, no node can join, because certificates tolerate only an hour
// (orchestrator/pki). Smaller differences make logs hard to compare.
const (
	clockWarns = 10 * time.Second
	clockFails = time.Hour
)

// orchestrator contacts the orchestrator without joining. The second result is nil if it did not return its time.
func orchestrator(ctx context.Context, url, text string) (Result, *Result) {
	token, err := join.ParseToken(text)
	if err != nil {
		return failed(err, "copy the complete file join-token from the orchestrator's data folder"), nil
	}
	ahead, err := join.Probe(ctx, url, token)
	if err != nil {
		return failed(
			err,
			"check that the orchestrator runs, that this machine reaches it, and that the token is of its cluster",
		), nil
	}
	compared := compare(ahead)
	return ok("%s belongs to the token's cluster; joining will check the token's secret", url), &compared
}

func compare(ahead time.Duration) Result {
	ahead = ahead.Round(time.Second)
	behind, by := "behind", ahead
	if ahead < 0 {
		behind, by = "ahead of", -ahead
	}
	switch {
	case by > clockFails:
		return fail("correct the clock", "this clock is %v %s the orchestrator's", by, behind)
	case by > clockWarns:
		return warn("synchronise both clocks", "this clock is %v %s the orchestrator's", by, behind)
	}
	return ok("the same as the orchestrator's, within %v", max(by, time.Second)+time.Second)
}
