// Package policytest makes cases of policy and has them judged by an implementation that is not ours: the matcher of
// cyclonus (github.com/mattfenwick/cyclonus), a suite for conformance of NetworkPolicies. Tests alone import it, for it
// brings a client of Kubernetes along.
//
// Where cyclonus is not as Kubernetes, no case is made: it has NotIn not match where the label is missing, and knows no
// ClusterNetworkPolicies.
package policytest
