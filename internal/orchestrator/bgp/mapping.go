package bgp

import (
	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/evpn"
)

// Origin is the origin of mappings that follow from imported routes.
const Origin = "evpn"

// Mapping returns the mapping of an imported address or prefix, as nodes receive mappings of this cluster: packets to
// it go to the tunnel address, with the MAC of the host, or of the router there if they are routed. It is nil for a
// record without an address.
func Mapping(r evpn.Record) *pilasterv1.Mapping {
	if r.Kind != evpn.RecordHost && r.Kind != evpn.RecordPrefix {
		return nil
	}
	mac := r.HostMAC
	if r.Kind == evpn.RecordPrefix {
		mac = r.RouterMAC
	}
	return &pilasterv1.Mapping{
		Tenant: r.Tenant, To: r.Prefix.String(), NextHops: []string{r.VTEP.String()}, Mac: mac.String(),
		Sequence: uint64(r.Sequence), Origin: Origin,
	}
}
