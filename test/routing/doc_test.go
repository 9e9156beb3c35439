// Package routing_test changes what lies behind a node's uplink while its agent is dead: routers die, move
// and are withdrawn, the link goes down and up, its MTU shrinks, the default route comes from router
// advertisements. Containers send numbered datagrams all the while; which were lost, and when they were
// sent, is held against what the kernel and the packet path may take to notice.
//
// One node hangs on a switch with two routers behind which the rest of the lab is:
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

// retry is netns.Retry, with the end of the test in place of an error.
func retry(t *testing.T, call func() error) {
	t.Helper()
	must(t, netns.Retry(call))
}
