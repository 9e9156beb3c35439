// Package policies keeps the policies of the tenants on a node, on disk and in memory, compiles them for the node's
// containers, and installs them in the packet path. Package policy compiles one tenant; package agent calls the manager
// when endpoints, apps or ids change.
package policies
