package agent_test

import (
	"testing"

	"pilaster.io/pilaster/internal/agent/agenttest"
)

// bed is a test bed with what only the tests of this package need.
type bed struct{ *agenttest.Bed }

func newBed(t *testing.T) *bed {
	t.Helper()
	return &bed{agenttest.New(t)}
}

func newBedOfTwo(t *testing.T) *bed {
	t.Helper()
	return &bed{agenttest.NewWithTwoNetworks(t)}
}
