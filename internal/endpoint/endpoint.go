package endpoint

import (
	"net"
	"net/netip"
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
	App         address.AppID     `json:"app"`
	Labels      map[string]string `json:"labels,omitempty"` // as given; identity labels made the app
	State       State             `json:"state"`
	Attachments []Attachment      `json:"attachments"`
	Device      Device            `json:"device"`
	Created     time.Time         `json:"created"`
}

// Lives reports whether the endpoint is one the runtime has and has not deleted.
func (r Record) Lives() bool { return r.State == Active || r.State == Lost }

// Attachment is one network's part of an endpoint.
type Attachment struct {
	Network   string         `json:"network"`   // "netpila"
	Plaintext netip.Addr     `json:"plaintext"` // what nodes and the fabric see
	Address   netip.Addr     `json:"address"`   // what the container sees
	Gateway   netip.Addr     `json:"gateway"`   // link-local next hop of the routes, a static neighbour
	Routes    []netip.Prefix `json:"routes"`    // what the container reaches through the gateway
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
