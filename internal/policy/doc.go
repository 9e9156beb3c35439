// Package policy reads network policies and compiles them into the tables by which a node enforces them. It is pure: no
// I/O, no clock, no kernel.
//
// Policies are Kubernetes documents: NetworkPolicy (networking.k8s.io/v1) and ClusterNetworkPolicy
// (policy.networking.k8s.io/v1alpha2). Parse reads them strictly into the model (model.go), which does not depend on
// Kubernetes types.
//
// A policy selects by labels alone. A container's labels determine its app (package tenant), and every packet carries
// the app in its address, so that no rule needs to know where a container runs. Compile makes the tables for the apps
// on one node; policies that select none of them are not in the tables. Decide looks a packet up as the eBPF program
// does: in a number of lookups that does not depend on the number of rules.
//
// In one direction of one subject, the first of these steps that yields Accept or Deny decides:
//
//   - the tier Admin: the first matching rule by priority, then name, then order in the policy; Pass goes to the next
//     step;
//   - NetworkPolicies, if one isolates the subject: Accept if a rule of any of them matches, else Deny;
//   - the tier Baseline, like Admin;
//   - otherwise Accept.
//
// Until a node receives the labels of a peer's app, of the allow rules only those that match all peers apply to the
// peer. Every deny rule that could match applies (fail closed).
//
// A connection needs egress at its source and ingress at its destination. The datapath accepts replies by its sessions,
// without these tables.
package policy
