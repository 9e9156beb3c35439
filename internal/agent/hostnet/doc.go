// Package hostnet observes the node's own network: addresses and routes that overlap the cluster's prefixes, the
// addresses of the uplink, and changes of devices. It changes nothing.
package hostnet
