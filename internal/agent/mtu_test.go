package agent

import (
	"errors"
	"strings"
	"testing"

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
	b.add("c1")
	b.add("c2")
	b.driver.mtu = 1400
	if err := b.FollowMTU(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.add("c3")
	b.reopen()
	for container, mtu := range b.mtus() {
		if mtu != 1400 {
			t.Errorf("%s has an MTU of %d", container, mtu)
		}
	}
	calls := len(b.driver.calls)
	if err := b.FollowMTU(t.Context()); err != nil || len(b.driver.calls) != calls+1 {
		t.Errorf("what is as it should be was changed: %v, %v", b.driver.calls[calls:], err)
	}

	b.driver.mtu, b.driver.fail["SetMTU"] = 1300, errFake
	if err := b.FollowMTU(t.Context()); !errors.Is(err, errFake) ||
		!strings.Contains(err.Error(), "endpoint 1 keeps an MTU of 1400") {
		t.Errorf("a device that cannot be changed: %v", err)
	}
	delete(b.driver.fail, "SetMTU")
	b.driver.fail["MTU"] = errFake
	if err := b.FollowMTU(t.Context()); !errors.Is(err, errFake) || b.mtus()["c1"] != 1400 {
		t.Errorf("an MTU that will not do: %v, %v", err, b.mtus())
	}
}

// TestMTUChangesDuringAnAdd: an endpoint created with the old MTU is changed afterwards.
func TestMTUChangesDuringAnAdd(t *testing.T) {
	b := newBed(t)
	done := make(chan error, 1)
	b.driver.during = func(call string, _ endpoint.Record) {
		if call == "Activate" { // its device is there, with the MTU of before
			b.driver.mu.Lock()
			b.driver.mtu = 1400
			b.driver.mu.Unlock()
			go func() { done <- b.FollowMTU(t.Context()) }()
		}
	}
	b.add("c1")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if mtu := b.mtus()["c1"]; mtu != 1400 {
		t.Errorf("an MTU of %d", mtu)
	}
}
