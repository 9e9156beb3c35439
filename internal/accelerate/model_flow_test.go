package accelerate_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Kinds of datagrams: those that the cache may forward, and those with an IP option, which only the overlay forwards.
const (
	cached = iota
	control
	kinds
)

// Ways of datagrams.
const (
	there = iota
	back
	ways
)

var wayNames = [ways]string{"there", "back"}

// interval is the time between the datagrams of a flow.
const interval = 5 * time.Millisecond

// arrival is a datagram that has arrived: its number, and when the client sent it, after the model's start. A datagram
// counts by the time at which it was sent, so it does not matter how late its receiver reads it.
type arrival struct {
	number uint64
	sent   time.Duration
}

// record has the arrivals of one kind and way.
type record struct {
	total atomic.Uint64 // since the model's start
	mu    sync.Mutex
	all   []arrival
}

func (r *record) add(a arrival) { r.total.Add(1); r.mu.Lock(); r.all = append(r.all, a); r.mu.Unlock() }

// since returns the arrivals that were sent at a time or later, in the order of their numbers.
func (r *record) since(from time.Duration) (all []arrival) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.all {
		if a.sent >= from {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, func(a, b arrival) int { return int(a.number) - int(b.number) })
	return all
}

// first returns the first arrival that was sent at a time or later.
func (r *record) first(from time.Duration) (arrival, bool) {
	all := r.since(from)
	if len(all) == 0 {
		return arrival{}, false
	}
	return all[0], true
}

// forget removes what was sent before a time, except of the last arrival.
func (r *record) forget(before time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := func(a arrival) bool { return a.sent < before }
	var last arrival
	for _, a := range r.all {
		if old(a) && a.number > last.number {
			last = a
		}
	}
	r.all = slices.DeleteFunc(r.all, func(a arrival) bool { return old(a) && a != last })
}

// longestLoss returns the longest time without an arrival, of which a datagram was lost.
func longestLoss(all []arrival) (longest time.Duration) {
	for i := 1; i < len(all); i++ {
		if all[i].number > all[i-1].number+1 {
			longest = max(longest, all[i].sent-all[i-1].sent)
		}
	}
	return longest
}

// pod is a container of the model, which may be deleted and started again with the same address.
type pod struct {
	*node
	device  string
	host    int
	addr    netip.Addr
	ns      *netns.Namespace // nil while it does not run
	sockets []*net.UDPConn
	readers sync.WaitGroup
}

// dualFlow has a client, which sends numbered datagrams of both kinds, and a server, which sends them back.
type dualFlow struct {
	number         int
	client, server *pod
	arrived        [kinds][ways]record
	epoch          time.Time
	late           *atomic.Int64 // how late the client sent at most, in ns

	mu   sync.Mutex
	from [kinds]*net.UDPConn // of the client, nil while it does not run
}

func (f *dualFlow) String() string {
	return fmt.Sprintf("flow %d from %s of node %d to %s of node %d", f.number, f.client.device, f.client.node.number,
		f.server.device, f.server.node.number)
}

// port returns the port of the client, or of the server.
func (f *dualFlow) port(p *pod, kind int) uint16 {
	port := uint16(6100 + 10*f.number + kind)
	if p == f.server {
		port += 1000
	}
	return port
}

// ports are those of both kinds, as iptables has them.
func (f *dualFlow) ports(p *pod) string {
	return fmt.Sprintf("%d:%d", f.port(p, cached), f.port(p, control))
}

// run sends datagrams until stop is closed.
func (f *dualFlow) run(stop chan struct{}) {
	payload := make([]byte, 16)
	for number := uint64(1); !isClosed(stop); number++ {
		due := time.Now().Add(interval)
		f.mu.Lock()
		binary.BigEndian.PutUint64(payload, number)
		binary.BigEndian.PutUint64(payload[8:], uint64(time.Since(f.epoch)))
		for kind, c := range f.from {
			if c != nil {
				_ = c.SetWriteDeadline(due)
				to := netip.AddrPortFrom(f.server.addr, f.port(f.server, kind))
				_, _ = c.WriteToUDPAddrPort(payload, to) // as all datagrams, it may be lost
			}
		}
		f.mu.Unlock()
		time.Sleep(time.Until(due))
		for late := int64(time.Since(due)); ; {
			most := f.late.Load()
			if late <= most || f.late.CompareAndSwap(most, late) {
				break
			}
		}
	}
}

// listen opens a flow's sockets in a pod, and reads them.
func (f *dualFlow) listen(p *pod) error {
	for kind := range kinds {
		var c *net.UDPConn
		err := p.ns.Do(func() (err error) {
			at := netip.AddrPortFrom(p.addr, f.port(p, kind))
			c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
			if err == nil && kind == control {
				err = setOption(c)
			}
			return err
		})
		if err != nil {
			return err
		}
		p.sockets = append(p.sockets, c)
		way := back
		if p == f.server {
			way = there
		} else {
			f.mu.Lock()
			f.from[kind] = c
			f.mu.Unlock()
		}
		p.readers.Go(func() { f.read(c, kind, way) })
	}
	return nil
}

func (f *dualFlow) read(c *net.UDPConn, kind, way int) {
	b := make([]byte, 64)
	for {
		n, peer, err := c.ReadFromUDPAddrPort(b)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil || n != 16:
			continue
		}
		if way == there {
			_, _ = c.WriteToUDPAddrPort(b[:n], peer)
		}
		f.arrived[kind][way].add(arrival{
			binary.BigEndian.Uint64(b), time.Duration(binary.BigEndian.Uint64(b[8:])),
		})
	}
}

// setOption gives the datagrams of a socket an IP option without effect.
func setOption(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = syscall.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01")
	})
	return errors.Join(err, failed)
}

// start starts the pod and its ends of flows. As the plugins of container networks do, it announces its address.
func (p *pod) start(flows []*dualFlow) (err error) {
	if p.ns, err = p.node.start(p.device, p.host); err != nil {
		return err
	}
	for _, f := range flows {
		if f.client == p || f.server == p {
			if err := f.listen(p); err != nil {
				return err
			}
		}
	}
	return p.ns.Do(func() error {
		c, err := net.Dial("udp4", "203.0.113.1:9") // by the node, which drops it
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("announcement"))
		return errors.Join(err, c.Close())
	})
}

// stop deletes the pod.
func (p *pod) stop(flows []*dualFlow) error {
	for _, f := range flows {
		if f.client == p {
			f.mu.Lock()
			f.from = [kinds]*net.UDPConn{}
			f.mu.Unlock()
		}
	}
	err := p.node.stop(p.device, p.ns)
	for _, c := range p.sockets {
		err = errors.Join(err, c.Close())
	}
	p.readers.Wait()
	p.ns, p.sockets = nil, nil
	return err
}
