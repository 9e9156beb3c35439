// Package trace puts together what the agents of several nodes say of one packet, and prints it. Package
// internal/agent/trace is what each agent says.
package trace
