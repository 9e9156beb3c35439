package store

import (
	"context"
	"log/slog"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/address"
)

var (
	noPlan  address.Plan
	discard = slog.New(slog.DiscardHandler)
)

// Tests that need the inside of a change, and servers that only the outside can start.
var (
	SleeperTest              = testSleeper
	CompactedTest            = testCompacted
	HostedMeanwhileTest      = testHostedMeanwhile
	DeletedMeanwhileTest     = testDeletedMeanwhile
	LargeChangeTest          = testLargeChange
	OthersBetweenTest        = testOthersBetween
	CrashTest                = testCrash
	HalfDeletionTest         = testHalfDeletion
	DeletionAmongChangesTest = testDeletionAmongChanges
	EmbedWith                = embedWith
	TogetherTest             = testTogether
	TooManyWaitTest          = testTooManyWait
	RefusedInVainTest        = testRefusedInVain
	OtherFirstTest           = testOtherFirst
	RefusedOnOldTest         = testRefusedOnOld
	AfterSweepTest           = testAfterSweep
	LargeInCompanyTest       = testLargeInCompany
	GivenUpTest              = testGivenUp
	PanicInCompanyTest       = testPanicInCompany
	ForgottenLeaseTest       = testForgottenLease
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// opened is an orchestrator's store; another on the same etcd is another orchestrator's.
func opened(t *testing.T, etcd *clientv3.Client) *Store {
	t.Helper()
	s, err := Open(t.Context(), etcd, noPlan, discard)
	must(t, err)
	return s
}

// within is how long a test may take that waits for ever when something is wrong.
func within(t *testing.T, long time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), long)
	t.Cleanup(cancel)
	return ctx
}
