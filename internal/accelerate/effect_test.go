package accelerate_test

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/netns"
)

// datagrams is a flow of echoed datagrams, one every few milliseconds.
type datagrams struct {
	mu   sync.Mutex
	last time.Time // when the sender received the last echo
	stop chan struct{}
	done sync.WaitGroup
}

func flow(t *testing.T, from, to *netns.Namespace) *datagrams {
	t.Helper()
	at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(address(t, to), 7001))
	server := inside(t, to, func() (*net.UDPConn, error) { return net.ListenUDP("udp", at) })
	client := inside(t, from, func() (*net.UDPConn, error) { return net.DialUDP("udp", nil, at) })
	d := &datagrams{stop: make(chan struct{})}
	d.done.Go(func() {
		b := make([]byte, 9)
		for {
			n, peer, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = server.WriteToUDPAddrPort(b[:n], peer) // as all datagrams, it may be lost
		}
	})
	d.done.Go(func() {
		b := make([]byte, 9)
		for {
			if _, err := client.Read(b); err == nil {
				d.mu.Lock()
				d.last = time.Now()
				d.mu.Unlock()
			} else if isClosed(d.stop) {
				return
			}
		}
	})
	d.done.Go(func() {
		for !isClosed(d.stop) {
			_, _ = client.Write([]byte("datagram")) // refused while the rule is REJECT
			time.Sleep(2 * time.Millisecond)
		}
		client.Close()
		server.Close()
	})
	t.Cleanup(func() { close(d.stop); d.done.Wait() })
	return d
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// silentAfter waits until no echo has arrived for a second, and returns how long after start the last one arrived.
func (d *datagrams) silentAfter(t *testing.T, start time.Time) time.Duration {
	t.Helper()
	for {
		d.mu.Lock()
		last := d.last
		d.mu.Unlock()
		if time.Since(last) > time.Second {
			return last.Sub(start)
		}
		if time.Since(start) > 20*time.Second {
			t.Fatal("the flow goes on")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A rule that drops a cached flow takes effect at once if it has an event, and within the validity otherwise. After it
// is deleted the flow goes on.
func TestDropsTakeEffect(t *testing.T) {
	t.Parallel()
	both := flannel(t)
	n := both[0]
	d := n.accelerate(t)
	f := flow(t, n.only(), both[1].only())
	for program, most := range map[string]time.Duration{
		"iptables-nft":    500 * time.Millisecond, // far less than the validity
		"iptables-legacy": accelerate.MaxValidity + 500*time.Millisecond,
	} {
		before := d.until(t, "hits", func(s accelerate.Status) bool {
			return s.Egress.Hits > 0 && s.Entries.Flows == 1
		})
		d.until(t, "more hits", func(s accelerate.Status) bool { return s.Egress.Hits > before.Egress.Hits+20 })
		const rule = "FORWARD -p udp --dport 7001 -j DROP"
		ip(t, n.ns, "! %s -w -A %s", program, rule)
		after := f.silentAfter(t, time.Now())
		t.Logf("%s: the last packet was delivered after %v", program, after)
		if after > most {
			t.Errorf("%s: a packet was delivered %v after the rule, want at most %v", program, after, most)
		}
		ip(t, n.ns, "! %s -w -D %s", program, rule)
		s, err := d.Status(t.Context())
		must(t, err)
		d.until(t, "the flow again", func(now accelerate.Status) bool { return now.Egress.Hits > s.Egress.Hits+20 })
	}
}

// A bridge that does not know a container's port floods its packets to all ports. The cache, which then learns another
// port, delivers them to the container again as soon as the bridge knows the port.
func TestFlooded(t *testing.T) {
	both := flannel(t)
	n := both[1]
	server := n.add(t, "veth7", 7) // bridges flood to the port of veth1 last
	d := n.accelerate(t)
	f := flow(t, both[0].only(), server)
	for i := range 5 {
		before := d.until(t, "hits", func(s accelerate.Status) bool { return s.Ingress.Hits > 0 })
		d.until(t, "more hits", func(s accelerate.Status) bool { return s.Ingress.Hits > before.Ingress.Hits+20 })
		ip(t, n.ns, "link set cni0 type bridge fdb_flush")
		flushed := time.Now()
		for arrived := false; !arrived; time.Sleep(10 * time.Millisecond) {
			f.mu.Lock()
			arrived = f.last.Sub(flushed) > 100*time.Millisecond
			f.mu.Unlock()
			if time.Since(flushed) > accelerate.MaxValidity/2 {
				t.Fatalf("flush %d: no datagram has arrived since", i)
			}
		}
	}
}
