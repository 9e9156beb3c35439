package nodeprobe

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/probe"
	"pilaster.io/pilaster/internal/tenant"
)

// deadAfter is after how many probes without an answer a node is unusable: 0.5 s. With the time of a lost answer and of
// an announcement, BGP peers lose its routes within 1 s.
const deadAfter = 5

// Probes are sent in bursts, so that the answers fit into the socket's buffer, at most maxRate a second. With more than
// 1,000 nodes each gets fewer, and the loss of one is noticed later.
const (
	burst   = 50
	pause   = 5 * time.Millisecond
	maxRate = burst * int(time.Second/pause)
)

// state is what is known of a probed node.
type state struct {
	probe.Pulse
	known bool // usable is known
	// usable: its kernel answers. Without any answer from any node the fault may be this machine's; then it stays as it
	// is.
	usable bool
	answer time.Time // of the last answer; zero: none
	fresh  bool      // the last probe was answered
}

// Prober sends ICMPv6 echo requests to nodes, which their kernels answer.
type Prober struct {
	conn   net.PacketConn
	raw    bool
	log    *slog.Logger
	secret [16]byte
	seq    uint16 // only round uses it
	failed string // of the last round; likewise

	more chan struct{} // there are more nodes to probe

	mu    sync.Mutex
	nodes map[netip.Addr]*state
	alive bool // some node answers
}

// New returns a prober that probes nothing yet.
func New(log *slog.Logger) (*Prober, error) {
	p := &Prober{log: log, nodes: map[netip.Addr]*state{}, more: make(chan struct{}, 1)}
	rand.Read(p.secret[:])
	var err error
	if p.conn, p.raw, err = openSocket(); err != nil {
		return nil, fmt.Errorf("open a socket to probe nodes: %w; permit ping sockets for the group of "+
			"this process (sysctl net.ipv4.ping_group_range) or give it CAP_NET_RAW", err)
	}
	return p, nil
}

// cookie is the content of probes of a node: only who receives them can answer for it.
func (p *Prober) cookie(a netip.Addr) []byte {
	h, raw := hmac.New(sha256.New, p.secret[:]), a.As16()
	h.Write(raw[:])
	return h.Sum(nil)[:16]
}

// Run probes until ctx ends, and then closes the prober. It calls changed when nodes became usable or unusable.
func (p *Prober) Run(ctx context.Context, changed func()) {
	var reading sync.WaitGroup
	reading.Go(p.read)
	probe.Rounds(ctx, p.more, func() time.Duration {
		is, next := p.round()
		if is {
			changed()
		}
		return next
	})
	p.Close()
	reading.Wait()
}

// read reads answers until Close.
func (p *Prober) read() {
	buffer := make([]byte, 1500)
	for {
		n, from, err := p.conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(pause) // round notices that answers are missing
			continue
		}
		m, err := icmp.ParseMessage(ipv6.ICMPTypeEchoReply.Protocol(), buffer[:n])
		if err != nil || m.Type != ipv6.ICMPTypeEchoReply {
			continue
		}
		a := addressOf(from)
		if echo, ok := m.Body.(*icmp.Echo); ok && bytes.Equal(echo.Data, p.cookie(a)) {
			p.answered(a)
		}
	}
}

// Close closes a prober that does not run.
func (p *Prober) Close() { p.conn.Close() }

func addressOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr()
	case *net.IPAddr:
		is, _ := netip.AddrFromSlice(a.IP)
		return is
	}
	return netip.Addr{}
}

func (p *Prober) answered(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.nodes[a]; s != nil {
		s.answer = time.Now()
	}
}

// Watch sets which nodes are probed.
func (p *Prober) Watch(nodes map[netip.Addr]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.nodes, func(a netip.Addr, _ *state) bool { return !nodes[a] })
	for a := range nodes {
		if p.nodes[a] != nil {
			continue
		}
		p.nodes[a] = &state{}
		select {
		case p.more <- struct{}{}:
		default:
		}
	}
}

// Address is the address at which a node is probed. It is not valid if the record is not.
func Address(n *pilasterv1.Node) netip.Addr {
	prefix, err := netip.ParsePrefix(n.Prefix)
	if err != nil {
		return netip.Addr{}
	}
	return tenant.NodeAddress(prefix)
}

// round counts the answers to the last probes and sends the next ones. It returns whether a node became usable or
// unusable, and the time of the next round; 0 if there is nothing to probe.
func (p *Prober) round() (changed bool, next time.Duration) {
	changed, all := p.count()
	var failed error
	for i, a := range all {
		if i%burst == 0 && i > 0 {
			time.Sleep(pause)
		}
		if err := p.send(a); err != nil {
			failed = fmt.Errorf("probe %v: %w", a, err)
		}
	}
	p.report(failed)
	if len(all) == 0 {
		return changed, 0
	}
	return changed, max(probe.Every, time.Duration(len(all))*time.Second/time.Duration(maxRate))
}

// count returns whether a node became usable or unusable, and the nodes to probe.
func (p *Prober) count() (changed bool, all []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, alive := time.Now(), false
	for _, s := range p.nodes {
		before := s.Answered
		s.Count(now.Sub(s.answer), !s.answer.IsZero())
		s.fresh = s.Answered != before
		alive = alive || !s.Answered.IsZero() && s.Missed < 2
	}
	if alive && !p.alive { // this machine's network may have returned just now: what was missed does not count
		for _, s := range p.nodes {
			s.Missed = 0
		}
	}
	p.alive = alive
	for _, s := range p.nodes {
		was := *s
		switch silent := s.Missed >= deadAfter; {
		case s.fresh:
			s.known, s.usable = true, true
		case silent && alive:
			s.known, s.usable = true, false
		case silent && !s.known:
			s.known, s.usable = true, true
		}
		changed = changed || was.known != s.known || was.usable != s.usable
		s.Send(true)
	}
	return changed, slices.Collect(maps.Keys(p.nodes))
}

// send sends a probe. A node without a route misses it like one that is dead.
func (p *Prober) send(to netip.Addr) error {
	p.seq++
	const id = 1 // of raw sockets; a ping socket has its own
	m := icmp.Message{Type: ipv6.ICMPTypeEchoRequest, Body: &icmp.Echo{ID: id, Seq: int(p.seq), Data: p.cookie(to)}}
	text, err := m.Marshal(nil)
	if err != nil {
		return err
	}
	var at net.Addr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 0))
	if p.raw {
		at = &net.IPAddr{IP: to.AsSlice()}
	}
	_, err = p.conn.WriteTo(text, at)
	return err
}

// report logs an error of a round once.
func (p *Prober) report(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != p.failed && err != nil {
		p.log.Warn("probing nodes failed; retrying", "error", err)
	}
	p.failed = text
}

// Usable reports whether a node's kernel answers; known is false before its first answer, or silence.
func (p *Prober) Usable(a netip.Addr) (usable, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.nodes[a]
	if s == nil {
		return false, false
	}
	return s.usable, s.known
}
