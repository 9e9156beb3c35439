package accelerate_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/netns"
)

// long chooses the form of tests that take minutes in their long one.
func long[T any](long, short T) T {
	if os.Getenv("PILASTER_ACCELERATE_CHANGES") != "" {
		return long
	}
	return short
}

// Containers that start, ten a second, do not keep established flows from the cache.
func TestChurn(t *testing.T) {
	both := flannel(t)
	n := both[0]
	ip(t, n.ns, tracking)
	d := n.accelerate(t)
	c := talk(t, n.only(), both[1].only())
	stop, talked := make(chan struct{}), make(chan error, 1)
	go func() {
		for !isClosed(stop) {
			if err := c.echo(20); err != nil {
				talked <- err
				return
			}
		}
		talked <- nil
	}()
	type running struct {
		device string
		ns     *netns.Namespace
	}
	var mu sync.Mutex
	var all []running
	started := 0
	churn := func(containers int) (hits, misses uint64, causes map[string]uint64) {
		before := d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 100 })
		began := time.Now()
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		var starts errgroup.Group
		starts.SetLimit(4) // a start may take longer than the tick
		for range containers {
			<-tick.C
			started++
			device, host := fmt.Sprint("veth", 100+started), 10+started%200
			starts.Go(func() error {
				ns, err := n.start(device, host)
				if err != nil {
					return err
				}
				mu.Lock()
				all = append(all, running{device, ns})
				var oldest []running
				if len(all) > 30 {
					oldest, all = all[:1:1], all[1:]
				}
				mu.Unlock()
				for _, r := range oldest {
					err = n.stop(r.device, r.ns)
				}
				return err
			})
		}
		must(t, starts.Wait())
		t.Logf("%.1f containers a second", float64(containers)/time.Since(began).Seconds())
		last := all[len(all)-1].device
		s := d.until(t, last, func(s accelerate.Status) bool { return slices.Contains(s.Containers.Devices, last) })
		causes = maps.Clone(s.Egress.Misses)
		maps.DeleteFunc(causes, func(cause string, n uint64) bool { return n == before.Egress.Misses[cause] })
		for cause := range causes {
			causes[cause] -= before.Egress.Misses[cause]
		}
		t.Logf("evictions before %v, now %v", evictions(before), evictions(s))
		return s.Egress.Hits - before.Egress.Hits, s.Egress.Missed() - before.Egress.Missed(), causes
	}
	// The machine may keep the test from sending for long, while entries end.
	for attempt := 1; ; attempt++ {
		hits, misses, causes := churn(long(600, 20))
		share := float64(hits) / float64(hits+misses)
		t.Logf("%d hits, %d misses, hit rate %.1f %%; misses by cause: %v", hits, misses, 100*share, causes)
		if share >= .95 {
			break
		}
		if attempt == 3 {
			t.Fatalf("%d hits, %d misses, want 95 %% hits; misses by cause: %v", hits, misses, causes)
		}
	}
	close(stop)
	must(t, <-talked)
	for _, r := range all {
		must(t, n.stop(r.device, r.ns))
	}
	d.end(unix.SIGTERM)
}

// dropped returns the packets that a node's rule for invalid packets has dropped.
func (n *node) dropped(t *testing.T) string {
	t.Helper()
	said, err := output(n.ns, exec.Command("iptables-nft", "-w", "-nvxL", "FORWARD"))
	must(t, err)
	for line := range strings.Lines(said) {
		if strings.Contains(line, "ctstate INVALID") {
			return strings.Fields(line)[0]
		}
	}
	t.Fatalf("no rule: %s", said)
	return ""
}

// pattern writes or compares bytes that depend on their position.
type pattern struct{ at uint64 }

func (p *pattern) fill(b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], p.at)
		p.at += 8
	}
}

// A stream by the cache is whole, beside rules that drop what conntrack calls invalid, with evictions meanwhile, and
// ends in order.
func TestStream(t *testing.T) {
	both := flannel(t)
	var daemons []*daemon
	for _, n := range both {
		ip(t, n.ns, tracking)
		daemons = append(daemons, n.accelerate(t))
	}
	c := talk(t, both[0].only(), both[1].only())
	const block = 256 << 10
	blocks := long(4096, 256) // 1 GiB or 64 MiB
	sent := make(chan error, 1)
	deadline := time.Now().Add(10 * time.Minute)
	must(t, errors.Join(c.client.SetDeadline(deadline), c.server.SetDeadline(deadline)))
	go func() {
		var p pattern
		b := make([]byte, block)
		for range blocks {
			p.fill(b)
			if _, err := c.client.Write(b); err != nil {
				sent <- err
				return
			}
		}
		sent <- c.client.(*net.TCPConn).CloseWrite()
	}()
	var p pattern
	got, want := make([]byte, block), make([]byte, block)
	for i := range blocks {
		if _, err := io.ReadFull(c.server, got); err != nil {
			t.Fatalf("block %d of %d: %v", i, blocks, err)
		}
		if p.fill(want); !bytes.Equal(got, want) {
			t.Fatalf("block %d differs", i)
		}
		if i%(blocks/4) == blocks/8 {
			for k, d := range daemons {
				q := accelerate.EvictRequest{All: i > blocks/2, Address: address(t, both[k].only())}
				if _, err := d.Evict(t.Context(), q); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	must(t, <-sent)
	if n, err := c.server.Read(got); err != io.EOF {
		t.Fatalf("after the last byte: %d bytes, %v, want the end", n, err)
	}
	if _, err := c.server.Write([]byte("all")); err != nil {
		t.Fatal(err)
	}
	must(t, c.server.Close())
	if answer, err := io.ReadAll(c.client); err != nil || string(answer) != "all" {
		t.Fatalf("got the answer %q, %v", answer, err)
	}
	for i, n := range both {
		s, err := daemons[i].Status(t.Context())
		must(t, err)
		t.Logf("node %d: out %d hits, misses %v; in %d hits, misses %v", n.number, s.Egress.Hits, s.Egress.Misses,
			s.Ingress.Hits, s.Ingress.Misses)
		if s.Evicted == 0 || s.Egress.Hits < s.Egress.Missed() || s.Ingress.Hits < s.Ingress.Missed() {
			t.Errorf("node %d: the stream hardly used the cache: %+v", n.number, s)
		}
		if lost := n.dropped(t); lost != "0" {
			t.Errorf("node %d dropped %s packets as invalid", n.number, lost)
		}
	}
}

// The conntrack entry of a cached flow of datagrams outlives its timeout.
func TestEntryOfDatagrams(t *testing.T) {
	t.Parallel()
	both := flannel(t)
	n := both[0]
	ip(t, n.ns, tracking)
	timeout := long(0, 6*time.Second) // 0: as the kernel has it, 30 s and 120 s for a flow with answers
	if timeout > 0 {
		const name = "net.netfilter.nf_conntrack_udp_timeout"
		ip(t, n.ns, "! sysctl -qw %[1]s=%[2]d %[1]s_stream=%[2]d", name, int(timeout.Seconds()))
	}
	const groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY
	events := inside(t, n.ns, func() (*nl.NetlinkSocket, error) {
		return nl.Subscribe(unix.NETLINK_NETFILTER, groupDestroy)
	})
	defer events.Close()
	d := n.accelerate(t)
	f := flow(t, n.only(), both[1].only())
	before := d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 50 })
	end := time.Now().Add(long(10*time.Minute, 2*timeout))
	for time.Now().Before(end) {
		if gone, err := destroyed(events, time.Second); err != nil || gone {
			t.Fatalf("the flow's conntrack entry has ended: %v", err)
		}
	}
	s, err := d.Status(t.Context())
	must(t, err)
	// The kernel ends an entry whose time has passed when the next packet asks for it.
	_, err = d.Evict(t.Context(), accelerate.EvictRequest{All: true})
	must(t, err)
	if gone, err := destroyed(events, time.Second); err != nil || gone {
		t.Fatalf("the flow's conntrack entry had passed its time: %v", err)
	}
	t.Logf("%d hits, %d misses", s.Egress.Hits-before.Egress.Hits, s.Egress.Missed()-before.Egress.Missed())
	if s.Egress.Hits-before.Egress.Hits < 5*(s.Egress.Missed()-before.Egress.Missed()) {
		t.Errorf("the flow hardly used the cache: %+v", s.Egress)
	}
	f.mu.Lock()
	silent := time.Since(f.last)
	f.mu.Unlock()
	if silent > 5*time.Second {
		t.Errorf("no datagram has arrived for %v", silent)
	}
	// The end of the entry would have been noticed.
	must(t, n.ns.Do(func() error {
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|2, unix.NLM_F_ACK) // IPCTNL_MSG_CT_DELETE
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET})
		_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
		return err
	}))
	if gone, err := destroyed(events, 10*time.Second); err != nil || !gone {
		t.Errorf("the end of the entry was not notified: %v", err)
	}
}

// destroyed waits at most for a time, and tells whether an entry of the port of flow was destroyed.
func destroyed(events *nl.NetlinkSocket, most time.Duration) (bool, error) {
	for end := time.Now().Add(most); time.Now().Before(end); {
		if err := events.SetReceiveTimeout(&unix.Timeval{Usec: 100_000}); err != nil {
			return false, err
		}
		messages, _, err := events.Receive()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return false, err
		}
		for _, m := range messages {
			port, err := destinationPort(m.Data)
			if err != nil || port == 7001 {
				return true, err
			}
		}
	}
	return false, nil
}

// destinationPort returns the destination port of a conntrack entry's first packet.
func destinationPort(entry []byte) (uint16, error) {
	b := entry[nl.SizeofNfgenmsg:]
	for _, kind := range []uint16{1, 2, 3} { // CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_PROTO_DST_PORT
		list, err := nl.ParseRouteAttr(b)
		if err != nil {
			return 0, err
		}
		b = nil
		for _, a := range list {
			if a.Attr.Type&nl.NLA_TYPE_MASK == kind {
				b = a.Value
			}
		}
	}
	if len(b) < 2 {
		return 0, nil // of another protocol
	}
	return binary.BigEndian.Uint16(b), nil
}
