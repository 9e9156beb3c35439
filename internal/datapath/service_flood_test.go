package datapath

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
)

// serviceClient is a container that opens flows to a service of its tenant, from one port after the other.
type serviceClient struct {
	*serviceBench
	c                *testContainer
	service, backend netip.Addr // as the container sees the service, and the plaintext address of the backend
	port             uint16     // of the last flow
}

// flowPacket is a packet of a flow: of the client, or an answer.
type flowPacket struct {
	answer bool
	body   func(client uint16) packet.Body
}

func sends(flags packet.TCPFlags) flowPacket {
	return flowPacket{body: func(port uint16) packet.Body { return tcp(port, farPort, flags) }}
}

var (
	handshake = []flowPacket{
		sends(packet.SYN),
		{true, func(port uint16) packet.Body { return tcp(atPort, port, synAck) }},
		sends(packet.ACK),
	}
	exchanged = []flowPacket{
		{body: func(port uint16) packet.Body { return udp(port, farPort) }},
		{true, func(port uint16) packet.Body { return udp(atPort, port) }},
	}
)

// open opens flows from new ports, calls after after each packet, and returns how many had a packet dropped.
func (c *serviceClient) open(t *testing.T, flows int, packets []flowPacket, after func()) (refused int) {
	t.Helper()
	o := &c.datapath.Objects
	for range flows {
		c.port++
		for _, p := range packets {
			program, ctx := o.PilContainer, skb{Ifindex: c.c.ifindex(), IngressIfindex: c.c.ifindex()}
			frame := c.frame(between(c.c.seen(), c.service, p.body(c.port)))
			if p.answer {
				program, ctx = o.PilUplinkIn, skb{Ifindex: c.uplinkIfindex(), IngressIfindex: c.uplinkIfindex()}
				frame = between(c.backend, c.c.plain(), p.body(c.port)).Frame(c.uplinkMAC, host.ContainerMAC)
			}
			verdict, err := program.Run(&ebpf.RunOptions{Data: frame, Context: ctx})
			must(t, err)
			if verdict != verdictRedirect {
				refused++
				break
			}
			after()
		}
	}
	return refused
}

// TestServiceFloods: one container fills the table of sessions with flows to a service, and goes on. At least 99 % of
// new flows of another tenant to its own service, and of another container of the same tenant to the same service, get
// their sessions and keep them.
func TestServiceFloods(t *testing.T) {
	const (
		// The second session of a flow may evict the first one, which is half open, if they share a bucket. With this
		// table one of 2,000 flows does.
		sessions = 8192 * slotsPerBucket
		flows    = 200 // with two sessions each
		flooding = 10  // flows between two packets
	)
	b := &serviceBench{progBench: newSessionBench(t, sessions), of: serving(blue, 7)}
	must(t, b.datapath.Objects.PolSubjectsV1.Delete(bpfobj.PilasterPolTargetKey{Tenant: 1, App: appAny}))
	b.serve(t)
	far := allocatedOf(red, address.Plain{Node: b.far.prefix, Tenant: 2, App: 1, Index: 77}).Addr()
	b.put(t, b.reds, farPort, dpapi.Backend{
		Plain: far, Seen: address.NewCipher(red.Current().Key).Encrypt(far), Port: atPort,
	})
	for _, flood := range []struct {
		name    string
		by      *serviceClient
		packets []flowPacket
	}{
		{"half-open connections of another tenant", &serviceClient{b, b.r1, b.reds, far, 0}, handshake[:1]},
		{"connections of another tenant", &serviceClient{b, b.r1, b.reds, far, 0}, handshake},
		{"datagrams of another tenant", &serviceClient{b, b.r1, b.reds, far, 0}, exchanged[:1]},
		{"datagrams with answers of another tenant", &serviceClient{b, b.r1, b.reds, far, 0}, exchanged},
		{"connections of another container", &serviceClient{b, b.b2, b.address, b.b3.Addr(), 0}, handshake},
	} {
		b.clearSessions(t)
		client, refused := &serviceClient{b, b.b1, b.address, b.b3.Addr(), 0}, 0
		must(t, b.ns.Do(func() error {
			flood.by.open(t, sessions*3/4, flood.packets, func() {})
			if s, err := b.datapath.Sessions(); err != nil || s.Used < sessions*95/100 {
				t.Fatalf("%s: the table of %d has %+v, %v", flood.name, sessions, s, err)
			}
			refused = client.open(t, flows, handshake, func() { flood.by.open(t, flooding, flood.packets, func() {}) })
			return nil
		}))
		own, all := b.usage(t, b.b1, blue)
		if refused > flows/100 || min(own, all) < 2*flows*99/100 {
			t.Errorf("%s: %d of %d new flows were refused; %d of %d sessions are left, %d of the tenant", flood.name,
				refused, flows, own, 2*flows, all)
		}
	}
}
