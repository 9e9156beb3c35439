package preflight

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/join"
)

// Certificates bear an hour of difference (orchestrator/pki), above that no node joins; less of it
// makes logs hard to compare.
const (
	clockWarns = 10 * time.Second
	clockFails = time.Hour
)

// orchestrator contacts the orchestrator without joining. The second result is nil if it did not return its time.
func orchestrator(ctx context.Context, url, text string) (Result, *Result) {
	token, err := join.ParseToken(text)
	if err != nil {
		return failed(err, "copy the file join-token whole from the orchestrator's data folder"), nil
	}
	ahead, err := join.Probe(ctx, url, token)
	if err != nil {
		return failed(
			err,
			"see that the orchestrator runs, that this machine reaches it, and that the token is its own",
		), nil
	}
	compared := compare(ahead)
	return ok("%s belongs to the cluster of the token, whose secret is tried only by joining", url), &compared
}

func compare(ahead time.Duration) Result {
	ahead = ahead.Round(time.Second)
	behind, by := "behind", ahead
	if ahead < 0 {
		behind, by = "ahead of", -ahead
	}
	switch {
	case by > clockFails:
		return fail("set it right", "this clock is %v %s the orchestrator's", by, behind)
	case by > clockWarns:
		return warn("synchronise both", "this clock is %v %s the orchestrator's", by, behind)
	}
	return ok("the same as the orchestrator's, within %v", max(by, time.Second)+time.Second)
}
