// Package policytest generates policy cases and compares the results with an independent implementation: the matcher of
// cyclonus (github.com/mattfenwick/cyclonus), a conformance suite for NetworkPolicies. Only tests import it, because it
// depends on a Kubernetes client.
//
// It makes no case in which cyclonus differs from Kubernetes: in cyclonus, NotIn does not match if the label is
// missing, and ClusterNetworkPolicies do not exist.
package policytest
