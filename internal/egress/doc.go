// Package egress allocates the addresses at which hosts outside of the cluster see the containers of a node, and
// records which container had which address when. It does not know packets: networks and the agent give the addresses
// to containers.
package egress
