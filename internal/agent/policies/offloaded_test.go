package policies_test

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/tenant"
)

// TestOffloaded (Nezha §4.2): a backend has no rules in phase active only, and only if it needs them for no other
// backend.
func TestOffloaded(t *testing.T) {
	own := netip.MustParsePrefix("fd70:696c:6100:1::/64")
	other := netip.MustParsePrefix("fd70:696c:6100:2::/64")
	of := func(backend, frontend netip.Prefix, phase tenant.OffloadPhase) tenant.Offload {
		return tenant.Offload{Prefix: backend, Phase: phase, Frontends: []tenant.Frontend{{Prefix: frontend}}}
	}
	for _, phase := range tenant.OffloadPhases {
		active := phase == tenant.OffloadActive
		backend, frontend := of(own, other, phase), of(other, own, phase)
		for _, c := range []struct {
			name     string
			offloads []tenant.Offload
			want     bool
		}{
			{"no offload", nil, false},
			{"backend", []tenant.Offload{backend}, active},
			{"frontend", []tenant.Offload{frontend}, false},
			{"backend and frontend", []tenant.Offload{backend, frontend}, false},
		} {
			if got := policies.Offloaded(tenant.Tenant{Offloads: c.offloads}, own); got != c.want {
				t.Errorf("phase %q, %s: %v, want %v", phase, c.name, got, c.want)
			}
		}
	}
}
