package ila

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// AllocateKeyed is as far as the store's: node 2 has the address until a call moves it.
func (c cluster) AllocateKeyed(_ context.Context, name string, of network.KeyedEndpoint) (network.KeyedAddress, error) {
	c.bed.asked = append(c.bed.asked, fmt.Sprint(name, " ", of.Key, " ", of.AddressKey, " ", of.App, " ", of.Sequence))
	is := network.KeyedAddress{Address: c.given[0], Sequence: 2, Elsewhere: of.Sequence == 0}
	if of.Sequence != 0 {
		is.Former = plan.Node(2)
	}
	return is, c.refuses
}

func keyed(id endpoint.ID, index byte) endpoint.Record {
	r := record(green, id, index)
	r.AddressKey = "db-0"
	r.Attachments[0].Sequence = 2
	return r
}

// TestMoveHere: the container's entry exists before its address moves here, and then has the former locator.
func TestMoveHere(t *testing.T) {
	b := newBed(t)
	must(t, b.Repair(t.Context(), nil, nil))
	a := at(green, 1)
	b.given = []netip.Addr{a}
	want := keyed(1, 1)
	r := want
	r.Attachments = nil
	all, err := b.Prepare(t.Context(), green, 5, r)
	must(t, err)
	if len(all) != 1 || all[0].Address != a || all[0].Sequence != 2 || len(b.locals) != 0 {
		t.Fatalf("attachments %+v, locals %v", all, b.locals)
	}
	b.refuses = errors.New("moved meanwhile")
	refused(t, b.Activate(t.Context(), want), "moved meanwhile")
	b.refuses = nil
	must(t, b.Activate(t.Context(), want))
	if b.locals[a].Former != locator(2) || b.asked[len(b.asked)-1] != "green c1/eth0 db-0 5 2" {
		t.Errorf("local %+v, asked %q", b.locals[a], b.asked)
	}
	must(t, b.Check(t.Context(), want))
	asked := len(b.asked)
	must(t, b.Activate(t.Context(), want)) // of an address that is here
	if len(b.asked) != asked {
		t.Errorf("asked %q for an address that is here", b.asked[asked:])
	}
}

// TestMoveAway: a node forwards for a container with an address key that was here, also if its mapping arrives after
// its removal, and if no container of its tenant remains.
func TestMoveAway(t *testing.T) {
	b := newBed(t)
	ctx := t.Context()
	must(t, b.Repair(ctx, nil, nil))
	must(t, b.Replace(ctx, "green", nil))
	must(t, b.Activate(ctx, keyed(1, 1)))
	must(t, b.Activate(ctx, keyed(2, 2)))
	must(t, b.Apply(ctx, "green", []network.Mapping{mapping(green, 1, 3, 5)}, nil))
	if !b.Moved(keyed(1, 1)) || b.Moved(keyed(2, 2)) {
		t.Error("moved: want the first of two containers")
	}
	must(t, b.Deactivate(ctx, keyed(1, 1)))
	must(t, b.Deactivate(ctx, keyed(2, 2)))
	must(t, b.Apply(ctx, "green", []network.Mapping{mapping(green, 2, 3, 5), mapping(green, 3, 3, 5)}, nil))
	for i, former := range []netip.Prefix{locator(1), locator(1), {}} {
		if p := b.far[at(green, byte(i+1))]; p.Former != former || p.Locator != locator(3) {
			t.Errorf("mapping %d is %+v, want former %v", i+1, p, former)
		}
	}
	must(t, b.DeleteTenant(ctx, green))
	must(t, b.endForwarding())
	if len(b.far) != 3 {
		t.Errorf("mappings %v while this node forwards", b.far)
	}
	b.leaving["green"].until = time.Now()
	must(t, b.endForwarding())
	if len(b.far) != 0 || len(b.leaving) != 0 {
		t.Errorf("mappings %v after the end of forwarding", b.far)
	}
}
