// Package cache holds the records of the store in memory and sends updates of them to the nodes.
//
// One watch of the store feeds the cache (Apply). Each stream of a node is a Subscriber: it starts with a snapshot, or
// with the events after the revision that the node has, and then receives an update for every event that concerns its
// node: the record of the node, and the tenants that it hosts or needs as transit tenants. The cache is where RPCs
// read; they write to the store and wait until the cache has the revision of their change.
package cache
