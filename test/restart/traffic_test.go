package restart_test

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	interval  = time.Millisecond // between datagrams
	perFlow   = 10               // datagrams: a new flow every 10 ms
	firstPort = 10000
	lastPort  = 60000
	port      = 9
	buffer    = 256 << 20 // socket buffer in bytes, so that a slow receiver loses nothing

	// maxLate limits how many missed datagrams a sender sends after it was not scheduled for some time: a larger burst
	// would exceed the kernel's backlog of 1,000 packets per CPU.
	maxLate = 100 * time.Millisecond

	// arrival is the timeout of the last datagrams.
	arrival = 10 * time.Second
)

// stream is a sequence of numbered datagrams from one container to another.
type stream struct {
	from, to string
	port     int
	ended    <-chan error // result of the sender

	sent  []time.Time // times by number; only the sender uses it until it has ended
	flows int         // used as sent
	noise uint64      // datagrams to an address without a container, one per flow; used as sent

	mu       sync.Mutex
	received []int // number of receptions, by number
	distinct int
	want     int           // 0 until it is known
	complete chan struct{} // closed when distinct is want
}

// startStream sends until ctx ends.
func startStream(ctx context.Context, t *testing.T, l *lab.Lab, from, to string) *stream {
	t.Helper()
	return startStreamTo(ctx, t, l, from, to, port)
}

// startStreamTo is startStream to a port.
func startStreamTo(ctx context.Context, t *testing.T, l *lab.Lab, from, to string, port int) *stream {
	t.Helper()
	s := &stream{from: from, to: to, port: port, complete: make(chan struct{})}
	address := labtest.ReceiveNumbered(t, l, to, port, buffer, s.note)
	s.ended = labtest.RunIn(t, l, from, func() error { return s.send(ctx, address) })
	return s
}

// send runs on a thread in the sender's namespace.
func (s *stream) send(ctx context.Context, address netip.Addr) error {
	to := &unix.SockaddrInet6{Port: s.port, Addr: address.As16()}
	nowhere := &unix.SockaddrInet6{Port: s.port, Addr: withoutContainer(address).As16()}
	fd, from := -1, firstPort
	defer func() { unix.Close(fd) }()
	next := time.Now()
	for ; ctx.Err() == nil; time.Sleep(time.Until(next)) {
		if len(s.sent)%perFlow == 0 {
			unix.Close(fd)
			var err error
			if fd, err = labtest.OpenFlow(from); err != nil {
				return fmt.Errorf("flow from port %d: %w", from, err)
			}
			if from++; from > lastPort {
				from = firstPort
			}
			if err := unix.Sendto(fd, nil, 0, nowhere); err != nil {
				return fmt.Errorf("datagram to an address without a container: %w", err)
			}
			s.flows++
			s.noise++
		}
		if err := labtest.SendNumbered(fd, len(s.sent), to); err != nil {
			return fmt.Errorf("datagram %d: %w", len(s.sent), err)
		}
		now := time.Now()
		s.sent = append(s.sent, now)
		if next = next.Add(interval); now.Sub(next) > maxLate {
			next = now
		}
	}
	return nil
}

// withoutContainer returns an address to which a container with such an address has a route.
func withoutContainer(a netip.Addr) netip.Addr {
	if labtest.Network() == tenant.Netpila {
		return netip.MustParseAddr("fc12::1")
	}
	bytes := a.As16()
	bytes[12] ^= 0xee // of its tenant
	return netip.AddrFrom16(bytes)
}

// note records the arrival of a datagram.
func (s *stream) note(number int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.received) <= number {
		s.received = append(s.received, 0)
	}
	if s.received[number]++; s.received[number] == 1 {
		if s.distinct++; s.distinct == s.want {
			close(s.complete)
		}
	}
}

// finish waits for the sent datagrams and checks that each was received once. The context of startStream must have
// ended.
func (s *stream) finish(t *testing.T, start time.Time) {
	t.Helper()
	if err := <-s.ended; err != nil {
		t.Errorf("%s to %s: %v", s.from, s.to, err)
	}
	n := len(s.sent)
	s.mu.Lock()
	if s.want = n; s.distinct == n {
		close(s.complete)
	}
	s.mu.Unlock()
	select {
	case <-s.complete:
	case <-time.After(arrival):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Logf("%s to %s: %d datagrams sent, %d received, %d flows, %.0f/s", s.from, s.to, n, s.distinct,
		s.flows, float64(n)/s.sent[n-1].Sub(s.sent[0]).Seconds())
	var wrong []string
	for number := range max(n, len(s.received)) {
		times := 0
		if number < len(s.received) {
			times = s.received[number]
		}
		switch {
		case number >= n:
			wrong = append(wrong, fmt.Sprintf("datagram %d was received but never sent", number))
		case times != 1:
			wrong = append(wrong, fmt.Sprintf("datagram %d, sent at %v, was received %d times", number,
				s.sent[number].Sub(start).Round(time.Millisecond), times))
		}
	}
	if len(wrong) > 0 {
		t.Errorf("%s to %s: %d datagrams were lost, duplicated or never sent; the first and the last:\n%s\n%s",
			s.from, s.to, len(wrong), wrong[0], wrong[len(wrong)-1])
	}
}
