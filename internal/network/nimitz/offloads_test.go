package nimitz

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// TestOffloadEntries: senders use the frontends in three phases; a frontend serves in all; a backend asks in
// two. A switch without offloads gets no entries of them (NZ4).
func TestOffloadEntries(t *testing.T) {
	node := func(n byte) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, 7: n}), 64)
	}
	const backend, front, draining, sender = 1, 2, 3, 4
	container, there := netip.MustParseAddr("10.0.1.2"), netip.MustParsePrefix("10.0.1.0/24")
	for _, phase := range tenant.OffloadPhases[1:] {
		for _, own := range []byte{backend, front, draining, sender, 0} {
			h := newHosted()
			if own != 0 {
				h.node = node(own)
			}
			h.vni, h.remote[there] = 7, Place{VTEP: pipeline.VTEP(node(backend))}
			h.offloads = []tenant.Offload{{
				ID: 5, Prefix: node(backend), Phase: phase, Epoch: 9,
				Frontends: []tenant.Frontend{{Prefix: node(front)}, {Prefix: node(draining), Draining: true}},
				Endpoints: []tenant.OffloadedEndpoint{{Address: container, App: 3}},
			}}
			got := map[any]pipeline.Entry{}
			for _, match := range h.allMatches() {
				if e := h.wanted(match); e != nil {
					got[match] = e
				}
			}

			uses := phase == tenant.OffloadDual || phase == tenant.OffloadActive || phase == tenant.OffloadReturning
			serves := own == front || own == draining
			forward := pipeline.Forward{VNI: 7, To: there, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(node(backend))}
			if own != 0 && (uses || serves) {
				forward.Offload = 5
			}
			want := map[any]pipeline.Entry{forward.Match(): forward}
			if own != 0 {
				o := pipeline.Offload{ID: 5, VNI: 7, Backend: node(backend), Epoch: 9, Fronts: serves}
				if uses {
					o.To[0] = node(front)
				}
				o.From[0], o.From[1] = node(front), node(draining)
				want[o.Match()] = o
			}
			if own == backend {
				b := pipeline.Backend{VNI: 7, Offload: 5, Asks: uses && phase != tenant.OffloadDual}
				want[b.Match()] = b
			}
			if own == front || own == draining {
				f := pipeline.Fronted{VNI: 7, Address: container, Offload: 5, App: 3}
				want[f.Match()] = f
			}
			for match, e := range want {
				if got[match] != e {
					t.Errorf("phase %s, node %d: entry %v, want %v", phase, own, got[match], e)
				}
			}
			if len(got) != len(want) {
				t.Errorf("phase %s, node %d: %d entries, want %d", phase, own, len(got), len(want))
			}
		}
	}
}

// TestSwitchRefusesOffloads: a tenant whose offloads the switch refuses stays as it was, and an update that fits is
// applied.
func TestSwitchRefusesOffloads(t *testing.T) {
	s := &tableSwitch{has: map[any]pipeline.Entry{}, ports: map[pipeline.Port]string{}}
	node := plan.Node(1)
	n := New(Config{Plan: plan, Node: node, Switch: s, SharesLoad: true})
	put := func(offloads ...tenant.Offload) error {
		green := tenantOf(7, overlay("10.0.0.0/16", 24))
		green.Offloads = offloads
		return n.PutTenant(t.Context(), green)
	}
	offload := func(id uint32) tenant.Offload {
		return tenant.Offload{ID: id, Prefix: plan.Node(2), Phase: tenant.OffloadActive, Frontends: []tenant.Frontend{
			{Prefix: plan.Node(3)},
		}}
	}
	if err := errors.Join(put(offload(1)), n.Repair(t.Context(), nil, nil)); err != nil {
		t.Fatal(err)
	}
	before := maps.Clone(s.has)
	s.fail = fmt.Errorf("%w: no room", network.ErrConflict)
	if err := put(offload(1), offload(2)); !errors.Is(err, network.ErrConflict) {
		t.Fatalf("the refusal is %v", err)
	}
	s.fail = nil
	if err := put(offload(1)); err != nil || !maps.Equal(s.has, before) {
		t.Errorf("%v; the switch has %v, want %v", err, s.has, before)
	}
	if err := put(offload(1), offload(2)); err != nil || len(s.has) != len(before)+1 {
		t.Errorf("%v; the switch has %v", err, s.has)
	}
}
