// Package agent is one node's agent: it keeps the endpoints of this node, follows the tenants
// that live here, and serves the CNI plugin and people on a unix socket. It is never on the
// packet path: what it decides it writes through a Driver, and packets go on without it.
package agent
