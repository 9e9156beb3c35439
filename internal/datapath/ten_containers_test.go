package datapath

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestTenContainers: each container reaches only those of its tenant. While they send, a node's agent starts several
// times and replaces the programs on their devices, and no packet is lost. Only the container whose program is detached
// is cut off.
func TestTenContainers(t *testing.T) {
	w := newWire(t)
	byTenant := map[string][]*testContainer{}
	of := map[*testNode][]*testContainer{}
	for _, n := range w.nodes {
		for _, its := range []tenant.Tenant{blue, blue, blue, red, red} {
			c := n.add(t, its, 1)
			byTenant[its.Name] = append(byTenant[its.Name], c)
			of[n] = append(of[n], c)
		}
	}
	for name, own := range byTenant {
		for i, from := range own {
			for _, to := range own[i+1:] {
				mustReach(t, from, to, name)
			}
		}
	}
	for _, from := range byTenant["blue"] {
		to := byTenant["red"][from.record.ID%4]
		if r := from.ping(t, to.seen(), 56, impatience); r.Received != 0 {
			t.Errorf("blue %v reached red %v", from.plain(), to.plain())
		}
	}

	n := w.nodes[0]
	var pairs [][2]*testContainer
	for _, own := range byTenant {
		for k, from := range own {
			pairs = append(
				pairs,
				[2]*testContainer{from, own[(k+1)%len(own)]},
			) // each receives too, two of each tenant across nodes
		}
	}
	losesNothing(t, pairs, 5*time.Millisecond, func() {
		for range 2 {
			n.reopen(t, n.datapath.config)
			must(t, n.datapath.putTenant(blue))
			must(t, n.datapath.putTenant(red))
			n.restore(t, of[n]...)
		}
	})

	if joined != paired {
		return // a macvlan has no program of its own
	}
	cut, still, far := of[n][0], of[n][1], of[w.nodes[1]][0]
	must(t, n.detachContainer(cut.record))
	onNode, err := packet.NewCapture(n.ns, cut.record.Device.HostName)
	must(t, err)
	defer onNode.Close()
	for _, to := range []*testContainer{still, far} {
		if r := cut.ping(t, to.seen(), 56, impatience); r.Received != 0 {
			t.Errorf("without its program it reached %v", to.plain())
		}
	}
	hostLink, err := packet.NewInjector(n.ns, cut.record.Device.HostName)
	must(t, err)
	defer hostLink.Close()
	seen := sentinelAfter(
		t,
		onNode,
		func(s packet.Sentinel) {
			must(t, hostLink.Send(packet.Frame(host.ContainerMAC, host.GatewayMAC, 0x88b5, s[:])))
		},
	)
	if joined == endpoint.Netkit && len(seen) > 1 { // behind a veth, the stack drops the packets
		t.Errorf("without a program the device passes on %x", seen[0].Frame)
	}
	mustReach(t, still, far, "beside one without a program")
}

// losesNothing sends packets from the first to the second container of each pair during the starts, and fails if one
// has no answer.
func losesNothing(t *testing.T, pairs [][2]*testContainer, interval time.Duration, starts func()) {
	t.Helper()
	var group sync.WaitGroup
	results := make([]packet.PingResult, len(pairs))
	sending, stop := context.WithCancel(t.Context())
	defer group.Wait()
	defer stop()
	for i, pair := range pairs {
		group.Go(func() {
			var err error
			results[i], err = packet.Ping(
				sending,
				pair[0].ns,
				pair[1].seen(),
				packet.PingOptions{Count: 1 << 15, Interval: interval, Timeout: patience},
			)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("it ended before the starts: %v", err)
			}
		})
	}
	starts()
	stop()
	group.Wait()
	for _, r := range results {
		if r.Received != r.Sent || r.Sent < 10 {
			t.Errorf("%d of %d answered while agents were started", r.Received, r.Sent)
		}
	}
}
