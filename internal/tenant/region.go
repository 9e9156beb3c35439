package tenant

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// MaxRegions is how many other regions a region may know.
const MaxRegions = 64

// Region is another region in which the tenant exists (NIMITZ §3.1, cross-region traffic).
type Region struct {
	Name     string           `json:"name"`
	CIDRs    []netip.Prefix   `json:"cidrs"`    // the tenant's CIDRs there; they do not overlap its own
	Edge     netip.Prefix     `json:"edge"`     // /64 of this region's Edge Switch
	PeerEdge netip.Prefix     `json:"peerEdge"` // /64 of the other region's Edge Switch
	PeerVNI  address.TenantID `json:"peerVni"`  // the tenant's VNI there
}

// ParseRegions parses regions from protobuf messages.
func ParseRegions[R interface {
	GetName() string
	GetCidrs() []string
	GetEdge() string
	GetPeerEdge() string
	GetPeerVni() uint32
}](list []R) ([]Region, error) {
	var regions []Region
	for _, r := range list {
		region := Region{Name: r.GetName(), PeerVNI: address.TenantID(r.GetPeerVni())}
		var err error
		if region.CIDRs, err = ParsePrefixes(r.GetCidrs()); err != nil {
			return nil, fmt.Errorf("region %s: CIDR %w", region.Name, err)
		}
		edges, err := ParsePrefixes([]string{r.GetEdge(), r.GetPeerEdge()})
		if err != nil {
			return nil, fmt.Errorf("region %s: edge %w", region.Name, err)
		}
		region.Edge, region.PeerEdge = edges[0], edges[1]
		if err := region.Check(); err != nil {
			return nil, err
		}
		regions = append(regions, region)
	}
	return regions, nil
}

// Equal compares all fields.
func (r Region) Equal(other Region) bool {
	return r.Name == other.Name && slices.Equal(r.CIDRs, other.CIDRs) && r.Edge == other.Edge &&
		r.PeerEdge == other.PeerEdge &&
		r.PeerVNI == other.PeerVNI
}

// Check refuses regions that an orchestrator never sends.
func (r Region) Check() error {
	if err := CheckRegionName(r.Name); err != nil {
		return err
	}
	for _, edge := range []netip.Prefix{r.Edge, r.PeerEdge} {
		if !edge.IsValid() || !edge.Addr().Is6() || edge.Bits() != 64 || edge != edge.Masked() {
			return fmt.Errorf("region %s: edge %v is not the /64 of a node", r.Name, edge)
		}
	}
	if r.PeerVNI < 1 || r.PeerVNI > address.MaxTenantID {
		return fmt.Errorf("region %s: VNI %d is not in 1..%d", r.Name, r.PeerVNI, address.MaxTenantID)
	}
	if len(r.CIDRs) == 0 {
		return fmt.Errorf("region %s: the tenant has no CIDR there", r.Name)
	}
	for _, cidr := range r.CIDRs {
		if !cidr.IsValid() || cidr != cidr.Masked() {
			return fmt.Errorf("region %s: CIDR %v is not a prefix such as 10.0.0.0/16", r.Name, cidr)
		}
	}
	return nil
}

// CheckRegionName refuses names that are not a DNS label.
func CheckRegionName(name string) error { return checkName("region", name) }

// ParsePrefixes parses prefixes without host bits.
func ParsePrefixes(texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err == nil && p != p.Masked() {
			return nil, fmt.Errorf("%v has host bits set; write %v", p, p.Masked())
		}
		if err != nil {
			return nil, fmt.Errorf("%.50q is not a prefix such as 10.0.0.0/16", text)
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}
