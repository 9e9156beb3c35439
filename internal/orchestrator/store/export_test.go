package store

import (
	"log/slog"

	"pilaster.io/pilaster/internal/address"
)

var (
	noPlan  address.Plan
	discard = slog.New(slog.DiscardHandler)
)

// Tests that need the inside of a change, and servers that only the outside can start.
var (
	SleeperTest          = testSleeper
	CompactedTest        = testCompacted
	HostedMeanwhileTest  = testHostedMeanwhile
	DeletedMeanwhileTest = testDeletedMeanwhile
	LargeChangeTest      = testLargeChange
	OthersBetweenTest    = testOthersBetween
	CrashTest            = testCrash
	HalfDeletionTest     = testHalfDeletion
	EmbedWith            = embedWith
	TogetherTest         = testTogether
	RefusedInVainTest    = testRefusedInVain
	OtherFirstTest       = testOtherFirst
	LargeInCompanyTest   = testLargeInCompany
	GivenUpTest          = testGivenUp
	PanicInCompanyTest   = testPanicInCompany
	ForgottenLeaseTest   = testForgottenLease
)
