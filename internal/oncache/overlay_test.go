package oncache

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/packet"
)

// established accepts connections from the node's container, and what belongs to them.
var established = []string{
	"-P FORWARD DROP",
	"-A FORWARD -m conntrack --ctstate INVALID -j DROP",
	"-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
}

func families(t *testing.T, test func(t *testing.T, inner4, outer4 bool)) {
	for _, inner4 := range []bool{false, true} {
		for _, outer4 := range []bool{false, true} {
			t.Run(world{inner4: inner4, outer4: outer4}.String(), func(t *testing.T) { test(t, inner4, outer4) })
		}
	}
}

// Packets of an established flow bypass the overlay, and the container gets them as it gets those of the overlay.
func TestOverKernelOverlay(t *testing.T) {
	families(t, func(t *testing.T, inner4, outer4 bool) {
		const invalid = "-A FORWARD -m conntrack --ctstate INVALID -j DROP"
		for name, open := range map[string]func(*testing.T) *lab{
			"no conntrack": func(t *testing.T) *lab { return newLab(t, outer4) },
			"conntrack":    func(t *testing.T) *lab { return newLab(t, outer4, invalid) },
			"bridged":      func(t *testing.T) *lab { return newBridgedLab(t, outer4) },
		} {
			t.Run(name, func(t *testing.T) {
				l := open(t)
				if c := l.a.config; c.Tracks != (name == "conntrack") || c.Bridged != (name == "bridged") {
					t.Fatalf("got %+v", c)
				}
				l.sameAsOverlay(t, inner4)
			})
		}
	})
}

func (l *lab) sameAsOverlay(t *testing.T, inner4 bool) {
	t.Helper()
	l.renewed(t)
	a, b := l.a.listen(t, inner4, 4000), l.b.listen(t, inner4, 5000)
	tap, err := packet.NewCapture(l.b.container, "eth0", packet.IncomingOnly)
	must(t, err)
	defer tap.Close()
	first := sentTo(t, tap, a, b)
	talk(t, a, b, 5)
	outA, inA := l.a.hits(t)
	outB, inB := l.b.hits(t)
	talk(t, a, b, 20)
	for _, n := range []struct {
		*node
		out, in uint64
	}{{l.a, outA, inA}, {l.b, outB, inB}} {
		if out, in := n.hits(t); out-n.out != 20 || in-n.in != 20 {
			s, err := n.Stats()
			t.Errorf("node %d: %d hits out, %d in, want 20: %+v %v", n.number, out-n.out, in-n.in, s, err)
		}
	}
	if later := sentTo(t, tap, a, b); !bytes.Equal(first, later) {
		t.Errorf("the overlay delivers\n% x\nthe cache\n% x", first, later)
	}
}

// sentTo sends a datagram and returns the frame that arrives at the container.
func sentTo(t *testing.T, tap *packet.Capture, from, to *net.UDPConn) []byte {
	t.Helper()
	const payload = "the same datagram each time"
	if !send(t, from, to, payload, long) {
		t.Fatal("the datagram is lost")
	}
	frames, err := tap.Until(t.Context(), func(c packet.Captured) bool {
		return bytes.Contains(c.Frame, []byte(payload))
	})
	must(t, err)
	frame := frames[len(frames)-1].Frame
	if frame[12] == 8 { // the container counts IPv4 ids: without this one, and with a checksum that is right
		if headerSum(frame[14:34]) != 0 {
			t.Errorf("header checksum: % x", frame[14:34])
		}
		copy(frame[18:], []byte{0, 0})
		copy(frame[24:], []byte{0, 0})
	}
	return frame
}

// A reply to nothing is dropped as without the cache, also beside a flow in the cache.
func TestUnsolicitedReply(t *testing.T) {
	for _, inner4 := range []bool{false, true} {
		l := newLab(t, true, established...)
		for _, command := range []string{"iptables", "ip6tables"} {
			l.a.iptables(t, command, "-A FORWARD -i container -j ACCEPT")
			l.b.iptables(t, command, "-P FORWARD ACCEPT")
		}
		l.renewed(t)
		a, b, other := l.a.listen(t, inner4, 4000), l.b.listen(t, inner4, 5000), l.b.listen(t, inner4, 5001)
		if send(t, b, a, "unsolicited", short) {
			t.Error("an unsolicited packet arrived")
		}
		talk(t, a, b, 20)
		if out, in := l.a.hits(t); out == 0 || in == 0 {
			t.Errorf("%d hits out, %d in", out, in)
		}
		if send(t, other, a, "unsolicited", short) {
			t.Error("an unsolicited packet arrived beside a flow in the cache")
		}
		s, err := l.a.Stats()
		must(t, err)
		if s.In.NotLearnt["unreplied"]+s.In.Misses["unknown"] == 0 {
			t.Errorf("got %+v", s.In)
		}
	}
}

// service is an address that the client's node translates to the server.
const service = "-t nat -A PREROUTING -d 10.9.9.9 -p tcp --dport 80 -j DNAT --to-destination 10.1.2.1:7000"

// serve echoes what each connection sends, with the address of the client behind it.
func (n *node) serve(t *testing.T) {
	var listener net.Listener
	must(t, n.container.Do(func() (err error) {
		listener, err = net.Listen("tcp", "10.1.2.1:7000")
		return err
	}))
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
}

// dial connects from a port of the container.
func (n *node) dial(t *testing.T, from int, to string) net.Conn {
	t.Helper()
	var c net.Conn
	d := net.Dialer{
		Timeout: long, LocalAddr: &net.TCPAddr{IP: n.inner4.AsSlice(), Port: from},
		Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if failed := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			}); failed != nil {
				return failed
			}
			return err
		},
	}
	must(t, n.container.Do(func() (err error) { c, err = d.Dial("tcp", to); return err }))
	t.Cleanup(func() { c.Close() })
	must(t, c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

// echo sends bytes and expects them back.
func echo(t *testing.T, c net.Conn, sent []byte) {
	t.Helper()
	go c.Write(sent)
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("the echo differs: %v", err)
	}
}

// A flow that conntrack translates is never learnt, nor is a direct one from the same port, whichever is first.
func TestTranslatedFlows(t *testing.T) {
	const direct, translated = "10.1.2.1:7000", "10.9.9.9:80"
	for name, order := range map[string][]string{
		"service": {translated}, "service, then direct": {translated, direct},
		"direct, then service": {direct, translated},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, true, "-A FORWARD -m conntrack --ctstate INVALID -j DROP")
			l.a.iptables(t, "iptables", service)
			l.renewed(t)
			l.b.serve(t)
			var open []net.Conn
			for _, to := range order {
				open = append(open, l.a.dial(t, 4000, to))
			}
			for i := range 20 {
				for k, c := range open {
					echo(t, c, fmt.Appendf(nil, "%d of %s", i, order[k]))
				}
			}
			s, err := l.a.Stats()
			must(t, err)
			if name == "direct, then service" { // only the direct one is not translated
				if s.Flows != 1 || s.Out.Hits == 0 {
					t.Errorf("got %+v", s)
				}
			} else if s.Flows != 0 || s.Out.Hits+s.In.Hits != 0 ||
				s.In.NotLearnt["nat"]+s.In.NotLearnt["untracked"] == 0 {
				t.Errorf("got %+v", s)
			}
		})
	}
}

// Without a lease all packets pass the overlay.
func TestLeaseEnds(t *testing.T) {
	l := newLab(t, true)
	a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
	talk(t, a, b, 5)
	if out, in := l.a.hits(t); out == 0 || in == 0 {
		t.Fatalf("%d hits out, %d in", out, in)
	}
	outBefore, inBefore := l.a.hits(t)
	for deadline := time.Now().Add(LeaseTime + long); ; {
		if time.Now().After(deadline) {
			t.Fatal("the lease does not end")
		}
		talk(t, a, b, 1)
		out, in := l.a.hits(t)
		if out == outBefore && in == inBefore {
			break
		}
		outBefore, inBefore = out, in
	}
	talk(t, a, b, 5)
	if out, in := l.a.hits(t); out != outBefore || in != inBefore {
		t.Errorf("%d hits out, %d in without a lease", out-outBefore, in-inBefore)
	}
	must(t, l.a.Renew())
	must(t, l.b.Renew())
	s, err := l.a.Stats()
	must(t, err)
	talk(t, a, b, 1)
	after, err := l.a.Stats()
	must(t, err)
	if after.Out.Hits != s.Out.Hits || after.Out.Misses["void"] == s.Out.Misses["void"] {
		t.Error("a new lease did not void the cache")
	}
}

// Pause, evict, apply, resume: nothing is learnt before Resume, and other flows stay in the cache.
func TestPauseEvictResume(t *testing.T) {
	l := newLab(t, true)
	l.renewed(t)
	a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
	a6, b6 := l.a.listen(t, false, 4000), l.b.listen(t, false, 5000)
	hits := func(a, b *net.UDPConn) uint64 {
		before, _ := l.a.hits(t)
		talk(t, a, b, 5)
		after, _ := l.a.hits(t)
		return after - before
	}
	hits(a, b)
	hits(a6, b6)
	must(t, l.a.Pause())
	if n := hits(a, b); n != 5 {
		t.Errorf("%d hits while learning is paused, want 5", n)
	}
	for name, s := range map[string]Selector{
		"inner": {Inner: l.b.inner4}, "own inner": {Inner: l.a.inner4},
	} {
		if n, err := l.a.Evict(s); n == 0 || err != nil {
			t.Errorf("%s: evicted %d: %v", name, n, err)
		}
		if n := hits(a, b); n != 0 {
			t.Errorf("%s: %d hits after the eviction, want 0", name, n)
		}
		if n := hits(a6, b6); n != 5 {
			t.Errorf("%s: %d hits of another flow, want 5", name, n)
		}
		must(t, l.a.Resume())
		hits(a, b)
		if n := hits(a, b); n != 5 {
			t.Errorf("%s: %d hits after Resume, want 5", name, n)
		}
		must(t, l.a.Pause())
	}
	must(t, l.a.Resume())
	index := l.a.devices["container"].index
	for name, s := range map[string]Selector{
		"VTEP": {VTEP: l.b.underlay}, "device": {Device: index}, "MAC": {MAC: [6]byte(l.b.mac)}, "all": {All: true},
	} {
		if n, err := l.a.Evict(s); n == 0 || err != nil {
			t.Errorf("%s: evicted %d: %v", name, n, err)
		}
		for i, flow := range [][2]*net.UDPConn{{a, b}, {a6, b6}} {
			if n := hits(flow[0], flow[1]); n == 5 {
				t.Errorf("%s: flow %d has stayed in the cache", name, i)
			}
		}
	}
}

// A rule that drops takes effect with one generation write.
func TestVoid(t *testing.T) {
	l := newLab(t, true)
	l.renewed(t)
	a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
	talk(t, a, b, 5)
	l.a.iptables(t, "iptables", "-I FORWARD -p udp --dport 5000 -j DROP")
	if !send(t, a, b, "in the cache", long) {
		t.Error("the flow was not in the cache")
	}
	must(t, l.a.Void())
	if send(t, a, b, "dropped", short) {
		t.Error("a packet passed the rule")
	}
}

// Marks of other rules are kept: packets without kube-proxy's masquerade mark are dropped on both nodes.
func TestMarksOfOthers(t *testing.T) {
	l := newLab(t, true,
		"-t mangle -A PREROUTING -j MARK --set-xmark 0x4000/0x4000",
		"-A FORWARD -m mark ! --mark 0x4000/0xc000 -j DROP")
	l.renewed(t)
	a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
	talk(t, a, b, 20)
	if out, in := l.b.hits(t); out < 15 || in < 15 {
		t.Errorf("%d hits out, %d in", out, in)
	}
}

// A stream survives that its flow leaves the cache and comes back, while conntrack drops what it finds invalid.
func TestStream(t *testing.T) {
	for _, outer4 := range []bool{false, true} {
		l := newLab(t, outer4, "-A FORWARD -m conntrack --ctstate INVALID -j DROP")
		for _, n := range []*node{l.a, l.b} {
			must(t, n.ns.Do(func() error { return sysctl("netfilter/nf_conntrack_tcp_be_liberal", "1") }))
		}
		l.renewed(t)
		l.b.serve(t)
		c := l.a.dial(t, 4000, "10.1.2.1:7000")
		sent := make([]byte, 4<<20)
		rand.Read(sent)
		for range 3 {
			echo(t, c, sent)
			must(t, l.a.Void())
		}
		s, err := l.a.Stats()
		must(t, err)
		// Entries also expire while other tests keep the CPUs busy.
		if misses := s.Out.Misses["void"] + s.Out.Misses["unknown"]; s.Out.Hits < 10*misses {
			t.Errorf("got %+v", s)
		}
	}
}

// A change without a call takes effect when the overlay's last answer is as old as Config.TTL. A flow is learnt again
// and again.
func TestValidityEnds(t *testing.T) {
	l := &lab{newNode(t, 1, true), newNode(t, 2, true)}
	l.a.ttl, l.b.ttl = time.Second, time.Second
	setUp(t, l, true)
	l.renewed(t)
	a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
	var s Stats
	for deadline := time.Now().Add(time.Minute); s.Out.Learnt < 3; {
		if time.Now().After(deadline) {
			t.Fatalf("the flow is not learnt again: %+v", s)
		}
		talk(t, a, b, 5)
		var err error
		s, err = l.a.Stats()
		must(t, err)
	}
	if s.Out.Misses["expired"] == 0 || s.Out.Hits == 0 {
		t.Errorf("got %+v", s)
	}
	l.a.iptables(t, "iptables", "-I FORWARD -p udp -j DROP")
	end := time.Now().Add(l.a.ttl + 20*time.Millisecond) // the programs' clock lags by a tick
	for {
		sent := time.Now()
		if !send(t, a, b, "is it dropped?", short) {
			break
		}
		if sent.After(end) {
			t.Fatalf("a packet passed %v after the rule", sent.Sub(end)+l.a.ttl)
		}
	}
}
