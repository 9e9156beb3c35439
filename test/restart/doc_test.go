// Package restart_test kills agents while packets pass and containers are added and removed. It also adds and removes
// many containers, to detect leaked resources.
//
// By default the tests make short runs; `make restart` and `make churn` make long ones by the environment variables
// PILASTER_RESTART_KILLS, PILASTER_RESTART_CONTAINERS, PILASTER_RESTART_ROUNDS and PILASTER_RESTART_SYNS. With
// PILASTER_RESTART_LIMITS, tests also check durations, which requires an otherwise idle machine.
package restart_test

import (
	"os"
	"strconv"
	"testing"
)

// setting returns a positive number from the environment, or the default for a short run.
func setting(t *testing.T, name string, short int) int {
	t.Helper()
	text, set := os.LookupEnv(name)
	if !set {
		return short
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is not a positive number", name, text)
	}
	return n
}

// judgesTimes reports whether durations are checked.
func judgesTimes() bool { return os.Getenv("PILASTER_RESTART_LIMITS") != "" }
