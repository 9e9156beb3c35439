package endpoint

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// ID identifies an endpoint on its node: 1..65535, reused after release.
type ID uint32

// MaxID is the largest endpoint id.
const MaxID ID = 65535

// State is the state of an endpoint's life cycle. Packets flow only while it is Active.
type State string

const (
	Preparing State = "preparing" // in memory only, perhaps with a device; no program or map entry yet
	Active    State = "active"    // packets flow
	Lost      State = "lost"      // its device is gone, as after a reboot; to be deleted by the runtime
	Deleting  State = "deleting"  // map entries are deleted first, then the device, then the record
)

// Record is the state of an endpoint, on disk and in memory.
type Record struct {
	ID          ID               `json:"id"`
	ContainerID string           `json:"containerId"`
	Interface   string           `json:"interface"`            // inside the container
	Netns       string           `json:"netns"`                // path, as the agent opens it
	CNINetwork  string           `json:"cniNetwork,omitempty"` // scope of garbage collection
	Pod         string           `json:"pod,omitempty"`        // "namespace/name", display only
	Tenant      string           `json:"tenant"`
	TenantID    address.TenantID `json:"tenantId"`
	App         address.AppID    `json:"app"` // the app in its addresses
	// the app of its current labels; 0: they have not changed since its addresses were allocated
	AppNow      address.AppID     `json:"appNow,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"` // the identity labels determine the app
	State       State             `json:"state"`
	Attachments []Attachment      `json:"attachments"`
	// addresses that it had before its tenant moved to another network; the runtime still has them
	Left    []netip.Addr `json:"left,omitempty"`
	Device  Device       `json:"device"`
	Created time.Time    `json:"created"`
	// The addresses belong to this key; the container that has it next gets them, also on another node.
	AddressKey string     `json:"addressKey,omitempty"`
	Conditions Conditions `json:"conditions,omitzero"`
	HostPorts  []HostPort `json:"hostPorts,omitempty"`
}

// Conditions say whether services send new connections to the container. An operator sets them.
type Conditions struct {
	NotReady    bool `json:"notReady,omitempty"`
	Terminating bool `json:"terminating,omitempty"` // gets none unless there is no other endpoint
}

// Lives reports whether the runtime has added the endpoint and has not deleted it.
func (r Record) Lives() bool { return r.State == Active || r.State == Lost }

// Networks returns the names of the networks of which the endpoint has attachments.
func (r Record) Networks() []string {
	var names []string
	for _, a := range r.Attachments {
		names = append(names, a.Network)
		if a.Also != "" {
			names = append(names, a.Also)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// SendsBy returns the names of the networks by which the container sends.
func (r Record) SendsBy() []string { return r.Over("", "").Networks() }

// Over returns the record with its attachments on a network, and also on another one; empty names: on their network,
// and on no other.
func (r Record) Over(network, also string) Record {
	r.Attachments = slices.Clone(r.Attachments)
	for i := range r.Attachments {
		a := &r.Attachments[i]
		a.Network, a.Also = cmp.Or(network, a.Network), also
	}
	return r
}

// On returns the record with its attachments of one network only.
func (r Record) On(network string) Record {
	var on []Attachment
	for _, a := range r.Attachments {
		if a.Network == network || a.Also == network {
			a.Network, a.Also = network, ""
			on = append(on, a)
		}
	}
	r.Attachments = on
	return r
}

// Without returns the record without its attachments of one network.
func (r Record) Without(network string) Record {
	var stay []Attachment
	for _, a := range r.Attachments {
		if a.Network == network {
			a.Network, a.Also = a.Also, ""
		}
		if a.Also == network {
			a.Also = ""
		}
		if a.Network != "" {
			stay = append(stay, a)
		}
	}
	r.Attachments = stay
	return r
}

// Addresses returns the addresses that the container has on its interface.
func (r Record) Addresses() []netip.Addr {
	all := make([]netip.Addr, len(r.Attachments))
	for i, a := range r.Attachments {
		all[i] = a.Address
	}
	return all
}

// SegmentMAC returns the MAC that follows from the addresses (address.SegmentMAC): from the IPv4 address, if there is
// one.
func (r Record) SegmentMAC() net.HardwareAddr {
	of := r.Attachments[0].Address
	for _, a := range r.Attachments {
		if a.Address.Is4() {
			of = a.Address
		}
	}
	return address.SegmentMAC(of)
}

// Overhead returns the most bytes that one of its networks adds to a packet between nodes.
func (r Record) Overhead() int {
	most := 0
	for _, a := range r.Attachments {
		most = max(most, a.Overhead)
	}
	return most
}

// Attachment is one network's part of an endpoint: an IPv4 or IPv6 address, and its routes. An endpoint may have
// several attachments of one network.
type Attachment struct {
	Network string `json:"network"` // its name
	// a second network with this address, by which the container receives, while its tenant moves between the two
	Also string `json:"also,omitempty"`
	// the address on the fabric, in a network whose fabric routes to containers
	Plaintext netip.Addr     `json:"plaintext,omitzero"`
	Address   netip.Addr     `json:"address"` // the address on the container's interface
	Gateway   netip.Addr     `json:"gateway"` // link-local next hop of the routes, a static neighbour
	Routes    []netip.Prefix `json:"routes"`  // the destinations behind the gateway
	// the subnet of this node that the address was allocated from, if any
	Subnet   netip.Prefix `json:"subnet,omitzero"`
	Overhead int          `json:"overhead,omitempty"` // bytes of the outer headers
	// the /64 that replaces the first half of the address on the fabric, in a network that does so
	Locator netip.Prefix `json:"locator,omitzero"`
	// how often the address has been on another node before, counted by the cluster; only with an address key
	Sequence uint64 `json:"sequence,omitempty"`
	// the address at which hosts outside of the cluster see the container, if its tenant may send to them
	Egress netip.Addr `json:"egress,omitzero"`
}

// DefaultRoute is the route of containers that may send to hosts outside of the cluster.
var DefaultRoute = netip.PrefixFrom(netip.IPv6Unspecified(), 0)

// LeadsOutside reports whether a route of the attachment leads to hosts outside of the cluster. In a network whose
// fabric does not route to containers, the DefaultRoute leads to the tenant's other containers.
func (a Attachment) LeadsOutside(route netip.Prefix) bool {
	return route == DefaultRoute && a.Plaintext.IsValid()
}

// Device connects the container to the node. All attachments use it, so its MAC is that of all their addresses.
type Device struct {
	Kind         string           // "veth", "macvlan"
	HostName     string           // name on the node; empty if the node has no device
	HostIfindex  int              // or the number that identifies the device in the packet path
	HostMAC      net.HardwareAddr // the gateway's MAC
	ContainerMAC net.HardwareAddr // stays the same as long as the endpoint lives
	MTU          int
}
