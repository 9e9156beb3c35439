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

// Tests that need unexported functions, and the servers that package store_test starts.
var (
	SuspendedTest                = testSuspended
	CompactedTest                = testCompacted
	ConcurrentHostingTest        = testConcurrentHosting
	ConcurrentDeletionTest       = testConcurrentDeletion
	LargeChangeTest              = testLargeChange
	ChangesBetweenPartsTest      = testChangesBetweenParts
	CrashTest                    = testCrash
	PartialDeletionTest          = testPartialDeletion
	DeletionWithChangesTest      = testDeletionWithChanges
	EmbedWith                    = embedWith
	BatchTest                    = testBatch
	FullQueueTest                = testFullQueue
	RefusalAfterFailedCommitTest = testRefusalAfterFailedCommit
	ConflictTest                 = testConflict
	RefusalAfterConflictTest     = testRefusalAfterConflict
	AfterRangeDeletionTest       = testAfterRangeDeletion
	LargeChangeInBatchTest       = testLargeChangeInBatch
	CanceledTest                 = testCanceled
	PanicInBatchTest             = testPanicInBatch
	LostLeaseTest                = testLostLease
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// opened returns the store of a new orchestrator. Two calls with one etcd return the stores of two orchestrators.
func opened(t *testing.T, etcd *clientv3.Client) *Store {
	t.Helper()
	s, err := Open(t.Context(), etcd, noPlan, discard)
	must(t, err)
	return s
}

// within returns a context with a timeout, for tests that would otherwise wait forever when they fail.
func within(t *testing.T, timeout time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	return ctx
}
