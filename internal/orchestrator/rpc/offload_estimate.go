package rpc

import (
	"fmt"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/offload"
)

// estimate returns the estimated gain of n frontends for a tenant's containers on a node, and says in lines what that
// is based on.
func (s *OperatorService) estimate(of *pilasterv1.Tenant, node string, n int) (gain float64, text string) {
	model := offload.Modelled(s.Cache.BlocksOf(of.Name))
	text = model.Text(n) + "\nnot counted: packets between containers of " + node + ", and by the gateway"
	if outside := len(of.UnderlayServices) + len(of.Publications); outside > 0 {
		text += fmt.Sprintf(", where the tenant has %s",
			humanize.Of(outside, "underlay service or publication", "underlay services and publications"))
	}
	return model.Gain(n), text
}

// loss returns why an offload with an estimated gain may not start, empty if it may.
func loss(gain float64, estimate string, forced bool) string {
	if gain < 1 && !forced {
		return strings.ReplaceAll(estimate, "\n", "; ")
	}
	return ""
}
