package networks

// Design is what a network has by design. Each property names the tests that show it.
type Design struct {
	Tenants  Property `json:"tenants"`           // how they are isolated
	Policies Property `json:"policies"`          // where they are enforced
	Visible  Property `json:"visible"`           // what a container's address tells other containers
	Wire     Property `json:"wire"`              // what the fabric can read
	Fabric   Property `json:"fabric"`            // what the fabric must route
	Features Property `json:"features,omitzero"` // what else it has or lacks
}

// Property is a sentence and the tests that show it, as FILE#TEST. A property of other programs has none.
type Property struct {
	Text  string   `json:"text"`
	Tests []string `json:"tests,omitempty"`
}

func property(text string, tests ...string) Property { return Property{text, tests} }

var (
	designNative = Design{
		Tenants:  property("none"),
		Policies: property("none"),
		Visible:  property("the node"),
		Wire:     property("everything: there are no containers"),
		Fabric:   property("the nodes' addresses"),
	}
	designNetpila = Design{
		Tenants: property("cryptographic: the address of another tenant decrypts to nothing valid",
			"internal/datapath/wire_test.go#TestWhoReachesWhom", "test/attack/container_test.go#TestAttacks"),
		Policies: property("both nodes, by the app in the address",
			"test/policies/cyclonus_test.go#TestPacketsAgainstCyclonus"),
		Visible: property("nothing (encrypted); node, tenant and app (clear)",
			"internal/address/cipher_test.go#TestOpenSSLAgrees", "internal/address/mac_test.go#TestMACHidesNode"),
		Wire: property("node, tenant id and app of both ends in the addresses; payload",
			"internal/datapath/wire_test.go#TestTCPAndUDPAcrossNodes"),
		Fabric: property("a /64 for each node", "test/routing/routers_test.go#TestDeadEqualRouter"),
		Features: property("IPv6; policies, key rotation; no IPv4, no services, no moves with the address",
			"test/restart/rotate_test.go#TestRotation"),
	}
	designILA = Design{
		Tenants: property("by the VNID in the identifier, checked at both ends",
			"test/attack/container_test.go#TestAttacks"),
		Policies: property("both nodes, by the app in the mapping",
			"test/policies/cyclonus_test.go#TestPacketsAgainstCyclonus"),
		Visible: property("the tenant's VNID, no location", "internal/address/ila_test.go#TestIdentifiers"),
		Wire: property("node and VNID of both ends in the addresses; payload; no app",
			"internal/address/ila_test.go#TestMappingIsNeutral"),
		Fabric: property("a /64 for each node, its locator", "internal/address/ila_test.go#TestLocators"),
		Features: property(
			"IPv6; policies; the address says no location, and moves with its container; no IPv4, no services",
			"test/move/move_test.go#TestMove"),
	}
	designEVPN = Design{
		Tenants:  property("by the VNI of the tunnel", "test/evpn/evpn_test.go#TestTenants"),
		Policies: property("as network nimitz", "test/evpn/evpn_test.go#TestTenants"),
		Visible: property("nothing of ours: addresses are the tenant's own",
			"internal/network/evpn/tables/prog_test.go#TestPackets"),
		Wire: property("node, VNI, inner addresses and payload",
			"internal/network/evpn/tables/prog_test.go#TestPackets"),
		Fabric: property("an IPv4 address for each node (VTEP)"),
		Features: property("IPv4 and IPv6, overlapping addresses; routers and other speakers join by BGP",
			"internal/evpn/speaker/frr_test.go#TestFRR"),
	}
	designNimitz = Design{
		Tenants: property("by the VNI in the tunnel address; tenants may have equal addresses",
			"test/nimitz/equal_test.go#TestEqualAddresses", "test/attack/container_test.go#TestAttacks"),
		Policies: property("the receiver's node for both ends, by the app that the tunnel carries",
			"internal/datapath/nimitz_policy_test.go#TestNimitzPolice",
			"test/policies/cyclonus_test.go#TestPacketsAgainstCyclonus"),
		Visible: property("nothing of ours: addresses are the tenant's own",
			"test/nimitz/equal_test.go#TestEqualAddresses"),
		Wire: property("node, VNI, app, inner addresses and payload, in VXLAN",
			"internal/datapath/nimitz_wire_test.go#TestNimitzWire"),
		Fabric: property("a /64 for each node, for its tunnel address", "test/nimitz/traffic_test.go#TestSwitches"),
		Features: property("IPv4 and IPv6, services, publications, regions, moves of single addresses",
			"test/nimitz/north_test.go#TestNorthSouth", "test/nimitz/regions_test.go#TestRegions",
			"test/move/move_test.go#TestMove"),
	}
	designNimitzCached = Design{
		Tenants: designNimitz.Tenants, Policies: designNimitz.Policies, Visible: designNimitz.Visible,
		Wire:   designNimitz.Wire,
		Fabric: designNimitz.Fabric,
		Features: property("as nimitz-ebpf, without the kernel's VXLAN device in the packet path",
			"test/nimitz/traffic_test.go#TestSwitches"),
	}
	designNimitzOVS = Design{
		Tenants: property("as nimitz-ebpf", "test/attack/nimitz_test.go#TestAttacksOnOpenVSwitch"),
		Policies: property("none: containers of tenants with policies are isolated",
			"test/nimitz/policy_test.go#TestPoliciesOnOpenVSwitch"),
		Visible: designNimitz.Visible, Wire: designNimitz.Wire, Fabric: designNimitz.Fabric,
		Features: property("as nimitz-ebpf, beside bridges of others; no moves",
			"test/nimitz/again_test.go#TestOpenVSwitchAgain"),
	}
	designVXLAN = Design{
		Tenants:  property("none: all containers reach each other"),
		Policies: property("none; netfilter can be added"),
		Visible:  property("the node's prefix"),
		Wire:     property("node, inner addresses and payload"),
		Fabric:   property("an address for each node"),
		Features: property("what the kernel has; the cache of `pilaster accelerate` can be added",
			"test/ops/peer_test.go#TestPeerWithCache"),
	}
	designFlannel = Design{
		Tenants:  property("none: all containers reach each other"),
		Policies: property("none; netfilter can be added"),
		Visible:  property("the node's prefix"),
		Wire:     property("node, inner addresses and payload"),
		Fabric:   property("an address for each node"),
		Features: property("subnets of nodes by Kubernetes or etcd, which our orchestrator does not count"),
	}
)
