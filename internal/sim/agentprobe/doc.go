// Package agentprobe lets one real agent follow the orchestrator of a growing simulated cluster, and measures the cost
// for the agent (NETPILA §7.1).
//
// The agent is the real one in a lab of its own, with containers and a packet path in the kernel; it joins by TLS. The
// other nodes are package sim's. docs/reference/simulation.md explains the limits.
package agentprobe
