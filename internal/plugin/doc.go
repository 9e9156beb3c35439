// Package plugin is all that a container runtime starts for each verb of CNI: it passes the environment
// and the configuration to the agent of the node and prints what that answers. It imports hardly more than
// syscall, because starting costs more than running: package cni, in the agent, does the rest.
package plugin
