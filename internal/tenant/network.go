package tenant

import (
	"cmp"
	"fmt"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// Networks that a tenant may be on.
const (
	Netpila = "netpila" // the default
	Nimitz  = "nimitz"
)

// Networks returns the names of all networks, the default first.
func Networks() []string { return []string{Netpila, Nimitz} }

// Traits are the capabilities of a network's tenants. Code that treats tenants of one network differently uses traits,
// not the network's name.
type Traits struct {
	Addressings []Addressing // what containers may see; the first is the default
	// address ranges of the tenant's own, a precondition of services, publications and other regions
	Overlays bool
	// The receiver's node applies the sender's egress policies and the receiver's ingress policies, because addresses
	// do not contain apps.
	PolicyAtReceiver bool
	To               string // the network that the tenants may migrate to; empty for most networks
}

// TraitsOf returns the traits of a network; false for one that this build does not know. No name means the default.
func TraitsOf(network string) (Traits, bool) {
	switch cmp.Or(network, Netpila) {
	case Netpila:
		return Traits{Addressings: []Addressing{Encrypted, Clear}}, true
	case Nimitz:
		return Traits{Addressings: []Addressing{Own}, Overlays: true, PolicyAtReceiver: true, To: Netpila}, true
	}
	return Traits{}, false
}

// PolicyAtReceiver reports whether nodes also apply the policies of remote containers. If so, they need the rules of
// all apps of the tenant.
func (t Tenant) PolicyAtReceiver() bool {
	on, _ := TraitsOf(t.Network)
	leaves := Traits{}
	if t.Leaving != "" {
		leaves, _ = TraitsOf(t.Leaving)
	}
	return on.PolicyAtReceiver || leaves.PolicyAtReceiver
}

// CheckNetwork refuses a tenant for whose containers this build cannot allocate addresses.
func (t Tenant) CheckNetwork() error {
	on, known := TraitsOf(t.Network)
	leaves := Traits{}
	if t.Leaving != "" {
		leaves, _ = TraitsOf(t.Leaving)
	}
	switch {
	case !known:
		return fmt.Errorf("is on network %q, which this build does not know", t.Network)
	case t.Leaving != "" && leaves.To != t.Network:
		return fmt.Errorf("is on network %q and leaves %q, of which this build does not know how", t.Network, t.Leaving)
	case !slices.Contains(on.Addressings, t.Addressing), (on.Overlays || leaves.Overlays) != (len(t.Overlays) > 0):
		return fmt.Errorf(
			"on network %s has %s addressing and %d CIDRs, which do not go together",
			t.Network,
			t.Addressing,
			len(t.Overlays),
		)
	case len(t.Overlays) == 0:
		return nil
	}
	return CheckOverlays(address.Plan{}, t.Overlays) // The orchestrator also checks the overlays against the plan.
}
