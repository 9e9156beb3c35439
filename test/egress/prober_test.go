package egress_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// prober sends datagrams between places, and answers them whom it sees. It has all sockets, so it knows about each
// datagram whether it arrived, and whether its answer did. One thread sends, answers and receives: between places that
// are connected by veths, a datagram has usually arrived when the call that sends it returns.
type prober struct {
	bed
	places map[string]*place
	kept   map[flowKey]int // sockets of flows that continue from round to round
	rounds int
	sent   uint64   // number of the last datagram
	late   []string // datagrams of earlier rounds that arrived although they had to be dropped
}

type place struct {
	ns     *netns.Namespace
	server int // socket
}

// flowKey is all of a kept flow but its source port.
type flowKey struct {
	from       string
	source, to netip.Addr
}

// probePort is the port of the servers. Ports of new flows are a range of their own beside the kernel's, so that a flow
// of a round has a source port that no other round has used within the timeout of a session.
const (
	probePort     = 9
	firstPort     = 10000
	numberOfPorts = 22000
)

// How long a round waits: for an answer that must come, and, when all of these have come, for others.
const (
	answerTime = 3 * time.Second
	quiet      = 2 * time.Millisecond
)

// attempt is a datagram of a round.
type attempt struct {
	probe
	keep    bool // the flow of the rounds before and after
	must    bool // be answered
	never   bool // may it arrive
	number  uint64
	fd      int // or -1
	done    bool
	arrived bool // at the server
	outcome outcome
	seen    netip.Addr
}

func newProber(b bed) *prober {
	p := &prober{bed: b, places: map[string]*place{}, kept: map[flowKey]int{}}
	for _, name := range b.PingTargets() {
		p.enter(name)
	}
	b.Cleanup(func() {
		for name := range p.places {
			p.leave(name)
		}
	})
	return p
}

// enter starts the server of a place.
func (p *prober) enter(name string) {
	p.Helper()
	at := netip.IPv6Unspecified()
	if slices.Contains(p.NodeNames(), name) {
		at = p.node(name) // the kernel would choose the uplink's as the source of answers
	}
	ns, err := p.Namespace(name)
	must(p.T, err)
	s := &place{ns: ns}
	must(p.T, ns.Do(func() (err error) {
		s.server, err = openSocket(netip.AddrPortFrom(at, probePort))
		return err
	}))
	p.places[name] = s
}

// leave closes all sockets of a place, because its namespace is about to end.
func (p *prober) leave(name string) {
	for key, fd := range p.kept {
		if key.from == name {
			unix.Close(fd)
			delete(p.kept, key)
		}
	}
	unix.Close(p.places[name].server)
	p.places[name].ns.Close()
	delete(p.places, name)
}

// openSocket opens a UDP socket in the thread's namespace. Connected sockets to different destinations share a port.
func openSocket(at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = unix.Bind(fd, sockaddr(at))
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("bind %v: %w", at, err), unix.Close(fd))
	}
	return fd, nil
}

func sockaddr(at netip.AddrPort) *unix.SockaddrInet6 {
	return &unix.SockaddrInet6{Addr: at.Addr().As16(), Port: int(at.Port())}
}

// round sends a datagram for each attempt, and returns when those that must be answered are, or have not been for
// answerTime, and nothing else has happened for the time quiet. Silence need not be observed for longer: a datagram
// that may never arrive says so, and if it arrives in a later round, that one reports it.
func (p *prober) round(all []attempt) {
	p.Helper()
	p.rounds++
	base := p.sent + 1
	byPlace := map[string][]*attempt{}
	for i := range all {
		a := &all[i]
		p.sent++
		a.number, a.fd, a.outcome = p.sent, -1, silent
		byPlace[a.from] = append(byPlace[a.from], a)
	}
	p.forget(all)
	must(p.T, p.places[p.NodeNames()[0]].ns.Do(func() error {
		for name, attempts := range byPlace {
			if err := unix.Setns(p.places[name].ns.FD(), unix.CLONE_NEWNET); err != nil {
				return err
			}
			for _, a := range attempts {
				if err := p.send(a); err != nil {
					return fmt.Errorf("%s: %w", a.what, err)
				}
				p.serve(base, all)
			}
		}
		return p.receive(base, all)
	}))
	for i := range all {
		if a := &all[i]; !a.keep && a.fd >= 0 {
			unix.Close(a.fd)
		}
	}
}

// forget ends the flows that no attempt continues.
func (p *prober) forget(all []attempt) {
	used := map[flowKey]bool{}
	for _, a := range all {
		used[a.key()] = true
	}
	for key, fd := range p.kept {
		if !used[key] {
			unix.Close(fd)
			delete(p.kept, key)
		}
	}
}

func (p probe) key() flowKey { return flowKey{p.from, p.source, p.to} }

// newPort is the source port of the new flows of the round.
func (p *prober) newPort() uint16 { return uint16(firstPort + p.rounds%numberOfPorts) }

// send sends the datagram of an attempt from the thread's namespace.
func (p *prober) send(a *attempt) (err error) {
	fd, has := p.kept[a.key()]
	if !a.keep || !has {
		at := a.source
		if !at.IsValid() {
			at = netip.IPv6Unspecified()
		}
		port := uint16(0)
		if !a.keep {
			port = p.newPort()
		}
		if fd, err = openSocket(netip.AddrPortFrom(at, port)); err != nil {
			return err
		}
		if err := unix.Connect(fd, sockaddr(netip.AddrPortFrom(a.to, probePort))); err != nil {
			a.end(err)
			return unix.Close(fd)
		}
		if a.keep {
			p.kept[a.key()] = fd
		}
	}
	a.fd = fd
	if a.keep {
		p.drain(fd)
	}
	if _, err := unix.Write(fd, a.datagram()); err != nil {
		a.end(err)
	}
	return nil
}

// drain takes from a socket what came after its round.
func (p *prober) drain(fd int) {
	for range numberOfPorts {
		if _, err := unix.Read(fd, make([]byte, answerLength)); errors.Is(err, unix.EAGAIN) {
			return
		}
	}
}

// A datagram has its number, and whether it may never arrive; its answer has the number and whom the server sees.
const (
	datagramLength = 9
	answerLength   = 24
)

func (a *attempt) datagram() []byte {
	d := binary.BigEndian.AppendUint64(make([]byte, 0, datagramLength), a.number)
	if a.never {
		return append(d, 1)
	}
	return append(d, 0)
}

// end is the end of an attempt, with an answer or with an error.
func (a *attempt) end(err error) { a.done, a.outcome = true, outcomeOf(err) }

// serve answers all datagrams that have arrived. base is the number of the round's first one.
func (p *prober) serve(base uint64, all []attempt) {
	for name, s := range p.places {
		for range len(all) {
			var d [answerLength]byte
			n, from, err := unix.Recvfrom(s.server, d[:], 0)
			sender, is := from.(*unix.SockaddrInet6)
			if err != nil || n != datagramLength || !is {
				break
			}
			number := binary.BigEndian.Uint64(d[:])
			switch {
			case number >= base:
				all[number-base].arrived = true
			case d[8] == 1:
				p.late = append(p.late, fmt.Sprintf("a datagram from %v arrived at %s after its round",
					netip.AddrFrom16(sender.Addr), name))
			}
			copy(d[8:], sender.Addr[:])
			unix.Sendto(s.server, d[:], 0, sender) // an error here is an answer that does not come
		}
	}
}

// receive serves, and takes answers, until the round ends.
func (p *prober) receive(base uint64, all []attempt) error {
	for end := time.Now().Add(answerTime); ; {
		p.serve(base, all)
		wait, fds := quiet, make([]unix.PollFd, 0, len(all)+len(p.places))
		for i := range all {
			a := &all[i]
			if a.takeAnswer(); a.done {
				continue
			}
			fds = append(fds, unix.PollFd{Fd: int32(a.fd), Events: unix.POLLIN})
			if a.must {
				wait = time.Until(end)
			}
		}
		for _, s := range p.places {
			fds = append(fds, unix.PollFd{Fd: int32(s.server), Events: unix.POLLIN})
		}
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll: %w", err)
		}
		if err == nil && n == 0 || time.Now().After(end) {
			return nil
		}
	}
}

// takeAnswer receives the answer of an attempt, or the error instead, if it has come.
func (a *attempt) takeAnswer() {
	for !a.done {
		var d [answerLength]byte
		n, err := unix.Read(a.fd, d[:])
		switch {
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil:
			a.end(err)
		case n == answerLength && binary.BigEndian.Uint64(d[:]) == a.number:
			a.end(nil)
			a.seen = netip.AddrFrom16([16]byte(d[8:]))
		}
	}
}
