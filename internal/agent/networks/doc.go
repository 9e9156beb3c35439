// Package networks calls the networks of one node: one of them, those of an endpoint, or all. It keeps no state of
// tenants and endpoints, and decides nothing that package network leaves to a network.
package networks
