// Package pipeline is NIMITZ's five-stage packet pipeline as data (NIMITZ §3.1, fig 5; NM2): stages, the entries of
// each stage, and Run, the reference implementation. It is pure: a switch renders the entries (eBPF maps, Open vSwitch
// flows), and its verdicts must equal those of Run.
//
//	Decap       which nodes encapsulated packets are accepted from
//	Register    which tenant a packet belongs to: the VNI register and the identity
//	NAT         between the tenants' addresses and the underlay's
//	Forwarding  to a container here, a node, the gateway, or drop
//	Encap       VXLAN to that node; it has no entries, for the forwarding entry names the node
//
// The number of entries is a sum: containers here, plus services, plus nodes (or remote containers, where a node has no
// CIDR). It is never a product of two of these numbers.
package pipeline
