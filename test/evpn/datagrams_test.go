package evpn_test

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/netns"
)

const datagramPort = 7

// receive passes on the numbers of datagrams that arrive in a namespace.
func receive(t testing.TB, ns *netns.Namespace, arrived chan<- int) (closed func()) {
	t.Helper()
	var conn net.PacketConn
	must(t, ns.Do(func() (err error) {
		conn, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", datagramPort))
		return err
	}))
	var done sync.WaitGroup
	done.Go(func() {
		for buffer := make([]byte, 64); ; {
			n, _, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			if number, err := strconv.Atoi(string(buffer[:n])); err == nil {
				arrived <- number
			}
		}
	})
	return func() { conn.Close(); done.Wait() }
}

// send sends datagrams with the numbers 0, 1, … from a namespace until stop is called, which returns how many.
func send(t testing.TB, ns *netns.Namespace, to string, every time.Duration) (stop func() (sent int)) {
	t.Helper()
	var conn net.Conn
	must(t, ns.Do(func() (err error) {
		conn, err = net.Dial("udp4", net.JoinHostPort(to, strconv.Itoa(datagramPort)))
		return err
	}))
	end, sent := make(chan struct{}), 0
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for ; ; sent++ {
			select {
			case <-tick.C:
				conn.Write([]byte(strconv.Itoa(sent)))
			case <-end:
				return
			}
		}
	})
	return sync.OnceValue(func() int { close(end); done.Wait(); conn.Close(); return sent })
}

// flow is a stream of numbered datagrams.
type flow struct {
	name    string
	arrived chan int
	seen    map[int]bool
	first   int // number that arrived first
	stop    func() int
}

const (
	flowEvery = 2 * time.Millisecond // between the datagrams of a flow
	flowEnd   = 10 * time.Second     // without a datagram after the last one was sent
)

// start starts a flow, and waits for its first datagram.
func start(t *testing.T, name string, from, to *netns.Namespace, address string) *flow {
	t.Helper()
	f := &flow{name: name, arrived: make(chan int, 1<<18), seen: map[int]bool{}} // minutes: the receiver never waits
	closed := receive(t, to, f.arrived)
	f.stop = send(t, from, address, flowEvery)
	t.Cleanup(func() { f.stop(); closed() })
	if !f.next(patience) {
		t.Fatalf("%s: no datagram in %v", name, patience)
	}
	for number := range f.seen {
		f.first = number
	}
	return f
}

// next reports whether a further datagram arrives in a time.
func (f *flow) next(limit time.Duration) bool {
	select {
	case number := <-f.arrived:
		f.seen[number] = true
		return true
	case <-time.After(limit):
		return false
	}
}

// await waits for a number of further datagrams.
func (f *flow) await(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		if !f.next(patience) {
			t.Fatalf("%s: %d of %d datagrams in %v", f.name, i, n, patience)
		}
	}
}

// end ends the flow, and returns how many datagrams were sent after the first that arrived, and which of them are lost.
func (f *flow) end() (sent int, lost []int) {
	all := f.stop()
	for !f.seen[all-1] && f.next(flowEnd) {
	}
	for len(f.arrived) > 0 {
		f.next(0)
	}
	for number := f.first; number < all; number++ {
		if !f.seen[number] {
			lost = append(lost, number)
		}
	}
	return all - f.first, lost
}
