// Package agentprobe has one real agent follow the orchestrator of a simulated cluster that grows, and measures what
// that costs the agent (NETPILA §7.1).
//
// The agent is the real one in a lab of its own, with containers and a packet path in the kernel; it joins by TLS. The
// nodes that grow in number are package sim's. docs/reference/simulation.md says how the result is judged.
package agentprobe
