// Package tenant holds what a node knows of a tenant: its name, its addressing, its ids and keys, and which labels are
// part of a container's identity. It does no I/O.
package tenant

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// Addressing is the kind of address that a tenant's containers see.
type Addressing string

const (
	Encrypted Addressing = "encrypted" // AES-128 of the plaintext address (NETPILA §6.2)
	Clear     Addressing = "clear"     // the plaintext address itself
	Own       Addressing = "own"       // an address of the tenant's overlays
)

// Overlay is an address range of a tenant's own; other tenants may use the same range.
type Overlay struct {
	CIDR netip.Prefix
	// NodeBits is the prefix length of each node's subnet of the range (NIMITZ §3.2); 0 means that addresses are
	// allocated one by one.
	NodeBits int
}

// Tenant owns one or more ids. Two addresses belong to one tenant if their ids are ids of the same tenant. The ids need
// not be equal.
type Tenant struct {
	Name    string
	Network string // one of Networks
	// the network that the tenant leaves, while its containers have addresses of both; empty without a migration. If
	// the addresses stay (KeepsAddresses), it is the other of two networks: containers send by Network, and receive by
	// both.
	Leaving    string
	Overlays   []Overlay // one, or one of each family, if Network or Leaving has overlays
	Regions    []Region  // other regions with this tenant
	Addressing Addressing
	IDs        []ID      // in the order of their creation; at least one is not OnlyAccepted
	Changes    uint64    // of ids, underlay services and publications: a record with a higher count is newer
	Created    time.Time // in UTC; distinguishes it from an earlier tenant of the same name

	// Only with overlays; see CheckNorthSouth.
	UnderlayServices []UnderlayService
	Publications     []Publication
	Offloads         []Offload

	// Only on networks with the capability Egress; see CheckEgress.
	Egress    []EgressRule
	Nodes     []netip.Prefix // nodes whose processes containers reach and are reached by, by their /64s; none: own node
	Protected []netip.Prefix // prefixes of the cluster that only rules for them or parts of them allow

	ServicesNumber uint32 // of the /64 of its services (address.Plan.TenantServices); 0: it has had none
	Exposed        bool   // hosts outside reach a service of it, or have reached one
}

// Equal compares all fields.
func (t Tenant) Equal(other Tenant) bool {
	return t.Name == other.Name && t.Network == other.Network && t.Leaving == other.Leaving &&
		t.Addressing == other.Addressing &&
		t.Changes == other.Changes && t.Created.Equal(other.Created) && slices.Equal(t.IDs, other.IDs) &&
		slices.Equal(t.Overlays, other.Overlays) &&
		slices.Equal(t.UnderlayServices, other.UnderlayServices) &&
		slices.Equal(t.Publications, other.Publications) &&
		slices.EqualFunc(t.Offloads, other.Offloads, Offload.Equal) &&
		slices.EqualFunc(t.Regions, other.Regions, Region.Equal) &&
		slices.EqualFunc(t.Egress, other.Egress, EgressRule.Equal) && slices.Equal(t.Nodes, other.Nodes) &&
		slices.Equal(t.Protected, other.Protected) && t.ServicesNumber == other.ServicesNumber &&
		t.Exposed == other.Exposed
}

// MaxIDs is how many ids a tenant may have at a time; the packet path tries all of them.
const MaxIDs = 4

// ID is a 24-bit tenant id and its key.
type ID struct {
	ID           address.TenantID
	Key          address.Key
	OnlyAccepted bool // packets are accepted, but no address is allocated under it: not all nodes know it yet
}

// Current returns the id under which addresses of new containers are allocated.
func (t Tenant) Current() ID {
	for _, id := range slices.Backward(t.IDs) {
		if !id.OnlyAccepted {
			return id
		}
	}
	return ID{}
}

// Of returns this id with its key; zero if the tenant does not have it.
func (t Tenant) Of(id address.TenantID) ID {
	for _, own := range t.IDs {
		if own.ID == id {
			return own
		}
	}
	return ID{}
}

// Has reports whether an id is one of the tenant's.
func (t Tenant) Has(id address.TenantID) bool {
	return slices.ContainsFunc(t.IDs, func(own ID) bool { return own.ID == id })
}

// CheckName refuses names that are not a DNS label.
func CheckName(name string) error { return checkName("tenant", name) }

func checkName(of, name string) error {
	if name == "" || len(name) > 63 || strings.IndexFunc(name, notInName) >= 0 || strings.Trim(name, "-") != name {
		return fmt.Errorf("%s name %.80q: 1 to 63 lower-case letters, digits or -, not - at either end", of, name)
	}
	return nil
}

func notInName(r rune) bool { return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-') }
