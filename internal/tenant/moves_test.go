package tenant

import (
	"slices"
	"strings"
	"testing"
)

// TestMoves: each pair of networks of this build has one rule, which permits the move or says why not.
func TestMoves(t *testing.T) {
	for _, from := range Networks() {
		for _, to := range Networks() {
			n := 0
			for _, m := range moves {
				if m.From == from && m.To == to {
					n++
				}
			}
			if want := map[bool]int{false: 1}[from == to]; n != want {
				t.Errorf("%d rules for a move from %s to %s, want %d", n, from, to, want)
			}
		}
		if MoveOf(from, from).Refused == "" {
			t.Errorf("a move from %s to itself is permitted", from)
		}
	}
	for _, c := range []struct {
		from, to string
		reason   string // words of it; empty: permitted
	}{
		{Nimitz, Netpila, ""},
		{Netpila, Nimitz, "CIDRs of the tenant's own"},
		{"", Nimitz, "CIDRs of the tenant's own"},
		{Nimitz, ILA, "cannot be one of two"},
		{ILA, Nimitz, "CIDRs of the tenant's own"},
		{ILA, Netpila, "cannot be one of two"},
		{Netpila, ILA, "create a tenant on the other network"},
		{Nimitz, evpn, ""},
		{evpn, Nimitz, ""},
		{Netpila, evpn, "CIDRs of the tenant's own"},
		{evpn, Netpila, "other EVPN speakers"},
		{"later", Netpila, "no way"},
	} {
		got := MoveOf(c.from, c.to).Refused
		if (got == "") != (c.reason == "") || !strings.Contains(got, c.reason) {
			t.Errorf("a move from %q to %q: refused because %q, want %q", c.from, c.to, got, c.reason)
		}
	}
	from, to := Migrations()
	if !slices.Equal(from, []string{Nimitz, EVPN}) || !slices.Equal(to, []string{EVPN, Netpila, Nimitz}) {
		t.Errorf("tenants can leave %q and move to %q", from, to)
	}
	for _, m := range moves {
		if keeps := m.From != Netpila && m.To != Netpila && m.Refused == ""; m.KeepsAddresses != keeps {
			t.Errorf("%+v keeps addresses: %v", m, keeps)
		}
	}
	if KeepsAddresses(EVPN, "") || !KeepsAddresses(EVPN, Nimitz) || KeepsAddresses(Netpila, Nimitz) {
		t.Error("KeepsAddresses does not follow the rules")
	}
	if why := WhyNot(Nimitz); len(why) < 2 || !strings.HasPrefix(why[0], "from netpila: ") {
		t.Errorf("why not to nimitz: %q", why)
	}
}
