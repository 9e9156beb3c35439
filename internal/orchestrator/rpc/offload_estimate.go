package rpc

import (
	"fmt"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/offload"
)

// estimate returns the estimated gain of n frontends for a tenant, and says what that is based on.
func (s *OperatorService) estimate(of *pilasterv1.Tenant, n int) (gain float64, text string) {
	model := offload.Modelled(s.Cache.BlocksOf(of.Name))
	text = model.Text(n) + "; it is for packets from other nodes: those between containers of the node and by the " +
		"gateway cost more than without an offload"
	if outside := len(of.Services) + len(of.Publications); outside > 0 {
		text += fmt.Sprintf(", and the tenant has %s by the gateway",
			humanize.Of(outside, "service or publication", "services and publications"))
	}
	return model.Gain(n), text
}

// loss returns why an offload with an estimated gain may not start, empty if it may.
func loss(gain float64, estimate string, forced bool) string {
	if gain < 1 && !forced {
		return estimate
	}
	return ""
}
