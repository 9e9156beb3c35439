package address

import (
	"fmt"
	"net/netip"
)

// Services are reached at addresses of one prefix of the cluster. A tenant has the /64 in it whose number is that of
// the tenant for services. The addresses do not depend on a key, so they stay when keys rotate.

// servicePrefix is "pils" beside the base prefix "pila" of DefaultPlan.
var servicePrefix = netip.MustParsePrefix("fd70:696c:7300::/40")

// MaxServicesNumber is the highest number of a tenant for services. Number 0 is no tenant's.
const MaxServicesNumber = 1<<24 - 1

// ServicePrefix returns the prefix of the cluster's services. An error means that the plan uses these addresses for
// something else, so that the cluster cannot have services.
func (p Plan) ServicePrefix() (netip.Prefix, error) {
	var identifiers netip.Prefix
	if p.Base.IsValid() {
		identifiers, _ = p.IdentifierPrefix() // also one that is not reserved yet
	}
	for _, other := range []netip.Prefix{p.Base, p.Private, p.Gateway6, p.Egress, identifiers} {
		if other.IsValid() && other.Overlaps(servicePrefix) {
			return netip.Prefix{}, fmt.Errorf("services have addresses of %v, which overlaps this cluster's %v: they "+
				"need a cluster with other prefixes", servicePrefix, other)
		}
	}
	return servicePrefix, nil
}

// TenantServices returns the /64 of a tenant with a number for services, from 1.
func (p Plan) TenantServices(number uint32) (netip.Prefix, error) {
	of, err := p.ServicePrefix()
	if err != nil {
		return of, err
	}
	if number == 0 || number > MaxServicesNumber {
		return netip.Prefix{}, fmt.Errorf("a tenant's number for services is 1 to %d, and not %d", MaxServicesNumber,
			number)
	}
	return Subnet(of, NodeBits, uint64(number)), nil
}
