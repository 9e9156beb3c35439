// Package evpnroutes connects the orchestrator with BGP peers for network evpn: it announces the containers and nodes
// of the tenants that have it, as the cache has them, and imports the routes that the configuration permits.
//
// What it announces follows from the store alone. So all orchestrators of a cluster announce the same routes.
package evpnroutes
