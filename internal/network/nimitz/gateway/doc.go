// Package gateway is a node's Gateway of network nimitz (NIMITZ §3.1, appendix A): the stack between the virtual
// addresses of containers and the underlay, which translates by connection, (c) from containers to services and (d)
// from clients to containers.
//
// The stack has a namespace of its own. It is a router, and Linux before 6.17 makes routers of all devices of a
// namespace or of none: the node's own, which may live by router advertisements, must not become one. So its rules and
// connections are apart from the node's too. Two devices join it:
//
//	switch ── pilgate0 ═ overlay │ the gateway │ underlay ═ pilgate1 ── uplink
//
// On the node's ends stand the switch, and a program that lets out only what has the gateway's addresses. All outlives
// the agent.
package gateway
