// Package speaker exchanges EVPN routes with BGP peers, by GoBGP in this process. It announces the routes that it is
// given, and keeps what peers announce in a table of package evpn.
//
// GoBGP's own table has only the announced routes: its import policy rejects those of peers, and this package receives
// them from its events. So GoBGP selects nothing, changes no mobility sequence because of a peer's routes, and sends no
// peer's routes to another peer.
//
// GoBGP keeps every received route, rejected or not, until the session ends. Its own prefix limit counts them all at
// each message, which takes quadratic time. So this package counts, per peer, routes and the bytes of their attributes.
// A peer above a limit is shut down alone, and started again after a time.
package speaker
