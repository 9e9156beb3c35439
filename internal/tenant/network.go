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

// Networks are all of them, the default first.
func Networks() []string { return []string{Netpila, Nimitz} }

// Traits are what a network's tenants have. Whatever treats tenants of one network in another way than those of another
// asks for these.
type Traits struct {
	Addressings []Addressing // what containers may see; the first unless another is chosen
	// ranges of addresses of their own, beside which there may be services, publications and other regions
	Overlays bool
	// a packet between containers is judged by the rules of both where it arrives: no address says who is at the other
	// end
	JudgedThere bool
	To          string // the network that they may move to; mostly empty
}

// TraitsOf are those of a network's tenants; false for one that this build does not know. No name means the default.
func TraitsOf(network string) (Traits, bool) {
	switch cmp.Or(network, Netpila) {
	case Netpila:
		return Traits{Addressings: []Addressing{Encrypted, Clear}}, true
	case Nimitz:
		return Traits{Addressings: []Addressing{Own}, Overlays: true, JudgedThere: true, To: Netpila}, true
	}
	return Traits{}, false
}

// JudgedThere tells whether nodes judge what others' containers of the tenant begin, and so need the rules of all its
// apps.
func (t Tenant) JudgedThere() bool {
	on, _ := TraitsOf(t.Network)
	leaves := Traits{}
	if t.Leaving != "" {
		leaves, _ = TraitsOf(t.Leaving)
	}
	return on.JudgedThere || leaves.JudgedThere
}

// CheckNetwork refuses a tenant whose containers this build could not give addresses.
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
	return CheckOverlays(address.Plan{}, t.Overlays) // what of the plan they may not have, the orchestrator knows
}
