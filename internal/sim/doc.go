// Package sim runs one orchestrator and very many agents in a single process and counts what they say to each other
// (NETPILA §7.1, NIMITZ §4.1).
//
// The orchestrator is the real one, with its etcd and that's disk; so are its handlers, the encoding of messages, and
// of each agent the core, the link to the orchestrator and the drawing of addresses. What is not real is in this
// package: the way between them has no TLS and no sockets (fabric), packet paths only count (driver), the disks of
// agents are in memory (disk), and all share one machine's clock and processors. docs/reference/simulation.md says what
// follows from that.
package sim
