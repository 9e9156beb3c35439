package endpoint

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// ID tells the endpoints of one node apart: 1..65535, reused after release.
type ID uint32

// MaxID is the largest endpoint id.
const MaxID ID = 65535

// State is how far an endpoint has come. Nothing flows unless it is Active.
type State string

const (
	Preparing State = "preparing" // in memory alone, perhaps with a device; no program or map entry yet
	Active    State = "active"    // packets flow
	Lost      State = "lost"      // its device is gone, as after a reboot; to be deleted by the runtime
	Deleting  State = "deleting"  // map entries go first, then the device, then the record
)

// Record is all that is kept of an endpoint, on disk and in memory.
type Record struct {
	ID          ID                `json:"id"`
	ContainerID string            `json:"containerId"`
	Interface   string            `json:"interface"`            // inside the container
	Netns       string            `json:"netns"`                // path, as the agent opens it
	CNINetwork  string            `json:"cniNetwork,omitempty"` // scope of garbage collection
	Pod         string            `json:"pod,omitempty"`        // "namespace/name", display only
	Tenant      string            `json:"tenant"`
	TenantID    address.TenantID  `json:"tenantId"`
	App         address.AppID     `json:"app"`              // that its addresses say
	AppNow      address.AppID     `json:"appNow,omitempty"` // that its labels make since they have changed; 0: the same
	Labels      map[string]string `json:"labels,omitempty"` // identity labels make the app
	State       State             `json:"state"`
	Attachments []Attachment      `json:"attachments"`
	// had before its tenant moved to another network; its runtime believes in them
	Left    []netip.Addr `json:"left,omitempty"`
	Device  Device       `json:"device"`
	Created time.Time    `json:"created"`
}

// Lives reports whether the endpoint is one the runtime has and has not deleted.
func (r Record) Lives() bool { return r.State == Active || r.State == Lost }

// Networks are those it has attachments of, by name.
func (r Record) Networks() []string {
	var names []string
	for _, a := range r.Attachments {
		if !slices.Contains(names, a.Network) {
			names = append(names, a.Network)
		}
	}
	slices.Sort(names)
	return names
}

// On is the record with its attachments of one network alone.
func (r Record) On(network string) Record {
	r.Attachments = slices.DeleteFunc(
		slices.Clone(r.Attachments),
		func(a Attachment) bool { return a.Network != network },
	)
	return r
}

// Without is the record without its attachments of one network.
func (r Record) Without(network string) Record {
	r.Attachments = slices.DeleteFunc(
		slices.Clone(r.Attachments),
		func(a Attachment) bool { return a.Network == network },
	)
	return r
}

// Addresses are what the container sees itself as.
func (r Record) Addresses() []netip.Addr {
	all := make([]netip.Addr, len(r.Attachments))
	for i, a := range r.Attachments {
		all[i] = a.Address
	}
	return all
}

// Overhead is how many bytes its packets may grow by on their way.
func (r Record) Overhead() int {
	most := 0
	for _, a := range r.Attachments {
		most = max(most, a.Overhead)
	}
	return most
}

// Attachment is one network's part of an endpoint: an address, of either family, and what it leads to. A network may
// give several.
type Attachment struct {
	Network string `json:"network"` // "netpila"
	// what nodes and the fabric see, in a network where they see containers
	Plaintext netip.Addr     `json:"plaintext,omitzero"`
	Address   netip.Addr     `json:"address"`            // what the container sees
	Gateway   netip.Addr     `json:"gateway"`            // link-local next hop of the routes, a static neighbour
	Routes    []netip.Prefix `json:"routes"`             // what the container reaches through the gateway
	Subnet    netip.Prefix   `json:"subnet,omitzero"`    // of this node, where the address was drawn from one
	Overhead  int            `json:"overhead,omitempty"` // bytes that the network puts before a packet
}

// Device joins the container to the node.
type Device struct {
	Kind         string           // "veth", "macvlan"
	HostName     string           // of the node's side; empty where there is none
	HostIfindex  int              // or the number that stands for it in the packet path
	HostMAC      net.HardwareAddr // the gateway's MAC
	ContainerMAC net.HardwareAddr
	MTU          int
}
