// Code generated from reasons.txt; DO NOT EDIT.

package dropreason

const (
	NotIp6           Reason = 1
	Malformed        Reason = 2
	SrcNotOwn        Reason = 3
	DstNotPrivate    Reason = 4
	DstUndecryptable Reason = 5
	ToNode           Reason = 6
	TenantMismatch   Reason = 7
	AppReserved      Reason = 8
	NoEndpoint       Reason = 9
	RoutingHeader    Reason = 10
	NdForbidden      Reason = 11
	NdIgnored        Reason = 12
	MldIgnored       Reason = 13
	Multicast        Reason = 14
	HopLimit         Reason = 15
	NoRoute          Reason = 16
	NoKey            Reason = 17
	OwnSource        Reason = 18
	TenantToNode     Reason = 19
	HostClaimsTenant Reason = 20
	IcmpQuote        Reason = 21
	TooBig           Reason = 22
	PrivateOutside   Reason = 23
	MacOutside       Reason = 24
	NoProgram        Reason = 25
	PeerUnknown      Reason = 26
	TunnelForged     Reason = 27
	LaterFragment    Reason = 28
	Untranslated     Reason = 29
	ForeignUnknown   Reason = 30
	ConnectionLimit  Reason = 31
	PolicyDenied     Reason = 32
	FragmentUnknown  Reason = 33
	SessionLimit     Reason = 34
	HopOptions       Reason = 35
	NoMapping        Reason = 36
	LocatorMismatch  Reason = 37
	MacMismatch      Reason = 38
	NotReplicated    Reason = 39
	ReplicationLimit Reason = 40
	NshMalformed     Reason = 41
	NshUnknown       Reason = 42
	NshForged        Reason = 43
	NshStale         Reason = 44
	NshSegments      Reason = 45
	NoFrontend       Reason = 46
	EgressDenied     Reason = 47
	NoSession        Reason = 48
	NoEgressAddress  Reason = 49
	GatewayDenied    Reason = 50
	GatewayFull      Reason = 51
	GatewayProtocol  Reason = 52
	NoService        Reason = 53
	NoBackend        Reason = 54
	ServiceProtocol  Reason = 55
	ExposedSource    Reason = 56
)

var reasons = [...]struct{ name, text string }{
	1:  {"not-ip6", "The frame has a VLAN tag, or is of a family of which the container has no address. Use one of the container's addresses."},
	2:  {"malformed", "A header is cut short, contradicts the packet's length, or follows a tag of VLAN 0. The sender builds broken packets."},
	3:  {"src-not-own", "The source is not an address of the endpoint on this device. A container may only use the addresses it was given. Towards its containers the node is its `prefix::1`."},
	4:  {"dst-not-private", "The destination lies outside the prefix that the tenant's containers can reach, and the tenant has no egress rules. See `pilaster egress set`."},
	5:  {"dst-undecryptable", "The destination decrypts to an address outside the base prefix: it was made up, or belongs to another tenant."},
	6:  {"to-node", "The packet is for a node that the tenant may not reach, and does not answer a packet of the container's own node. See `pilaster tenant set NAME --nodes allow`."},
	7:  {"tenant-mismatch", "Source and destination belong to different tenants."},
	8:  {"app-reserved", "The app in an address is in the reserved range 0xff00–0xffff, which no container has."},
	9:  {"no-endpoint", "No endpoint of the destination's node has this address: it was released, or never allocated."},
	10: {"routing-header", "A routing header, home-address option or IPv4 option could redirect the packet past the checks."},
	11: {"nd-forbidden", "Neighbour or router advertisements and redirects are not allowed on a container's link, which has static neighbours only."},
	12: {"nd-ignored", "A neighbour or router solicitation. Containers need only static entries. Harmless."},
	13: {"mld-ignored", "A multicast listener report. Containers have no multicast. Harmless."},
	14: {"multicast", "The destination is multicast. Containers have no multicast."},
	15: {"hop-limit", "The hop limit is exhausted. The node answers the container with *time exceeded*, as traceroute expects; Open vSwitch does not."},
	16: {"no-route", "The node has no route to the destination's node by its uplink: see `ip -6 route get`. On network nimitz: the destination is in no CIDR of the tenant, and no underlay service or client has it."},
	17: {"no-key", "The node has no cipher for the tenant id, because the agent is adding or removing the tenant. If it persists, see `pilaster status`."},
	18: {"own-source", "A packet from outside has a source inside this node's own /64. Check the source check of the fabric; `pilaster monitor` names the interface."},
	19: {"tenant-to-node", "A packet with a container's address is for an address of this machine that is not its node address, or for another host, or came by an interface other than the uplink."},
	20: {"host-claims-tenant", "The node's own stack sends with a container's address as source. A process on the node forges addresses."},
	21: {"icmp-quote", "An ICMP error quotes a packet of another conversation."},
	22: {"too-big", "A packet, or a segment of one, is longer than the MTU to the destination's node. The node answers the container with *packet too big*; Open vSwitch does not."},
	23: {"private-outside", "An address of the private prefix, valid only between containers and their node, was on an interface of the node or on its way there. A machine forges it, or the node sends to a container that is gone."},
	24: {"mac-outside", "A frame from the fabric is addressed to a container's MAC, which only this node knows. A machine guesses MACs."},
	25: {"no-program", "The program that decides about the packet was missing: the packet met the macvlan guard on the uplink, or its container's network has no program. The program was detached; restart the agent."},
	26: {"peer-unknown", "A VXLAN packet is not from the tunnel address of a node of this cluster, is not for this node's, or did not come by the uplink. A machine on the fabric forges it, or the nodes of a region are unknown here."},
	27: {"tunnel-forged", "VXLAN from or to a node's tunnel address leaves the node, or is for the node itself, but is not from the container network. A process on the node forges it."},
	28: {"later-fragment", "A fragment without a transport header needs its address translated, which Open vSwitch in user space would do wrongly. Let the sender make smaller packets, or use eBPF on the node."},
	29: {"untranslated", "A packet for the underlay has a source that is valid only between containers and their node. From a container: it has no virtual address at that gateway, because its tenant has no underlay service there and does not publish it. From the gateway: its translation table is missing or was changed; restart the agent."},
	30: {"foreign-unknown", "A VXLAN packet from another region's Edge Switch has a VNI, or a source, of no shared tenant. If the region's tenants changed, import it again; otherwise it forges."},
	31: {"connection-limit", "The container has the maximum number of connections to underlay services (4,096 at once). New ones are dropped until others end. Close connections, or reuse them."},
	32: {"policy-denied", "A policy denies the packet at its source or at its destination. The event names the policy and its rule; `pilaster why` explains it."},
	33: {"fragment-unknown", "A later fragment came without its first fragment, before it, or more than 30 s after it, so its connection is unknown; the container's tenant has policies. Let the sender make smaller packets."},
	34: {"session-limit", "The node's session table is full, and the new session may evict none: the container's tenant, or the container in its tenant, has at least half as many sessions as those it meets. `pilaster status` shows the container and the tenant with the most. Start the agent with a higher `--max-sessions`."},
	35: {"hop-options", "The packet has hop-by-hop options, which every router of the fabric would have to handle in software. Let the sender leave them out; BIG TCP's, which the kernel adds and removes, pass."},
	36: {"no-mapping", "Network ila: this node has no mapping of the address at the other end. The container there has gone or is just being made; if it persists, see `pilaster status`."},
	37: {"locator-mismatch", "Network ila: a packet did not come from the node where its sender is. A machine on the fabric forges it, or the sender moved a moment ago."},
	38: {"mac-mismatch", "Network evpn: a frame from a tunnel over IPv4 is neither for the MAC of this node's router nor, in the tenant's Ethernet segment, for that of the container. Its sender has an old route, or forges."},
	39: {"not-replicated", "In a tenant's Ethernet segment: a broadcast or multicast frame that is neither an ARP request nor a neighbour solicitation, or is one that no VTEP can answer. From a tunnel also a question about no container of this node, and an answer to none. Mostly harmless."},
	40: {"replication-limit", "Containers of the tenant ask for more unknown addresses of its Ethernet segment than the node replicates, which are 20 a second. A container scans the tenant's subnets, or a host that many use is gone."},
	41: {"nsh-malformed", "Load sharing: a message between a frontend and a backend has fields that this build does not know or that contradict each other. Builds of different versions, or a machine on the fabric forges."},
	42: {"nsh-unknown", "Load sharing: this node does not know the offload, or its rules. The offload has just begun or ended; if it persists, see `pilaster offload get`."},
	43: {"nsh-forged", "Load sharing: a message comes from a node that is no member of its offload, or goes to one in another role. A machine on the fabric forges it, or a frontend was removed a moment ago."},
	44: {"nsh-stale", "Load sharing: a message of an earlier activation of the offload. Harmless when it started again a moment ago; otherwise a machine on the fabric replays packets."},
	45: {"nsh-segments", "Load sharing: a packet of several UDP segments came in one piece, which the kernel does only between virtual devices. Turn tx-udp-segmentation off at the uplink of the frontend."},
	46: {"no-frontend", "Load sharing: the backend has no rules, and its offload has no frontend to ask. See `pilaster offload get`."},
	47: {"egress-denied", "Egress: no rule of the tenant allows the destination, or it is protected. The sender gets an ICMPv6 error. See `pilaster egress list`."},
	48: {"no-session", "Egress: a packet from outside the cluster belongs to no connection that a container opened."},
	49: {"no-egress-address", "Egress: the container has no egress address yet. It follows when its agent has the tenant's rules; if it persists, see the agent's log."},
	50: {"gateway-denied", "Egress: a packet in a tunnel between a node and an egress gateway does not fit the tenant's rules. They have just changed, or a machine on the fabric forges it."},
	51: {"gateway-full", "Egress: the gateway has no free port for a new connection of the tenant."},
	52: {"gateway-protocol", "Egress: gateways translate TCP, UDP and ICMPv6 echo, and no fragments."},
	53: {"no-service", "Services: the tenant has no service with this address, port and protocol. The sender gets an ICMPv6 error or a TCP reset. See `pilaster service list`."},
	54: {"no-backend", "Services: the service has no endpoint that can serve the packet. The sender gets an ICMPv6 error or a TCP reset. See `pilaster service describe`."},
	55: {"service-protocol", "Services: their addresses answer TCP and UDP on the ports of the service, and nothing else, such as ping."},
	56: {"exposed-source", "Exposed ports: a packet to one has a source in a prefix of the cluster. Containers use the address of the service; processes of nodes need an address of an uplink as their source."},
}
