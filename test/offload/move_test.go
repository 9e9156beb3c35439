package offload_test

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// maxLost is how many datagrams a move may lose, at 1,000 a second: 10 ms (NZ12).
const maxLost = 10

// TestMove: an offloaded container moves to a node that is no member of the offload, to a frontend, and back to the
// backend. Its connections stay, and its rules apply (Nezha §7.2).
func TestMove(t *testing.T) {
	s := spec()
	s.Nodes = append(s.Nodes, "n7")
	s.Tenants[0].NoNodeCIDRs = true
	s.Containers[0].AddressKey = "hot-0"
	s.Containers = append(s.Containers, lab.Container{
		Name: "beside", Node: "n1", Tenant: "green", Labels: map[string]string{"app": "web"},
	})
	b := newBedOf(t, s, 20)
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	open := b.connect(20)
	streams := []*stream{b.stream(ctx, far, hot, 1000), b.stream(ctx, hot, near, 200), b.stream(ctx, near, hot, 200)}
	b.start("n2", "n3", "n4", "n5")
	b.await(pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE)
	open.echo(b, "active")
	b.closed("active")
	for _, to := range []string{"n7", "n3", "n1"} {
		moved, err := b.Move(ctx, hot, to)
		must(t, err)
		open.echo(b, "on "+to)
		b.closed("on " + to)
		t.Logf("to %s: %+v", to, moved)
		if moved.Left != 0 || moved.Sessions < len(open) {
			t.Errorf("to %s: %d sessions copied, %d left", to, moved.Sessions, moved.Left)
		}
		if phase := b.phase(); phase != pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE {
			t.Errorf("on %s the offload is in phase %v", to, phase)
		}
	}
	cancel()
	for i, s := range streams {
		b.finishWith(s, 3*[]int{maxLost, maxLost / 5, maxLost / 5}[i])
	}
}

// closed: a port that no rule allows is closed.
func (b *bed) closed(when string) {
	b.Helper()
	address, err := b.Address(hot)
	must(b.T, err)
	must(b.T, <-labtest.RunIn(b.T, b.Lab, far, func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(address, 81).String(), 300*time.Millisecond)
		if err == nil {
			c.Close()
			b.Errorf("%s: port 81 is open", when)
		} else if e, ok := err.(net.Error); !ok || !e.Timeout() {
			b.Errorf("%s: port 81: %v, want a timeout", when, err)
		}
		return nil
	}))
}
