// Package announce announces the external and load-balancer addresses of services to BGP peers, with nodes that host
// the service's tenant as next hops. It probes the kernels of these nodes: one that does not answer is withdrawn, one
// whose agent is dead is not.
//
// Each orchestrator of a cluster announces and probes on its own, so a peer with sessions to several of them loses no
// route when one ends.
package announce
