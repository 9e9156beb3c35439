package speaker

import (
	"encoding/json"
	"log/slog"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"pilaster.io/pilaster/internal/evpn"
)

// GoBGP 4.8.0 has an index of MAC/IP routes by route target and MAC, from which it removes nothing: each announcement
// that a peer sends, rejected or withdrawn or not, stays in memory until the process ends. It also changes mobility
// sequences by that index. So GoBGP must not recognize the route targets of any route. What goes over the wire is the
// same. TestMemoryIsReleased shows whether this is still needed.
//
// Announced routes get other targets by GoBGP's API. For received ones it has no place for that: an import policy only
// changes what it accepts, and GoBGP enters the withdrawal of a rejected route into the index with the attributes as
// received; route-server clients and VRFs use the same index; no option sets the decoder of communities; and a watcher
// is called later, on another goroutine. The logger alone is called with the attributes that GoBGP uses after that.

// target is a route target that GoBGP does not recognize as one.
type target evpn.Target

var _ bgp.ExtendedCommunityInterface = target{}

func (t target) Serialize() ([]byte, error)   { return t[:], nil }
func (t target) String() string               { return evpn.Target(t).String() }
func (t target) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }
func (t target) Flat() map[string]string      { return map[string]string{} }

// GetTypes returns a type that no standard uses.
func (t target) GetTypes() (bgp.ExtendedCommunityAttrType, bgp.ExtendedCommunityAttrSubType) {
	return 0xff, 0xff
}

// toTarget returns the route target that GoBGP has decoded.
func toTarget(c bgp.ExtendedCommunityInterface) (evpn.Target, bool) {
	switch c := c.(type) {
	case target:
		return evpn.Target(c), true
	case *bgp.TwoOctetAsSpecificExtended, *bgp.IPv4AddressSpecificExtended, *bgp.FourOctetAsSpecificExtended,
		*bgp.UnknownExtended:
		raw, err := c.Serialize()
		if err == nil && len(raw) == 8 && raw[0] <= maxTargetType && raw[1] == subtypeRouteTarget {
			return evpn.Target(raw), true
		}
	}
	return evpn.Target{}, false
}

// Types and subtypes of extended communities (RFC 4360, RFC 7153).
const (
	maxTargetType      = 2 // types 0 to 2 are transitive: ASN of two bytes, IPv4 address, ASN of four bytes
	subtypeRouteTarget = 2
)

// The message that GoBGP logs, on the level of debugging, when it has decoded an update and before it uses it.
const (
	receivedMessage    = "received update"
	receivedAttributes = "path_attributes"
)

// hideTargets replaces the route targets in the attributes of that message. GoBGP calls the logger on the goroutine
// that has decoded the update, so no other goroutine has them yet.
func hideTargets(r slog.Record) {
	if r.Message != receivedMessage {
		return
	}
	r.Attrs(func(a slog.Attr) bool {
		attrs, ok := a.Value.Any().([]bgp.PathAttributeInterface)
		if a.Key != receivedAttributes || !ok {
			return true
		}
		for _, attr := range attrs {
			communities, ok := attr.(*bgp.PathAttributeExtendedCommunities)
			if !ok {
				continue
			}
			for i, c := range communities.Value {
				if t, ok := toTarget(c); ok {
					communities.Value[i] = target(t)
				}
			}
		}
		return false
	})
}
