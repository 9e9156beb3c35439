package tenant

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
		Name:         Nimitz,
		Addressings:  []Addressing{Own},
		Capabilities: OwnCIDRs | NorthSouth | Regions | Mappings | PolicyAtReceiver | Tunnels | HostDevices,
		To:           Netpila,
		About:        "a tenant has addresses of its own, which other tenants can use too",
	},
	{
		Name:         ILA,
		Addressings:  []Addressing{Clear},
		Capabilities: Identifiers | Mappings | HostDevices,
		About:        "a container's address says nothing about its location, and nodes look it up",
	},
	{
		Name:         EVPN,
		Addressings:  []Addressing{Own},
		Capabilities: OwnCIDRs | Mappings | PolicyAtReceiver | HostDevices | Announced,
		About:        "a tenant has addresses of its own, which BGP announces to other EVPN speakers",
	},
}

// AddNetwork adds a network that is not part of this build, for a test of what a network needs. It is called before
// anything else uses the package.
func AddNetwork(t Traits) { networks = append(networks, t) }
