// Package egressmap makes the kernel's maps hold what containers reach outside of the cluster: egress rules, protected
// prefixes and nodes of each tenant, egress addresses of containers, and the tenants that this node is an egress
// gateway of.
package egressmap
