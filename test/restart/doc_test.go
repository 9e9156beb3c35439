// Package restart_test kills agents while packets pass and containers come and go, and adds and
// removes so many containers that whatever one of them left behind would be seen.
//
// Alone the tests make short runs; `make restart` and `make churn` make the long ones by the environment:
// PILASTER_RESTART_KILLS, PILASTER_RESTART_CONTAINERS, PILASTER_RESTART_ROUNDS and PILASTER_RESTART_SYNS. With
// PILASTER_RESTART_LIMITS times have limits, which needs a machine with nothing else to do.
package restart_test

import (
	"os"
	"strconv"
	"testing"
)

// setting is a positive number from the environment, or the one for a short run.
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

// judgesTimes reports whether the machine has nothing else to do.
func judgesTimes() bool { return os.Getenv("PILASTER_RESTART_LIMITS") != "" }
