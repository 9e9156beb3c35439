package agent_test

import (
	"errors"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
)

// mtus are those of the records, which are what the operator is shown.
func (b *bed) mtus() map[string]int {
	all := map[string]int{}
	for _, r := range b.Endpoints() {
		all[r.ContainerID] = r.Device.MTU
	}
	return all
}

func TestEndpointsFollowTheMTU(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustAdd("c2")
	b.Driver.LinkMTU = 1400
	if err := b.FollowMTU(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.MustAdd("c3")
	b.Reopen()
	for container, mtu := range b.mtus() {
		if mtu != 1400 {
			t.Errorf("%s has an MTU of %d", container, mtu)
		}
	}
	calls := len(b.Driver.Calls)
	if err := b.FollowMTU(t.Context()); err != nil || len(b.Driver.Calls) != calls+1 {
		t.Errorf("what is as it should be was changed: %v, %v", b.Driver.Calls[calls:], err)
	}

	b.Driver.LinkMTU, b.Driver.Fail["SetMTU"] = 1300, agenttest.ErrFake
	if err := b.FollowMTU(t.Context()); !errors.Is(err, agenttest.ErrFake) ||
		!strings.Contains(err.Error(), "endpoint 1 keeps an MTU of 1400") {
		t.Errorf("a device that cannot be changed: %v", err)
	}
	delete(b.Driver.Fail, "SetMTU")
	b.Driver.Fail["MTU"] = agenttest.ErrFake
	if err := b.FollowMTU(t.Context()); !errors.Is(err, agenttest.ErrFake) || b.mtus()["c1"] != 1400 {
		t.Errorf("an MTU that will not do: %v, %v", err, b.mtus())
	}
}

// TestMTUChangesDuringAnAdd: an endpoint created with the old MTU is changed afterwards.
func TestMTUChangesDuringAnAdd(t *testing.T) {
	b := newBed(t)
	done := make(chan error, 1)
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "Activate" { // its device is there, with the MTU of before
			b.Driver.Mu.Lock()
			b.Driver.LinkMTU = 1400
			b.Driver.Mu.Unlock()
			go func() { done <- b.FollowMTU(t.Context()) }()
		}
	}
	b.MustAdd("c1")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if mtu := b.mtus()["c1"]; mtu != 1400 {
		t.Errorf("an MTU of %d", mtu)
	}
}
