package announce

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"

	"pilaster.io/pilaster/internal/probe"
)

// deadAfter is after how many probes without an answer a node is withdrawn: 0.5 s. With the time of a lost answer and
// of the announcement, peers lose the route within 1 s.
const deadAfter = 5

// maxRate is how many probes a second are sent at most. With more nodes than maxRate / 10, each one gets fewer, and
// the loss of one is noticed later.
const maxRate = 10_000

// state is what is known of a probed node.
type state struct {
	probe.Pulse
	known bool // usable is known
	// usable: packets may come in by it. Without any answer from any node the fault may be this machine's; then it
	// stays as it is.
	usable bool
	answer time.Time // of the last answer; zero: none
}

// prober sends ICMPv6 echo requests to nodes, which their kernels answer.
type prober struct {
	conn   *icmp.PacketConn
	log    *slog.Logger
	nonce  [8]byte // so that only those who receive the probes can answer
	seq    uint16
	mu     sync.Mutex
	nodes  map[netip.Addr]*state
	failed string // of the last round
}

func newProber(log *slog.Logger) (*prober, error) {
	p := &prober{log: log, nodes: map[netip.Addr]*state{}}
	rand.Read(p.nonce[:])
	// A ping socket needs no privilege but the group's; a raw one needs CAP_NET_RAW.
	conn, err := icmp.ListenPacket("udp6", "::")
	if err != nil {
		var raw error
		if conn, raw = icmp.ListenPacket("ip6:ipv6-icmp", "::"); raw != nil {
			return nil, fmt.Errorf("--bgp-peer: open a socket to probe nodes: %w; permit ping sockets for the group "+
				"of this process (sysctl net.ipv4.ping_group_range) or give it CAP_NET_RAW", errors.Join(err, raw))
		}
	}
	p.conn = conn
	return p, nil
}

// run reads answers until close.
func (p *prober) run() {
	buffer := make([]byte, 1500)
	for {
		n, from, err := p.conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(probe.Every) // the round notices that answers are missing
			continue
		}
		m, err := icmp.ParseMessage(ipv6.ICMPTypeEchoReply.Protocol(), buffer[:n])
		if err != nil || m.Type != ipv6.ICMPTypeEchoReply {
			continue
		}
		if echo, ok := m.Body.(*icmp.Echo); ok && string(echo.Data) == string(p.nonce[:]) {
			p.answered(addressOf(from))
		}
	}
}

func (p *prober) close() { p.conn.Close() }

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

func (p *prober) answered(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.nodes[a]; s != nil {
		s.answer = time.Now()
	}
}

// watch sets which nodes are probed.
func (p *prober) watch(nodes map[netip.Addr]string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a := range p.nodes {
		if _, stays := nodes[a]; !stays {
			delete(p.nodes, a)
		}
	}
	for a := range nodes {
		if p.nodes[a] == nil {
			p.nodes[a] = &state{}
		}
	}
}

// round counts the answers to the last probes and sends the next ones. It returns whether a node became usable or
// unusable, and the time of the next round; 0 if there is nothing to probe.
func (p *prober) round() (changed bool, next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, alive := time.Now(), false
	for _, s := range p.nodes {
		s.Count(now.Sub(s.answer), !s.answer.IsZero())
		alive = alive || !s.Answered.IsZero() && s.Missed < 2
	}
	for _, s := range p.nodes {
		was := *s
		switch silent := s.Missed >= deadAfter; {
		case !silent && !s.Answered.IsZero():
			s.known, s.usable = true, true
		case silent && alive:
			s.known, s.usable = true, false
		case silent && !s.known:
			s.known, s.usable = true, true
		}
		changed = changed || was.known != s.known || was.usable != s.usable
	}
	var failed error
	for a, s := range p.nodes {
		if err := p.send(a); err != nil {
			failed = fmt.Errorf("probe %v: %w", a, err)
		}
		s.Send(true)
	}
	p.report(failed)
	if len(p.nodes) == 0 {
		return changed, 0
	}
	return changed, max(probe.Every, time.Duration(len(p.nodes))*time.Second/maxRate)
}

// send sends a probe. A node without a route misses it like one that is dead.
func (p *prober) send(to netip.Addr) error {
	p.seq++
	m := icmp.Message{Type: ipv6.ICMPTypeEchoRequest, Body: &icmp.Echo{
		ID: int(binary.BigEndian.Uint16(p.nonce[:])), Seq: int(p.seq), Data: p.nonce[:],
	}}
	raw, err := m.Marshal(nil)
	if err != nil {
		return err
	}
	var at net.Addr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 0))
	if isRaw(p.conn) {
		at = &net.IPAddr{IP: to.AsSlice()}
	}
	_, err = p.conn.WriteTo(raw, at)
	return err
}

func isRaw(c *icmp.PacketConn) bool {
	_, raw := c.LocalAddr().(*net.IPAddr)
	return raw
}

// report logs an error of a round once.
func (p *prober) report(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != p.failed && err != nil {
		p.log.Warn("probing nodes failed; retrying", "error", err)
	}
	p.failed = text
}

// usable reports whether packets may come in by a node; known is false before its first answer, or silence.
func (p *prober) usable(a netip.Addr) (usable, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.nodes[a]
	if s == nil {
		return false, false
	}
	return s.usable, s.known
}
