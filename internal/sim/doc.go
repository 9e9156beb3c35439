// Package sim runs one orchestrator and very many agents in a single process and counts their messages (NETPILA §7.1,
// NIMITZ §4.1).
//
// The orchestrator is the real one, with etcd on a disk; so are its handlers, the encoding of messages, and of each
// agent the core, the link to the orchestrator and the allocation of addresses. The rest is simulated in this package:
// the connection between them has no TLS and no sockets (fabric), packet paths only count (driver), the disks of agents
// are in memory (disk), and all share one machine's clock and processors. docs/reference/simulation.md explains the
// consequences.
package sim
