package packet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"pilaster.io/pilaster/internal/netns"
)

// ErrNoProbe means that there are no probes of a protocol.
var ErrNoProbe = errors.New("a probe is TCP, UDP, ICMP or ICMPv6")

// Probe is a packet of a socket: a TCP SYN, an empty UDP datagram or an echo request.
type Probe struct {
	Source   netip.AddrPort // zero: any
	To       netip.AddrPort
	Protocol uint8
}

// ProbeAnswer is the answer to a probe.
type ProbeAnswer struct {
	Kind string // echo reply, connected, refused, datagram; empty: none arrived
	RTT  time.Duration
}

// Send sends a probe from a namespace and waits for an answer until ctx ends. A missing answer is no error.
func (p Probe) Send(ctx context.Context, ns *netns.Namespace) (a ProbeAnswer, err error) {
	began := time.Now()
	switch p.Protocol {
	case syscall.IPPROTO_ICMP, syscall.IPPROTO_ICMPV6:
		wait := time.Second
		if deadline, has := ctx.Deadline(); has {
			wait = min(time.Until(deadline), wait)
		}
		var ping PingResult
		ping, err = Ping(ctx, ns, p.To.Addr(), PingOptions{Timeout: wait})
		if len(ping.RTT) > 0 {
			a = ProbeAnswer{"echo reply", ping.RTT[0]}
		}
	case syscall.IPPROTO_TCP, syscall.IPPROTO_UDP:
		err = ns.Do(func() (err error) {
			began = time.Now()
			a.Kind, err = p.dial(ctx)
			return err
		})
		if a.Kind != "" {
			a.RTT = time.Since(began)
		}
	default:
		return a, fmt.Errorf("protocol %d: %w", p.Protocol, ErrNoProbe)
	}
	if err != nil && ctx.Err() == nil && !isSilence(err) {
		return a, fmt.Errorf("send a probe to %v: %w", p.To.Addr(), err)
	}
	return a, nil
}

// isSilence reports whether an error says that no answer arrived.
func isSilence(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, syscall.EHOSTUNREACH) ||
		errors.Is(err, syscall.ENETUNREACH)
}

// dial opens a TCP connection or sends an empty datagram, in the thread's namespace. It returns the kind of the answer.
func (p Probe) dial(ctx context.Context) (answer string, err error) {
	network, local := "tcp", net.Addr(net.TCPAddrFromAddrPort(p.Source))
	if p.Protocol == syscall.IPPROTO_UDP {
		network, local = "udp", net.UDPAddrFromAddrPort(p.Source)
	}
	d := net.Dialer{LocalAddr: local, FallbackDelay: -1}
	conn, err := d.DialContext(ctx, network, p.To.String())
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "refused", nil
	}
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if p.Protocol == syscall.IPPROTO_TCP {
		return "connected", nil
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	if _, err := conn.Write(nil); err != nil {
		return "", err
	}
	if _, err = conn.Read(make([]byte, 1)); errors.Is(err, syscall.ECONNREFUSED) {
		return "refused", nil
	}
	if err != nil {
		return "", err
	}
	return "datagram", nil
}
