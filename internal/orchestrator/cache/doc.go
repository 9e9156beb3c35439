// Package cache holds the records of the store in memory and sends updates of them to the nodes.
//
// One watch of the store feeds the cache (Apply). Each stream of a node is a Subscriber. It starts with a snapshot, or
// with the events after the revision that the node has. Then it receives an update for each event that concerns its
// node: the record of the node, and the tenants that the node hosts or needs as transit tenants. RPCs read from the
// cache. They write to the store, and wait until the cache has the revision of their change.
package cache
