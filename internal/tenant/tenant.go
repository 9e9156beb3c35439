// Package tenant is what a node knows of a tenant: its name, how it is addressed, its ids and
// keys, and which labels make a container's identity. It does no I/O.
package tenant

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// Addressing says what a tenant's containers see.
type Addressing string

const (
	Encrypted Addressing = "encrypted" // AES-128 of the plaintext address (NETPILA §6.2)
	Clear     Addressing = "clear"     // the plaintext address itself
	Own       Addressing = "own"       // an address of the tenant's overlays
)

// Overlay is a range of addresses that is a tenant's own; other tenants may have the same.
type Overlay struct {
	CIDR netip.Prefix
	// NodeBits is the length of the subnet of it that each node gets (NIMITZ §3.2); 0 means none: addresses are given
	// one by one.
	NodeBits int
}

// Tenant owns one or more ids. Two addresses belong together when their ids map to the same
// tenant, never because their bits are equal.
type Tenant struct {
	Name       string
	Network    string    // one of Networks
	Leaving    string    // another of them, while its containers have addresses of both; mostly empty
	Overlays   []Overlay // where it is on a network with them, or leaves one: one, or one of each family
	Regions    []Region  // in which it is too
	Addressing Addressing
	IDs        []ID      // in the order made; not all of them are OnlyAccepted
	Changes    uint64    // of ids, services and publications, counted: of two records the one with more is newer
	Created    time.Time // in UTC; tells it from another that had the same name

	// Of a tenant with overlays; see CheckNorthSouth.
	Services     []Service
	Publications []Publication
}

// Equal compares all of it.
func (t Tenant) Equal(other Tenant) bool {
	return t.Name == other.Name && t.Network == other.Network && t.Leaving == other.Leaving &&
		t.Addressing == other.Addressing &&
		t.Changes == other.Changes && t.Created.Equal(other.Created) && slices.Equal(t.IDs, other.IDs) &&
		slices.Equal(t.Overlays, other.Overlays) &&
		slices.Equal(t.Services, other.Services) &&
		slices.Equal(t.Publications, other.Publications) &&
		slices.EqualFunc(t.Regions, other.Regions, Region.Equal)
}

// MaxIDs is how many ids a tenant may have at a time: as many as the packet path tries.
const MaxIDs = 4

// ID is one 24-bit tenant id and the key that belongs to it.
type ID struct {
	ID           address.TenantID
	Key          address.Key
	OnlyAccepted bool // packets are taken and nothing is drawn: not all nodes know it yet
}

// Current is the id new containers draw from.
func (t Tenant) Current() ID {
	for _, id := range slices.Backward(t.IDs) {
		if !id.OnlyAccepted {
			return id
		}
	}
	return ID{}
}

// Of is one of its ids, with the key; zero where it has no such id.
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

// CheckName refuses names that could not be a DNS label or a file name.
func CheckName(name string) error { return checkName("tenant", name) }

func checkName(of, name string) error {
	if name == "" || len(name) > 63 || strings.IndexFunc(name, notInName) >= 0 || strings.Trim(name, "-") != name {
		return fmt.Errorf("%s name %.80q: 1 to 63 lower-case letters, digits or -, not - at either end", of, name)
	}
	return nil
}

func notInName(r rune) bool { return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-') }
