// Package policy reads network policies and compiles them to the tables by which a node's packet path decides. It is
// pure: no I/O, no clock, no kernel.
//
// Policies are documents of Kubernetes: NetworkPolicy (networking.k8s.io/v1) and ClusterNetworkPolicy
// (policy.networking.k8s.io/v1alpha2). Parse reads them strictly into the model (model.go), which knows no Kubernetes.
//
// Whom a policy selects follows from labels alone. They make a container's app (package tenant), which every packet
// says, so no rule needs to know where a container is. Compile makes the tables of the apps that are on one node; those
// of a policy that selects none of them are not in it. Decide looks a packet up as the kernel is to: in a number of
// lookups that does not depend on the number of rules.
//
// In one direction of one subject, the first of these decides:
//
//   - the tier Admin, by priority, then name, then order of rules: Accept or Deny ends it, Pass goes to the next tier;
//   - NetworkPolicies, if one isolates the subject: Accept if a rule of any of them matches, else Deny;
//   - the tier Baseline, as Admin;
//   - else Accept.
//
// A peer whose labels are not known yet is selected by what selects everyone, and by nothing else that accepts; what
// denies, and might select it, does.
//
// A connection needs egress of its source and ingress of its destination. That replies pass is the packet path's to
// know.
package policy
