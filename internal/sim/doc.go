// Package sim runs one orchestrator and very many agents in a single process and counts their messages (NETPILA §7.1,
// NIMITZ §4.1).
//
// The orchestrator is real, with etcd on a disk, its handlers and the encoding of messages. Of each agent, the core,
// the link to the orchestrator and the address allocation are real. This package simulates the rest: connections
// without TLS and sockets (fabric), packet paths that only count (driver), and in-memory disks of agents (disk). All
// nodes share one machine's clock and processors. docs/reference/simulation.md explains the consequences.
package sim
