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
)

var reasons = [...]struct{ name, text string }{
	1:  {"not-ip6", "The frame is tagged, or not of a family that the container has an address of. Use one of the container's addresses."},
	2:  {"malformed", "A header is cut short, contradicts the packet's length, or hides behind a tag of VLAN 0. The sender builds broken packets."},
	3:  {"src-not-own", "The source is not an address of the endpoint on this device. A container may only use the address it was given; towards its containers the node is its `prefix::1`."},
	4:  {"dst-not-private", "The destination lies outside the prefix the tenant's containers can reach. There is no way to the outside yet."},
	5:  {"dst-undecryptable", "The destination decrypts to something outside the base prefix: it was made up, or belongs to another tenant."},
	6:  {"to-node", "The packet is for a node, and is no answer to what the node of the container began. Containers begin nothing towards nodes."},
	7:  {"tenant-mismatch", "Source and destination do not belong to one tenant."},
	8:  {"app-reserved", "The app of an address lies in 0xff00–0xffff, where no container is."},
	9:  {"no-endpoint", "No endpoint of the destination's node has this address: it was released, or never given out."},
	10: {"routing-header", "A routing header, home-address option or IPv4 option could lead the packet past the checks."},
	11: {"nd-forbidden", "Neighbour or router advertisements and redirects have no place on a container's link, which has static neighbours only."},
	12: {"nd-ignored", "A neighbour or router solicitation; everything a container needs is static. Harmless."},
	13: {"mld-ignored", "A multicast listener report; there is no multicast for containers. Harmless."},
	14: {"multicast", "The destination is multicast. Containers have no multicast."},
	15: {"hop-limit", "The hop limit is used up. The node says so to a container that sent it (time exceeded), as traceroute expects; Open vSwitch says nothing."},
	16: {"no-route", "The node has no route to the destination's node through its uplink: see `ip -6 route get`. On network nimitz: the destination is in no CIDR of the tenant, and no service or client has it."},
	17: {"no-key", "The node has no cipher context for the tenant id. The agent is adding or removing the tenant; if it stays, see `pilaster status`."},
	18: {"own-source", "A packet from outside claims a source inside this node's own /64. Check the source filters of the fabric; `pilaster monitor` names the interface."},
	19: {"tenant-to-node", "A container's address speaks to a node or another host, or came in by another interface than the uplink. Containers reach no nodes, and their packets come by the uplink alone."},
	20: {"host-claims-tenant", "The node's own stack sends with a container's address as source. A process on the node forges addresses."},
	21: {"icmp-quote", "An ICMP error quotes a packet that is not of the conversation it belongs to."},
	22: {"too-big", "A packet, or a segment of one, is longer than the MTU to the destination's node. The node says so to a container that sent it (packet too big), which then sends shorter ones; Open vSwitch says nothing."},
	23: {"private-outside", "An address of the private prefix, which only containers and their node see, was on an interface of the node or on its way there. Somebody forges it, or the node asks for a container that is gone."},
	24: {"mac-outside", "A frame from the fabric is addressed to a container's MAC, which is known on this node alone. Somebody guesses it."},
	25: {"no-program", "The program that judges the packet was not there: it met the guard of macvlans on the uplink, or its container's network has no program. It was detached; restart the agent."},
	26: {"peer-unknown", "A VXLAN packet is not from the tunnel address of a node of this cluster, not for this node's, or did not come by the uplink. Somebody on the fabric forges it, or a region's nodes are not known here."},
	27: {"tunnel-forged", "VXLAN from or to a node's tunnel address that the container network did not make leaves, or is for the node itself. A process on the node forges it."},
	28: {"later-fragment", "A fragment without the transport's header needs another address, which Open vSwitch in user space would spoil its data with. Let the sender make smaller packets, or the node use eBPF."},
	29: {"untranslated", "A packet for the underlay has a source that only containers and their node know. Of a container: it has no virtual address at that gateway, for it has no service there and is not published. Of the gateway itself: its table of translations is missing, or was changed by somebody; restart the agent."},
	30: {"foreign-unknown", "A VXLAN packet from another region's Edge Switch has a VNI, or a source, of no tenant that both regions share. Import that region again if its tenants have changed; else it forges."},
	31: {"connection-limit", "A container has as many connections to services as its node's gateway keeps for one (4,096 at once); new ones are dropped until others end. Let it end connections, or use one for more."},
	32: {"policy-denied", "A policy lets no such packet out of its source, or none into its destination. The event names the policy and its rule; `pilaster why` says what holds."},
	33: {"fragment-unknown", "A later fragment came without the first, before it, or half a minute after it, so that nothing says what connection it is of; the container's tenant has policies. Let the sender make smaller packets."},
	34: {"session-limit", "The container has as many sessions as are left free on the node, or the node has as many established ones of containers under policies as it keeps; those half open were given away first. See `pilaster status` for whose they are; start the agent with a higher --max-sessions."},
}
