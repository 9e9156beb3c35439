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
		Name:         Netpila,
		Addressings:  []Addressing{Encrypted, Clear},
		Capabilities: Egress | Services,
		About:        "a container's address contains its location, and nodes need no location table",
	},
	{
		Name:        Nimitz,
		Addressings: []Addressing{Own},
		Capabilities: OwnCIDRs | NorthSouth | Regions | Mappings | PolicyAtReceiver | Tunnels | HostDevices |
			AddressKeys | Offloads,
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
	// Containers keep their addresses, which are addresses of both networks during the move. Otherwise they have
	// addresses of both.
	KeepsAddresses bool
}

// evpn is a network that some builds do not have; its rules are inert there.
const evpn = "evpn"

// moves has a rule for each pair of networks.
var moves = []Move{
	{From: Nimitz, To: Netpila},
	{From: Nimitz, To: evpn, KeepsAddresses: true},
	{From: evpn, To: Nimitz, KeepsAddresses: true},
	{From: Netpila, To: Nimitz, Refused: noCIDRs(Netpila, Nimitz)},
	{From: Netpila, To: ILA, Refused: alone},
	{From: ILA, To: Netpila, Refused: alone},
	{From: ILA, To: Nimitz, Refused: noCIDRs(ILA, Nimitz)},
	{From: Nimitz, To: ILA, Refused: alone},
	{From: Netpila, To: evpn, Refused: noCIDRs(Netpila, evpn)},
	{From: ILA, To: evpn, Refused: noCIDRs(ILA, evpn)},
	{From: evpn, To: Netpila, Refused: "other EVPN speakers use the tenant's addresses, and none of them reaches " +
		"network netpila; create a tenant there instead"},
	{From: evpn, To: ILA, Refused: alone},
}

// alone is the reason for a network whose programs are no second network of a container.
const alone = "a move needs containers with addresses of both networks, and network ila cannot be one of two; create " +
	"a tenant on the other network instead"

func noCIDRs(from, to string) string {
	return fmt.Sprintf("network %s needs CIDRs of the tenant's own, which one of network %s does not have", to, from)
}

// AddNetwork adds a network that is not part of this build, for a test of what a network needs. It is called before
// anything else uses the package.
func AddNetwork(t Traits) { networks = append(networks, t) }
