// Package suites has the benchmarks of a single question: what a packet costs as a node grows (scale), how many entries
// a NIMITZ node has as the cluster grows (entries), and how long Open vSwitch takes to delete entries (flow-delete).
package suites
