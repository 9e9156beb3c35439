// Package trace answers what this node does with a packet: from its tables, without a packet (Tracer.Trace), and from
// the programs, while a packet passes them (Tracer.Follow). The entries are those in the kernel or the switch, not in
// the agent's memory. Package internal/trace puts the parts of several nodes together.
package trace
