// Package orchestrator is the server that allocates what must be unique in a cluster (node prefixes, tenant ids and
// keys, apps) and sends each agent the state it needs: its own node and the tenants it hosts.
//
// Package store allocates, in transactions. One watch of the store feeds package cache, which feeds the agents'
// streams, so changes made by any orchestrator on the same store reach all agents. Package rpc has the calls, package
// admission the limits.
//
// Containers start and run without an orchestrator. A node needs one for a tenant or a label set that it has not seen
// before (NETPILA §6.1).
package orchestrator
