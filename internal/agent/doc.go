// Package agent is the agent of one node: it manages the node's endpoints, follows the tenants hosted here, and serves
// the CNI plugin and operators on a unix socket. It is not on the packet path: it writes its decisions through a
// Driver, and packets flow without it.
package agent
