package routing_test

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
)

const (
	interval      = 3 * time.Millisecond // between datagrams
	firstPort     = 20000                // source port of the first flow; the others follow
	firstListener = 9000

	// calm is how long datagrams must arrive without loss before and after a failure: longer than the lifetime of a
	// cached next hop.
	calm = 1100 * time.Millisecond

	// slack is the tolerance for a busy machine.
	slack = 3 * time.Second
)

// traffic is a sequence of numbered datagrams from one container to another. They alternate between several flows. Each
// flow is a socket with its own port and flow label.
type traffic struct {
	name   string
	source netip.Addr // as the fabric sees it
	flows  int

	mu      sync.Mutex
	sent    []time.Time // times, by number
	came    []bool      // whether received, by number
	last    []int       // highest received number, by flow
	changed chan struct{}
	failed  error
}

// startTraffic sends to a port until the test ends.
func startTraffic(t *testing.T, l *lab.Lab, from, to string, port, flows int) *traffic {
	t.Helper()
	sender, err := l.Container(from)
	must(t, err)
	s := &traffic{name: from + " to " + to, source: sender.Plaintext, flows: flows, last: make([]int, flows),
		changed: make(chan struct{}, 1)}
	address := labtest.ReceiveNumbered(t, l, to, port, 0, s.receive)
	ctx, stop := context.WithCancel(context.Background())
	ended := labtest.RunIn(t, l, from, func() error {
		return s.send(ctx, &unix.SockaddrInet6{Port: port, Addr: address.As16()})
	})
	var running sync.WaitGroup
	running.Go(func() {
		if err := <-ended; err != nil {
			s.mu.Lock()
			s.failed = err
			s.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	return s
}

func (s *traffic) send(ctx context.Context, to unix.Sockaddr) error {
	sockets := make([]int, s.flows)
	for i := range sockets {
		fd, err := labtest.OpenFlow(firstPort + i)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		sockets[i] = fd
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for number := 0; ctx.Err() == nil; number++ {
		s.mu.Lock()
		s.sent, s.came = append(s.sent, time.Now()), append(s.came, false)
		s.mu.Unlock()
		if err := labtest.SendNumbered(sockets[number%s.flows], number, to); err != nil {
			return fmt.Errorf("datagram %d: %w", number, err)
		}
		<-tick.C
	}
	return nil
}

// receive records the arrival of a datagram.
func (s *traffic) receive(number int) {
	s.mu.Lock()
	if number < len(s.came) {
		s.came[number] = true
		s.last[number%s.flows] = max(s.last[number%s.flows], number)
	}
	s.mu.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// delivers waits until each flow has delivered a datagram that was sent at since or later. It fails if this takes
// longer than most.
func (s *traffic) delivers(t *testing.T, since time.Time, most time.Duration) {
	t.Helper()
	limit := time.NewTimer(time.Until(since.Add(most)))
	defer limit.Stop()
	for {
		silent, err := s.silent(since)
		must(t, err)
		if silent < 0 {
			return
		}
		select {
		case <-s.changed:
		case <-limit.C:
			t.Fatalf("%s: flow %d delivered nothing that was sent in the last %v", s.name, silent,
				time.Since(since).Round(time.Millisecond))
		}
	}
}

// silent returns the first flow that has not delivered any datagram sent since then, or -1.
func (s *traffic) silent(since time.Time) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for flow, number := range s.last {
		if number >= len(s.sent) || s.sent[number].Before(since) {
			return flow, s.failed
		}
	}
	return -1, s.failed
}

func (s *traffic) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sent)
}

// flowsCalmly checks that all datagrams of the next calm period arrive.
func (s *traffic) flowsCalmly(t *testing.T) {
	t.Helper()
	start := time.Now()
	s.delivers(t, start.Add(calm), calm+slack)
	if lost := s.lost(start, start.Add(calm)); len(lost) > 0 {
		t.Errorf("%s: %d datagrams were lost without a failure, the first %v after the beginning of the check", s.name,
			len(lost), lost[0].at.Sub(start).Round(time.Millisecond))
	}
}

// flow identifies one of a traffic's flows by its source address and number.
type flow struct {
	source netip.Addr
	number int
}

func (f flow) String() string { return fmt.Sprintf("flow %d of %v", f.number, f.source) }

type loss struct {
	flow flow
	at   time.Time
}

// lost returns the datagrams that were sent in a period and have not arrived, although later datagrams of the same flow
// have arrived.
func (s *traffic) lost(from, to time.Time) (all []loss) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, at := range s.sent {
		if i := number % s.flows; !at.Before(from) && at.Before(to) && !s.came[number] && number < s.last[i] {
			all = append(all, loss{flow{s.source, i}, at})
		}
	}
	return all
}

// overcomes waits after an event until no datagram was lost for a calm period. start is a time just before the event.
// Only datagrams that were sent between start and start+most may be lost. It returns the flows that lost datagrams.
func (s *traffic) overcomes(t *testing.T, event string, start time.Time, most time.Duration) (losers map[flow]bool) {
	t.Helper()
	most += slack
	last := start
	for from := start; ; from = last.Add(1) {
		s.delivers(t, from.Add(calm), most+calm+slack)
		lost := s.lost(from, from.Add(calm))
		if len(lost) == 0 {
			break
		}
		if last = lost[len(lost)-1].at; last.Sub(start) > most {
			t.Fatalf("%s: %s: a datagram of %v was lost %v after the event; the limit is %v", event, s.name,
				lost[len(lost)-1].flow, last.Sub(start), most)
		}
	}
	losers = map[flow]bool{}
	all := s.lost(start.Add(-calm), last.Add(1))
	for _, l := range all {
		losers[l.flow] = true
	}
	t.Logf("%s: %s: lost %d datagrams of %d flows in %v; the limit is %v", event, s.name, len(all), len(losers),
		last.Sub(start).Round(time.Millisecond), most)
	return losers
}
