// Package routing_test changes the network behind a node's uplink while the node's agent is stopped: routers fail, get
// another MAC and are withdrawn, the link goes down and up, its MTU shrinks, and the default route comes from router
// advertisements. Meanwhile containers send numbered datagrams. The tests compare the times at which datagrams were
// lost with the time that the kernel and the packet path may take to react.
//
// One node is attached to a switch with two routers, which connect it to the rest of the lab:
//
//	n1 eth0 ── switch ─┬─ r1 ─┬─ router ── n2
//	                   └─ r2 ─┘
package routing_test

import (
	"testing"

	"pilaster.io/pilaster/internal/netns"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// retry is netns.Retry, but it ends the test instead of returning an error.
func retry(t *testing.T, call func() error) {
	t.Helper()
	must(t, netns.Retry(call))
}
