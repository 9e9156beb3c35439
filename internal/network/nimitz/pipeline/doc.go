// Package pipeline is NIMITZ's five-stage packet pipeline as data (NIMITZ §3.1, fig 5; NM2): stages, the entries that
// each may have, and Run, which says what becomes of a packet. It is pure: a switch renders the entries (eBPF maps,
// Open vSwitch flows), and whatever it does must be what Run says.
//
//	Decap       whom encapsulated packets are taken from
//	Register    whose a packet is: the VNI register and the identity
//	NAT         between the tenants' addresses and the underlay's
//	Forwarding  to a container here, a node, the gateway or nobody
//	Encap       VXLAN to that node; it has no entries, for the forwarding entry names the node
//
// Entries are as many as containers here, plus services, plus nodes (or remote containers, where a node has no CIDR);
// never a product of two.
package pipeline
