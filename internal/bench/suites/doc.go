// Package suites has one benchmark for each of three topics: the cost of a packet as a node grows (scale), the number
// of entries of a NIMITZ node as the cluster grows (entries), and the time that Open vSwitch takes to delete entries
// (flow-delete).
package suites
