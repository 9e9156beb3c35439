// Package orchestrator hands out what must be unique in a cluster (node prefixes, tenant ids and
// keys, apps) and tells each agent what concerns it: its own node and the tenants it hosts.
//
// What is handed out is decided in package store, by transactions. One watch of the store feeds a
// Cache in memory, and the model feeds the agents' streams, so the changes of every
// orchestrator on the same store reach all of them. Which agents are connected is known in
// memory only.
//
// Containers keep running, and start, without an orchestrator: it is needed for a tenant or a
// label set that a node has not seen before (NETPILA §6.1).
package orchestrator
