// Package join is how a node becomes and stays a member of a cluster: it reads the join token,
// buys a certificate bound to the node's name and UUID, keeps it on disk, renews it, and makes
// the client that every other call to the orchestrator goes through.
//
// The token pins the cluster's certificate authority, so the first connection already knows whom
// it speaks to. Nothing here decides what a node may do; see package orchestrator for that.
package join
