package tenant

import "fmt"

// Names of networks. Code that treats the tenants of one network differently asks for a capability and not for a name.
// Tests, and measurements of one design, use the names.
const (
	Netpila = "netpila"
	Nimitz  = "nimitz"
	ILA     = "ila"
	EVPN    = "evpn"
)

// DefaultNetwork is the network of a tenant that names none.
const DefaultNetwork = Netpila

// networks are the networks of this build, the default first. A new network needs an entry here, and its module in
// internal/modules.
var networks = []Traits{
	{
		Name:        Netpila,
		Addressings: []Addressing{Encrypted, Clear},
		About:       "a container's address contains its location, and nodes need no location table",
	},
	{
		Name:        Nimitz,
		Addressings: []Addressing{Own},
		Capabilities: OwnCIDRs | NorthSouth | Regions | Mappings | PolicyAtReceiver | Tunnels | HostDevices |
			Offloads,
		About: "a tenant has addresses of its own, which other tenants can use too",
	},
	{
		Name:         ILA,
		Addressings:  []Addressing{Clear},
		Capabilities: Identifiers | Mappings | HostDevices | AddressKeys,
		About:        "a container's address says nothing about its location, and nodes look it up",
	},
	{
		Name:         EVPN,
		Addressings:  []Addressing{Own},
		Capabilities: OwnCIDRs | Mappings | PolicyAtReceiver | HostDevices | Announced,
		About:        "a tenant has addresses of its own, which BGP announces to other EVPN speakers",
	},
}

// Move is a rule for `pilaster tenant migrate`: whether a tenant with running containers can move between two networks.
type Move struct {
	From, To string
	Refused  string // why it cannot; empty if it can
}

// evpn is a network that some builds do not have; its rules are inert there.
const evpn = "evpn"

// moves has a rule for each pair of networks. During a move, containers have addresses of both networks.
var moves = []Move{
	{From: Nimitz, To: Netpila},
	{Netpila, Nimitz, noCIDRs(Netpila, Nimitz)},
	{Netpila, ILA, alone},
	{ILA, Netpila, alone},
	{ILA, Nimitz, noCIDRs(ILA, Nimitz)},
	{Nimitz, ILA, alone},
	{Nimitz, evpn, keepsNone},
	{evpn, Nimitz, keepsNone},
	{Netpila, evpn, noCIDRs(Netpila, evpn)},
	{ILA, evpn, noCIDRs(ILA, evpn)},
	{evpn, Netpila, "other EVPN speakers use the tenant's addresses, and none of them reaches network netpila; " +
		"create a tenant there instead"},
	{evpn, ILA, alone},
}

const (
	// keepsNone is the reason for networks between which addresses could remain.
	keepsNone = "containers would keep their addresses, and this build can only move a tenant to other addresses"
	// alone is the reason for a network whose programs are no second network of a container.
	alone = "a move needs containers with addresses of both networks, and network ila cannot be one of two; create a " +
		"tenant on the other network instead"
)

func noCIDRs(from, to string) string {
	return fmt.Sprintf("network %s needs CIDRs of the tenant's own, which one of network %s does not have", to, from)
}

// AddNetwork adds a network that is not part of this build, for a test of what a network needs. It is called before
// anything else uses the package.
func AddNetwork(t Traits) { networks = append(networks, t) }
