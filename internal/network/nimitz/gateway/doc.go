// Package gateway is a node's Gateway of network nimitz (NIMITZ §3.1, appendix A): a network stack between the virtual
// addresses of containers and the underlay. It translates connections, (c) from containers to services and (d) from
// clients to containers.
//
// The stack has a network namespace of its own. It must forward, and Linux before 6.17 can enable forwarding only for
// all devices of a namespace. The node's own namespace must not become a router, because it may depend on router
// advertisements. So the gateway's rules and conntrack entries are separate from the node's, too. Two pairs of devices
// connect it:
//
//	switch ── pilgate0 ═ overlay │ the gateway │ underlay ═ pilgate1 ── uplink
//
// The first pair leads to the switch. On the node's side of the second pair, a program lets out only packets from the
// gateway's addresses. The namespace, its devices and its rules stay when the agent ends.
package gateway
