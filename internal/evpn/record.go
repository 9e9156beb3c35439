package evpn

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// RecordKind is what a record is about.
type RecordKind uint8

// The kinds of records.
const (
	RecordHost   RecordKind = iota + 1 // an address of a tenant, its MAC and its VTEP
	RecordMAC                          // a MAC in a tenant's Ethernet segment, and its VTEP
	RecordPrefix                       // a prefix of a tenant, its VTEP and the MAC of the router there
	RecordMember                       // a VTEP to which frames of a tenant's segment are replicated
)

func (k RecordKind) String() string {
	switch k {
	case RecordHost:
		return "host"
	case RecordMAC:
		return "mac"
	case RecordPrefix:
		return "prefix"
	case RecordMember:
		return "member"
	}
	return "unknown"
}

// MarshalText writes the name.
func (k RecordKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (k *RecordKind) UnmarshalText(text []byte) error {
	for is := RecordHost; is <= RecordMember; is++ {
		if is.String() == string(text) {
			*k = is
			return nil
		}
	}
	return fmt.Errorf("%.40q is no kind of records", text)
}

// RecordKey identifies a record.
type RecordKey struct {
	Kind   RecordKind   `json:"kind"`
	VNI    uint32       `json:"vni"`             // RecordPrefix: the L3 VNI; others: the VNI of the segment
	MAC    MAC          `json:"mac,omitzero"`    // RecordMAC
	Prefix netip.Prefix `json:"prefix,omitzero"` // RecordHost: the address; RecordMember: the VTEP
}

// Compare orders keys: by VNI, kind and the rest.
func (k RecordKey) Compare(other RecordKey) int {
	return cmp.Or(
		cmp.Compare(k.VNI, other.VNI),
		cmp.Compare(k.Kind, other.Kind),
		bytes.Compare(k.MAC[:], other.MAC[:]),
		comparePrefixes(k.Prefix, other.Prefix),
	)
}

// Record is what a node needs to send to a place outside of the cluster.
type Record struct {
	RecordKey
	Tenant    string     `json:"tenant"`
	VTEP      netip.Addr `json:"vtep"`
	HostMAC   MAC        `json:"hostMac,omitzero"`   // RecordHost
	L3VNI     uint32     `json:"l3vni,omitzero"`     // RecordHost: zero if packets cannot be routed there
	RouterMAC MAC        `json:"routerMac,omitzero"` // RecordPrefix, and RecordHost with L3VNI
	Sequence  uint32     `json:"sequence,omitzero"`  // RecordHost, RecordMAC
	Stale     bool       `json:"stale,omitzero"`     // the peer that announced it is lost
}

// Change is an added or changed record, or a deleted one, of which only the key is set.
type Change struct {
	Record
	Deleted bool
}

func sortChanges(changes []Change) {
	slices.SortFunc(changes, func(a, b Change) int { return a.RecordKey.Compare(b.RecordKey) })
}
