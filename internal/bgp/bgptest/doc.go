// Package bgptest has BGP peers for tests: FRR's daemons, and a peer that sends what a test writes. Both run in network
// namespaces of the test.
package bgptest
