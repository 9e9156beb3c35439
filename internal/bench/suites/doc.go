// Package suites has one benchmark for each of six topics: the cost of a packet as a node grows (scale), the number of
// entries of a NIMITZ node as the cluster grows (entries), the time that Open vSwitch takes to delete entries
// (flow-delete), RPS and RFS over VXLAN (steering), VXLAN overlays with and without a cache (oncache), and containers
// that talk to hosts outside of the cluster (egress).
package suites
