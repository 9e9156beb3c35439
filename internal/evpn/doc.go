// Package evpn has the control plane of network evpn without its transport: the EVPN routes of Pilaster's nodes and
// containers (RFC 7432, 8365, 9135, 9136), the rules by which routes of other speakers are imported, and a table that
// turns imported routes into records for nodes.
//
// It does no I/O and reads no clock, and it starts no goroutine: the same routes and rules give the same records, in
// whatever order they arrive. So all orchestrators of a cluster announce and import the same. Package speaker exchanges
// the routes with BGP peers.
//
// Multihoming (Ethernet segments), overlay indexes of prefix routes, and route types other than 2, 3 and 5 are not
// supported; such routes are refused and counted.
package evpn
