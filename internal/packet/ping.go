package packet

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// PingOptions configures a run of ICMP echoes; the zero value sends one and waits a second.
type PingOptions struct {
	Count    int           // number of echoes, each sent after the previous reply; 0 means 1
	Timeout  time.Duration // for each reply; 0 means 1 s
	Interval time.Duration // between a reply and the next echo
	Size     int           // payload bytes, at least 16
	Payload  []byte        // first bytes of the payload, for example a Sentinel; the rest is random
}

// PingResult is the result of a run.
type PingResult struct {
	Sent, Received int
	RTT            []time.Duration // of each reply, in order
}

// Ping sends ICMP or ICMPv6 echoes from a namespace and waits for the replies. It measures around blocking system calls
// on one thread, so the times do not include delays of Go's scheduler. A missing reply is not an error; a failure to
// send is an error.
func Ping(ctx context.Context, ns *netns.Namespace, to netip.Addr, o PingOptions) (PingResult, error) {
	o.Count = max(o.Count, 1)
	o.Size = max(o.Size, len(Sentinel{}), len(o.Payload))
	if o.Timeout == 0 {
		o.Timeout = time.Second
	}
	var r PingResult
	err := ns.Do(func() error {
		p, err := newPinger(to, o)
		if err != nil {
			return err
		}
		defer unix.Close(p.fd)
		for seq := range o.Count {
			if seq > 0 && o.Interval > 0 {
				select {
				case <-ctx.Done():
				case <-time.After(o.Interval):
				}
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			rtt, ok, err := p.echo(uint16(seq))
			if err != nil {
				return err
			}
			r.Sent++
			if ok {
				r.Received++
				r.RTT = append(r.RTT, rtt)
			}
		}
		return nil
	})
	if err != nil {
		return r, fmt.Errorf("ping %v from %s: %w", to, ns.Path(), err)
	}
	return r, nil
}

type pinger struct {
	fd      int
	to      unix.Sockaddr
	timeout time.Duration
	request []byte // ICMP message; the kernel fills in the checksum of ICMPv6
	reply   byte   // ICMP type of the reply
	header  int    // bytes before the reply: a raw IPv4 socket returns the IP header too
	buffer  []byte
}

func newPinger(to netip.Addr, o PingOptions) (p *pinger, err error) {
	// ID and payload are random, to distinguish replies to other pingers in the namespace.
	p = &pinger{timeout: o.Timeout, request: make([]byte, icmpHeaderLen+o.Size)}
	_, _ = rand.Read(p.request[4:])
	copy(p.request[icmpHeaderLen:], o.Payload)
	if to.Is4() {
		p.to, p.request[0], p.reply, p.header = &unix.SockaddrInet4{
			Addr: to.As4(),
		}, EchoRequest4, EchoReply4, ipv4HeaderLen
		p.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	} else {
		p.to, p.request[0], p.reply = &unix.SockaddrInet6{Addr: to.As16()}, EchoRequest, EchoReply
		p.fd, err = newSocket6()
	}
	p.buffer = make([]byte, p.header+len(p.request)+1)
	return p, err
}

// newSocket6 returns a socket that receives only echo replies.
func newSocket6() (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return 0, err
	}
	filter := &unix.ICMPv6Filter{}
	for i := range filter.Data {
		filter.Data[i] = ^uint32(0) // a set bit blocks a type
	}
	filter.Data[EchoReply/32] &^= 1 << (EchoReply % 32)
	if err := unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, filter); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

func (p *pinger) echo(seq uint16) (time.Duration, bool, error) {
	binary.BigEndian.PutUint16(p.request[6:], seq)
	if p.reply == EchoReply4 {
		binary.BigEndian.PutUint16(p.request[2:], 0)
		binary.BigEndian.PutUint16(p.request[2:], onesSum(0, p.request))
	}
	start := time.Now()
	// If an eBPF program drops the request, the kernel returns ENOBUFS. Treat it as a lost request.
	if err := unix.Sendto(p.fd, p.request, 0, p.to); err != nil && !errors.Is(err, unix.ENOBUFS) {
		return 0, false, fmt.Errorf("send: %w", err)
	}
	for {
		left := p.timeout - time.Since(start)
		if left <= 0 {
			return 0, false, nil
		}
		// At least 1 µs: zero would mean no timeout.
		tv := unix.NsecToTimeval(max(left, time.Microsecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(p.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			return 0, false, err
		}
		n, _, err := unix.Recvfrom(p.fd, p.buffer, 0)
		rtt := time.Since(start)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, false, fmt.Errorf("receive: %w", err)
		case n == p.header+len(p.request) && p.buffer[p.header] == p.reply && bytes.Equal(p.buffer[p.header+4:n],
			p.request[4:]):
			return rtt, true, nil
		}
	}
}
