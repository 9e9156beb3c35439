// Package join makes a node a member of a cluster: it reads the join token, gets a certificate with the node's name and
// UUID, stores it on disk and renews it. Its Client makes all calls of a node to the orchestrator.
//
// The token contains the hash of the cluster's certificate authority, so the node authenticates the orchestrator on the
// first connection. What a node may do is decided in package orchestrator/admission.
package join
