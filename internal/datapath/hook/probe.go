package hook

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// Messages of bpf/net/nimitz/offload.h.
const (
	probeKind       = 5
	indexToFrontend = 255
	nshClass        = 0xfff6
	nshTTL          = 63
)

// Probe sends a probe to the program of a frontend. The frontend's agent need not run.
func (d *Hooks) Probe(p dpapi.Probe, frontend netip.Prefix) error {
	to := pipeline.VTEP(frontend)
	if err := d.probing.send(d, probe(p, pipeline.VTEP(d.NodePrefix), to), to); err != nil {
		return fmt.Errorf("probe frontend %v: %w", to, err)
	}
	return nil
}

// probing is the socket of all probes, open from the first one on.
type probing struct {
	mu   sync.Mutex
	fd   int
	open bool
}

// send sends a packet. The lock is held until it is sent: once the socket is closed, its number may be another file's.
func (p *probing) send(d *Hooks, b []byte, to netip.Addr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.open {
		if err := d.Node.Do(func() (err error) { p.fd, err = probeSocket(d.AcceptMark); return err }); err != nil {
			return err
		}
		p.open = true
	}
	return unix.Sendto(p.fd, b, 0, &unix.SockaddrInet6{Addr: to.As16()})
}

func probeSocket(mark uint32) (int, error) {
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return -1, errors.Join(err, unix.Close(s))
	}
	return s, nil
}

// CloseProbes closes the socket of probes. The next probe opens it again.
func (d *Hooks) CloseProbes() error {
	d.probing.mu.Lock()
	defer d.probing.mu.Unlock()
	if !d.probing.open {
		return nil
	}
	d.probing.open = false
	return unix.Close(d.probing.fd)
}

// probe returns the IPv6 packet of a probe: UDP, VXLAN-GPE, NSH, an empty frame.
func probe(p dpapi.Probe, from, to netip.Addr) []byte {
	var message bpfobj.PilasterOffloadMsg
	message.Class, message.Type = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, nshClass)), 1
	message.Length, message.Version, message.Kind = uint8(binary.Size(message)-4), 1, probeKind
	message.Epoch = binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, p.Epoch))
	nsh := 8 + binary.Size(message)
	length := 8 + 8 + nsh + 14 + 40
	b := binary.BigEndian.AppendUint32(nil, 6<<28)
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	b = append(b, unix.IPPROTO_UDP, 64)
	b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	for _, v := range []uint16{0xc000, pipeline.OffloadPort, uint16(length), 0} { // RFC 6935
		b = binary.BigEndian.AppendUint16(b, v)
	}
	for _, v := range []uint32{
		0x0c000004, p.VNI << 8, // VXLAN-GPE: a VNI, and NSH next
		nshTTL<<22 | uint32(nsh/4)<<16 | 2<<8 | 3, p.Offload<<8 | indexToFrontend,
	} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	b, _ = binary.Append(b, binary.NativeEndian, message) // its size is fixed
	b = append(append(b, make([]byte, 12)...), 0x86, 0xdd)
	b = append(b, 6<<4, 0, 0, 0, 0, 0, unix.IPPROTO_NONE, 1)
	return append(b, make([]byte, 32)...)
}

// ProbeAnswered returns how long ago a frontend's program has last answered a probe; false if it never has.
func (d *Hooks) ProbeAnswered(offload uint32, frontend netip.Prefix) (ago time.Duration, ok bool, err error) {
	var at uint64
	key := bpfobj.PilasterProbeKey{Frontend: bpfobj.ToAddr(frontend.Addr()).Hi, Offload: offload}
	switch err := d.Objects.NimProbesV2.Lookup(key, &at); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("read the answers of frontends: %w", err)
	case at == 0:
		return 0, false, nil
	}
	ago, err = sinceMonotonic(at)
	return ago, err == nil, err
}

// awaitAnswers makes the entries for answers of these frontends, and removes those of others.
func (d *Hooks) awaitAnswers(of map[bpfobj.PilasterProbeKey]bool) error {
	m, awaited := d.Objects.NimProbesV2, map[bpfobj.PilasterProbeKey]uint64{}
	err := bpfobj.ReadEntries(m, awaited)
	if err == nil {
		err = bpfobj.DeleteOthers(m, of)
	}
	if err != nil {
		return fmt.Errorf("remove the answers of former frontends: %w", err)
	}
	for key := range of {
		if _, there := awaited[key]; there {
			continue
		}
		if err := m.Put(key, uint64(0)); err != nil {
			return fmt.Errorf("await the answers of a frontend: %w", err)
		}
	}
	return nil
}

// Messages counts the messages that this node has sent, by offload, by kind. The counters of an offload begin when this
// node learns of it.
func (d *Hooks) Messages() (map[uint32]dpapi.Messages, error) {
	for {
		all := map[uint32]dpapi.Messages{}
		var id uint32
		var each []dpapi.Messages
		entries := d.Objects.NimSentV2.Iterate()
		for entries.Next(&id, &each) {
			var sum dpapi.Messages
			for _, per := range each {
				for kind, n := range per {
					sum[kind] += n
				}
			}
			all[id] = sum
		}
		if err := entries.Err(); errors.Is(err, ebpf.ErrIterationAborted) {
			continue // an offload began or ended meanwhile
		} else if err != nil {
			return nil, fmt.Errorf("read the counters of offloads: %w", err)
		}
		return all, nil
	}
}

// countMessages makes the counters of these offloads, and removes those of others.
func (d *Hooks) countMessages(offloads map[uint32]bool) error {
	counted, err := d.Messages()
	if err != nil {
		return err
	}
	m := d.Objects.NimSentV2
	for id := range counted {
		if offloads[id] {
			continue
		}
		if err := m.Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the counters of offload %d: %w", id, err)
		}
	}
	for id := range offloads {
		if _, there := counted[id]; there {
			continue
		}
		if err := m.Put(id, make([]dpapi.Messages, ebpf.MustPossibleCPU())); err != nil {
			return fmt.Errorf("count the messages of offload %d: %w", id, err)
		}
	}
	return nil
}

// ProbeGateway sends a probe to the program of an egress gateway. The gateway's agent need not run.
func (d *Hooks) ProbeGateway(node netip.Prefix) error {
	to := tenant.EgressTunnel(node)
	if err := d.probing.send(d, gatewayProbe(tenant.EgressTunnel(d.NodePrefix), to), to); err != nil {
		return fmt.Errorf("probe egress gateway %v: %w", to, err)
	}
	return nil
}

// gatewayProbe returns an IPv6 packet without an upper layer: struct gateway_probe of bpf/net/netpila/gateway.h.
func gatewayProbe(from, to netip.Addr) []byte {
	b := binary.BigEndian.AppendUint32(nil, 6<<28)
	b = append(binary.BigEndian.AppendUint16(b, 8), unix.IPPROTO_NONE, 64)
	b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	return append(b, 'P', 'G', 'W', 'P', 1, 0, 0, 0)
}

// GatewayAnswered returns how long ago an egress gateway has last answered a probe; false if it never has.
func (d *Hooks) GatewayAnswered(node netip.Prefix) (ago time.Duration, ok bool, err error) {
	var at uint64
	switch err := d.Objects.PilGwanswers.Lookup(bpfobj.ToAddr(node.Addr()).Hi, &at); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("read the answers of egress gateways: %w", err)
	}
	ago, err = sinceMonotonic(at)
	return ago, err == nil, err
}

// sinceMonotonic returns how long ago a time of CLOCK_MONOTONIC, in ns, was.
func sinceMonotonic(at uint64) (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, err
	}
	return time.Duration(now.Nano() - int64(at)), nil
}
