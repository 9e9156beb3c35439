// Package agentprobe connects one real agent to the orchestrator of a growing simulated cluster, and measures the cost
// for the agent (NETPILA §7.1).
//
// The agent is real: it runs in a separate lab, with containers and a packet path in the kernel, and connects by TLS.
// Package sim simulates the other nodes. docs/reference/simulation.md explains the limits.
package agentprobe
