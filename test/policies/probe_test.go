package policies_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/policy/policytest"
)

const (
	clientPort   = 5000 // the same in all trials, so that each trial must change the verdict of existing flows
	sentinelPort = 7
	patience     = 5 * time.Second // timeout of packets that must arrive
)

var serverPorts = []uint16{80, 81}

// prober sends packets between pods and returns which of them arrived. It needs no timeout for dropped packets:
// everything runs on one CPU, whose queues are FIFO, so when a sentinel has arrived, every earlier packet has arrived
// or was dropped. Sentinels go between all containers of a tenant without policies, which has two containers on each
// node.
type prober struct {
	addresses map[string]netip.Addr // destination addresses by container
	spaces    map[string]*netns.Namespace
	clients   map[string]int // datagram sockets, by pod
	servers   map[end]server
	sentinels map[string]int
	legs      int // how many nodes' devices a packet may pass one after the other
	round     uint32
}

// end is the address of a server.
type end struct {
	pod  string
	port uint16
}

type server struct{ datagrams, connections int }

// newProber listens on the pods' ports.
func newProber(t *testing.T, l *lab.Lab, pods, others []string, address func(lab.ContainerStatus) netip.Addr) *prober {
	t.Helper()
	p := &prober{addresses: map[string]netip.Addr{}, spaces: map[string]*netns.Namespace{}, clients: map[string]int{},
		servers: map[end]server{}, sentinels: map[string]int{}, legs: 1}
	t.Cleanup(p.close)
	for _, name := range slices.Concat(pods, others) {
		c, err := l.Container(name)
		if err != nil {
			t.Fatal(err)
		}
		p.addresses[name] = address(c)
		if p.spaces[name], err = l.Namespace(name); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range pods {
		if err := p.spaces[name].Do(func() (err error) {
			for _, port := range serverPorts {
				var s server
				if s.datagrams, err = p.open(name, unix.SOCK_DGRAM, port); err != nil {
					return err
				}
				if s.connections, err = p.open(name, unix.SOCK_STREAM, port); err != nil {
					return err
				}
				p.servers[end{name, port}] = s
			}
			p.clients[name], err = p.open(name, unix.SOCK_DGRAM, clientPort)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range others {
		if err := p.spaces[name].Do(func() (err error) {
			p.sentinels[name], err = p.open(name, unix.SOCK_DGRAM, sentinelPort)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p *prober) close() {
	for _, ns := range p.spaces {
		ns.Close()
	}
	for _, s := range p.servers {
		unix.Close(s.datagrams)
		unix.Close(s.connections)
	}
	for _, fd := range p.clients {
		unix.Close(fd)
	}
	for _, fd := range p.sentinels {
		unix.Close(fd)
	}
}

// open returns a nonblocking socket, bound to a port of a container, in the thread's namespace.
func (p *prober) open(name string, kind int, port uint16) (int, error) {
	fd, err := unix.Socket(family(p.addresses[name]), kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, p.place(end{name, port})); err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1024)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("port %d of %s at %v: %w", port, name, p.addresses[name], err)
	}
	return fd, nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (p *prober) place(e end) unix.Sockaddr {
	if a := p.addresses[e.pod]; a.Is4() {
		return &unix.SockaddrInet4{Port: int(e.port), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(e.port), Addr: p.addresses[e.pod].As16()}
}

// arrived is the result of a probe: whether the datagram and the response arrived, or whether the connection was
// established.
type arrived struct{ there, back bool }

// try sends all probes before it waits for results.
func (p *prober) try(probes []policytest.Probe) (came []arrived, err error) {
	err = netns.OnThread(func() error {
		var cpu unix.CPUSet
		cpu.Set(0)
		if err := unix.SchedSetaffinity(0, &cpu); err != nil {
			return err
		}
		came, err = p.tryHere(probes)
		return err
	})
	return came, err
}

func (p *prober) tryHere(probes []policytest.Probe) ([]arrived, error) {
	p.round++
	came, sockets := make([]arrived, len(probes)), make([]int, len(probes))
	var inside string
	for i, probe := range probes {
		if probe.From != inside {
			if err := unix.Setns(p.spaces[probe.From].FD(), unix.CLONE_NEWNET); err != nil {
				return nil, err
			}
			inside = probe.From
		}
		to := p.place(end{probe.To, probe.Port})
		if sockets[i] = -1; probe.Protocol == policy.UDP {
			// The kernel returns an error for a drop at egress.
			if err := unix.Sendto(p.clients[probe.From], p.letter(i), 0, to); err != nil &&
				!errors.Is(err, unix.ENOBUFS) {
				return nil, fmt.Errorf("%s to %s: %w", probe.From, probe.To, err)
			}
			continue
		}
		fd, err := unix.Socket(family(p.addresses[probe.From]), unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
			0)
		if err != nil {
			return nil, err
		}
		sockets[i] = fd
		defer p.hangUp(fd)
		if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
			return nil, fmt.Errorf("%s to %s: %w", probe.From, probe.To, err)
		}
	}
	// After the first round, all requests have arrived, and after the second round, all responses. If an expected
	// packet is missing then, something other than a policy has dropped it, or it is late.
	begun := time.Now()
	for range 2 {
		if err := p.settle(); err != nil {
			return nil, err
		}
		if err := p.look(probes, sockets, came); err != nil {
			return nil, err
		}
	}
	for missing(probes, came) && time.Since(begun) < patience {
		if err := p.settle(); err != nil {
			return nil, err
		}
		if err := p.look(probes, sockets, came); err != nil {
			return nil, err
		}
	}
	return came, p.hangUpServers()
}

func missing(probes []policytest.Probe, came []arrived) bool {
	for i, probe := range probes {
		if probe.Arrives && !came[i].back {
			return true
		}
	}
	return false
}

// letter returns the content of a probe's datagram.
func (p *prober) letter(i int) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, p.round), uint32(i))
}

// look reads the packets that have arrived so far, and responds to them.
func (p *prober) look(probes []policytest.Probe, sockets []int, came []arrived) error {
	for e, s := range p.servers {
		if err := p.read(s.datagrams, func(i int, letter []byte, from unix.Sockaddr) error {
			if i >= len(probes) || probes[i].To != e.pod || probes[i].Port != e.port {
				return fmt.Errorf("%v received datagram %d of another destination", e, i)
			}
			came[i].there = true
			if err := unix.Sendto(s.datagrams, letter, 0, from); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return fmt.Errorf("answer of %v: %w", e, err)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	for _, fd := range p.clients {
		if err := p.read(fd, func(i int, _ []byte, _ unix.Sockaddr) error {
			came[i].back = true
			return nil
		}); err != nil {
			return err
		}
	}
	for i, fd := range sockets {
		if fd < 0 || came[i].back {
			continue
		}
		if _, err := unix.Getpeername(fd); err == nil { // the connection is established
			came[i] = arrived{true, true}
		}
	}
	return nil
}

// read reads all datagrams of this round from a socket.
func (p *prober) read(fd int, each func(i int, letter []byte, from unix.Sockaddr) error) error {
	for b := make([]byte, 16); ; {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
		if n != 8 || binary.BigEndian.Uint32(b) != p.round {
			return fmt.Errorf("a datagram of round %x in round %d: it was dropped there", b[:n], p.round)
		}
		if err := each(int(binary.BigEndian.Uint32(b[4:])), b[:n], from); err != nil {
			return err
		}
	}
}

// settle waits until all packets sent earlier on this CPU have arrived or were dropped. A sentinel passes from one node
// to another, so it takes as many of them, one after the other, as the packets take legs.
func (p *prober) settle() error {
	for range p.legs {
		if err := p.sentinelsPass(); err != nil {
			return err
		}
	}
	return nil
}

func (p *prober) sentinelsPass() error {
	for from, fd := range p.sentinels {
		for to := range p.sentinels {
			if from != to {
				if err := unix.Sendto(fd, p.letter(0), 0, p.place(end{to, sentinelPort})); err != nil {
					return fmt.Errorf("sentinel from %s to %s: %w", from, to, err)
				}
			}
		}
	}
	for name, fd := range p.sentinels {
		for n := 0; n < len(p.sentinels)-1; {
			ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
			if err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
			if err == nil && ready == 0 {
				return fmt.Errorf("the sentinels to %s did not arrive", name)
			}
			if err := p.read(fd, func(int, []byte, unix.Sockaddr) error { n++; return nil }); err != nil {
				return err
			}
		}
	}
	return nil
}

// hangUp closes a connection with a reset, so that no packets of the connection are in flight later.
func (p *prober) hangUp(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}

// hangUpServers resets all connections in the accept queues.
func (p *prober) hangUpServers() error {
	for e, s := range p.servers {
		for {
			fd, _, err := unix.Accept4(s.connections, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				return fmt.Errorf("%v: %w", e, err)
			}
			p.hangUp(fd)
		}
	}
	return nil
}
