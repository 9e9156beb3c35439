// Package agent is the core of a node's agent: it adds, keeps and removes the node's endpoints, and keeps the state of
// the tenants that they belong to. It is not on the packet path: it writes its decisions through a Driver, and packets
// flow without it. Package policies enforces the tenants' policies, package networks calls the node's networks, package
// control is the client of the orchestrator, package api serves the CNI plugin and operators, and package daemon starts
// all of them.
package agent
