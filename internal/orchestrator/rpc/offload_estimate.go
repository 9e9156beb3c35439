package rpc

import (
	"fmt"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/policy"
)

// modelledGain estimates the gain of n frontends for a tenant by its policies, and says what that is based on.
func (s *OperatorService) modelledGain(of *pilasterv1.Tenant, n int) (gain float64, text string) {
	blocks := 0
	for _, p := range s.Cache.PoliciesOf(of.Name) {
		parsed, err := policy.Parse([]byte(p.Document))
		if err != nil {
			return 0, fmt.Sprintf("there is no estimate, because this orchestrator cannot read policy %s: %v", p.Name, err)
		}
		for _, is := range parsed {
			blocks += is.Blocks()
		}
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
