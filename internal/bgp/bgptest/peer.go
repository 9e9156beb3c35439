package bgptest

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// Peer is a BGP peer that accepts sessions for EVPN and sends what the test writes. It checks nothing.
type Peer struct {
	ASN  uint32
	Addr netip.AddrPort

	t        testing.TB
	listener net.Listener
	mu       sync.Mutex
	changed  *sync.Cond
	conn     net.Conn // of the current session; nil without one
	sessions int
	updates  []*bgp.BGPUpdate // received in the current session
	notified []string         // received notifications
	closed   bool
}

const holdTime = 90 // seconds

// Listen starts a peer. With port 0 it has a free one.
func Listen(t testing.TB, addr netip.AddrPort, asn uint32) *Peer {
	t.Helper()
	l, err := net.Listen("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	p := &Peer{ASN: asn, Addr: l.Addr().(*net.TCPAddr).AddrPort(), t: t, listener: l}
	p.changed = sync.NewCond(&p.mu)
	var running sync.WaitGroup
	running.Go(p.accept)
	t.Cleanup(func() {
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		l.Close()
		p.Drop()
		running.Wait()
	})
	return p
}

func (p *Peer) accept() {
	var sessions sync.WaitGroup
	defer sessions.Wait()
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		sessions.Go(func() {
			defer conn.Close()
			if err := p.open(conn); err == nil {
				p.serve(conn)
			}
		})
	}
}

// open exchanges OPEN and KEEPALIVE.
func (p *Peer) open(conn net.Conn) error {
	open, err := bgp.NewBGPOpenMessage(bgp.AS_TRANS, holdTime, p.Addr.Addr(), []bgp.OptionParameterInterface{
		bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapMultiProtocol(bgp.RF_EVPN),
			bgp.NewCapFourOctetASNumber(p.ASN),
		}),
	})
	if err != nil {
		return err
	}
	for _, m := range []*bgp.BGPMessage{open, bgp.NewBGPKeepAliveMessage()} {
		if err := write(conn, m); err != nil {
			return err
		}
	}
	for {
		m, err := read(conn)
		if err != nil {
			return err
		}
		if m.Header.Type == bgp.BGP_MSG_KEEPALIVE {
			break
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn, p.updates = conn, nil
	p.sessions++
	p.changed.Broadcast()
	return nil
}

func (p *Peer) serve(conn net.Conn) {
	for {
		m, err := read(conn)
		p.mu.Lock()
		if err != nil {
			if p.conn == conn {
				p.conn = nil
			}
			p.changed.Broadcast()
			p.mu.Unlock()
			return
		}
		switch body := m.Body.(type) {
		case *bgp.BGPUpdate:
			p.updates = append(p.updates, body)
		case *bgp.BGPNotification:
			p.notified = append(p.notified, fmt.Sprintf("%d/%d %s", body.ErrorCode, body.ErrorSubcode, body.Data))
		}
		p.changed.Broadcast()
		p.mu.Unlock()
		if m.Header.Type == bgp.BGP_MSG_KEEPALIVE && write(conn, m) != nil {
			return
		}
	}
}

func write(w io.Writer, m *bgp.BGPMessage) error {
	raw, err := m.Serialize()
	if err == nil {
		_, err = w.Write(raw)
	}
	return err
}

func read(r io.Reader) (*bgp.BGPMessage, error) {
	head := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	h := new(bgp.BGPHeader)
	if err := h.DecodeFromBytes(head); err != nil {
		return nil, err
	}
	body := make([]byte, int(h.Len)-len(head))
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return bgp.ParseBGPBody(h, body)
}

const waitTimeout = time.Minute

// wait waits until a condition on the peer's state is true.
func (p *Peer) wait(what string, ok func() bool) {
	p.t.Helper()
	late := false
	timer := time.AfterFunc(waitTimeout, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		late = true
		p.changed.Broadcast()
	})
	defer timer.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for !ok() {
		if late {
			p.t.Fatalf("after %v: not %s", waitTimeout, what)
		}
		p.changed.Wait()
	}
}

// WaitUp waits for the session with a number, the first being 1.
func (p *Peer) WaitUp(session int) {
	p.t.Helper()
	p.wait(fmt.Sprintf("in session %d", session), func() bool { return p.conn != nil && p.sessions >= session })
}

// WaitDown waits until there is no session.
func (p *Peer) WaitDown() {
	p.t.Helper()
	p.wait("down", func() bool { return p.conn == nil })
}

// Sessions returns how many sessions there have been.
func (p *Peer) Sessions() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sessions
}

// Notifications returns the received notifications: code, subcode and data.
func (p *Peer) Notifications() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.notified...)
}

// WaitUpdates waits until the updates of the current session satisfy a condition.
func (p *Peer) WaitUpdates(what string, ok func([]*bgp.BGPUpdate) bool) {
	p.t.Helper()
	p.wait(what, func() bool { return ok(p.updates) })
}

// Reset forgets the updates of the current session.
func (p *Peer) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updates = nil
}

// Drop closes the connection without a notification.
func (p *Peer) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != nil {
		p.conn.Close()
		p.conn = nil
	}
}

// Write sends bytes, which are whole BGP messages. An error means that the other end has ended the session.
func (p *Peer) Write(raw []byte) error {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	if conn == nil {
		return net.ErrClosed
	}
	_, err := conn.Write(raw)
	return err
}

// Send sends updates.
func (p *Peer) Send(updates ...*bgp.BGPMessage) {
	p.t.Helper()
	for _, m := range updates {
		raw, err := m.Serialize()
		if err != nil {
			p.t.Fatal(err)
		}
		if err := p.Write(raw); err != nil {
			p.t.Fatal(err)
		}
	}
}
