package rpc

import (
	"fmt"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/offload"
)

// modelledGain estimates the gain of n frontends for a tenant by its policies, and says what that is based on.
func (s *OperatorService) modelledGain(of *pilasterv1.Tenant, n int) (gain float64, text string) {
	blocks := 0
	policies, _, _ := s.Cache.PolicyInputs(of.Name)
	for _, p := range policies {
		blocks += p.Blocks()
	}
	gain, text = offload.Modelled(blocks, n)
	text += "; it is for packets from other nodes: those between containers of the node and by the gateway cost more " +
		"than without an offload"
	if outside := len(of.Services) + len(of.Publications); outside > 0 {
		text += fmt.Sprintf(", and the tenant has %s by the gateway",
			humanize.Of(outside, "service or publication", "services and publications"))
	}
	return gain, text
}

// loss returns why an offload with an estimated gain may not start, empty if it may.
func loss(gain float64, estimate string, forced bool) string {
	if gain > 0 && gain < 1 && !forced {
		return estimate
	}
	return ""
}
