package demo

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
)

// waitTime is the timeout for a packet that must arrive.
const waitTime = 5 * time.Second

// packetLength is the MTU of the fabric. With a single byte of encapsulation, the packet would be too long.
const packetLength = 1500

// sighting is a captured packet.
type sighting struct {
	packet packet.Packet
	length int // of the IPv6 packet, as captured
}

// places captures one packet from b1 to b3 in three places: in b1, on the fabric and in b3.
func (p *proof) places(ctx context.Context) error {
	b1, err := p.lab.Container("b1")
	if err != nil {
		return err
	}
	b3, err := p.lab.Container("b3")
	if err != nil {
		return err
	}
	key, err := p.key(ctx, b1.Tenant)
	if err != nil {
		return err
	}
	seen, err := p.sendSeen(ctx, b1, b3)
	if err != nil {
		return err
	}
	inside, fabric, arrived := seen[0], seen[1], seen[2]
	cipher := address.NewCipher(key)
	p.check(inside.packet.Source == b1.Address && inside.packet.Destination == b3.Address,
		"2: b1 sends %v → %v", inside.packet.Source, inside.packet.Destination)
	p.check(fabric.packet.Source == b1.Plaintext && fabric.packet.Destination == b3.Plaintext,
		"2: the fabric carries %v → %v", fabric.packet.Source, fabric.packet.Destination)
	p.check(arrived.packet.Source == b1.Address && arrived.packet.Destination == b3.Address,
		"2: b3 receives %v → %v", arrived.packet.Source, arrived.packet.Destination)
	p.check(
		cipher.Encrypt(fabric.packet.Source) == inside.packet.Source &&
			cipher.Encrypt(fabric.packet.Destination) == inside.packet.Destination,
		"2: the containers' addresses are not AES-128 of the fabric's under blue's key",
	)
	for i, s := range seen {
		_, udp := s.packet.Body.(packet.UDP)
		p.check(udp && len(s.packet.Extensions) == 0 && s.length == packetLength,
			"2: in place %d the packet has %d bytes and %d extension headers, want %d bytes of plain UDP",
			i+1, s.length, len(s.packet.Extensions), packetLength)
	}

	p.print("%-46s%s → %s", "2  One packet, three places", b1.Name, b3.Name)
	ends := func(s sighting) string {
		return fmt.Sprintf("%s  →  %s", short(s.packet.Source.String()), short(s.packet.Destination.String()))
	}
	p.print("   %-15s%-28s   %s", "in b1", ends(inside), "encrypted with AES-128 and blue's key")
	p.print(
		"   %-15s%v  →  %v   %s → %s",
		"on the fabric",
		fabric.packet.Source,
		fabric.packet.Destination,
		p.describe(b1),
		p.describe(b3),
	)
	p.print(
		"   %-15s%-28s   %s bytes in, %s bytes on the wire: no encapsulation",
		"in b3",
		ends(arrived),
		humanize.Grouped(inside.length),
		humanize.Grouped(fabric.length),
	)
	return nil
}

func (p *proof) describe(c lab.ContainerStatus) string {
	return fmt.Sprintf("node %s | %s | app %d", c.Node[1:], c.Tenant, c.App)
}

// key returns the newest key of a tenant, from the operators' socket.
func (p *proof) key(ctx context.Context, tenant string) (address.Key, error) {
	response, err := p.lab.Operator().
		GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: tenant, ShowKey: true}))
	if err != nil {
		return address.Key{}, err
	}
	ids := response.Msg.Tenant.GetIds()
	if len(ids) == 0 || len(ids[len(ids)-1].Key) != len(address.Key{}) {
		return address.Key{}, fmt.Errorf("tenant %s has no key", tenant)
	}
	return address.Key(ids[len(ids)-1].Key), nil
}

// sendSeen sends a datagram from one container to another. It returns the packet as captured in the sender, on the
// fabric at the receiver's node, and in the receiver.
func (p *proof) sendSeen(ctx context.Context, from, to lab.ContainerStatus) ([3]sighting, error) {
	var seen [3]sighting
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	var captures [3]*packet.Capture
	for i, place := range [3]struct{ namespace, device string }{{from.Name, lab.Interface}, {lab.Router, to.Node},
		{to.Name, lab.Interface}} {
		c, err := p.capture(place.namespace, place.device)
		if err != nil {
			return seen, err
		}
		defer c.Close()
		captures[i] = c
	}
	sentinel := packet.NewSentinel()
	payload := bytes.Repeat(sentinel[:], packetLength/len(sentinel)+1)[:packetLength-48] // IPv6 and UDP headers
	if err := p.datagram(from, to, payload); err != nil {
		return seen, err
	}
	for i, c := range captures {
		frames, err := c.Until(ctx, sentinel.In)
		if err != nil {
			return seen, err
		}
		frame := frames[len(frames)-1]
		if seen[i].packet, err = frame.Packet(); err != nil {
			return seen, err
		}
		seen[i].length = len(frame.Frame) - 14 // Ethernet header
		u, _ := seen[i].packet.Body.(packet.UDP)
		p.check(bytes.Equal(u.Payload, payload), "2: the payload changed on its way")
	}
	return seen, nil
}

// datagram sends a datagram through ordinary sockets and waits until the receiver has read it.
func (p *proof) datagram(from, to lab.ContainerStatus, payload []byte) error {
	listen, err := p.socket(to)
	if err != nil {
		return err
	}
	defer listen.Close()
	send, err := p.socket(from)
	if err != nil {
		return err
	}
	defer send.Close()
	if _, err := send.WriteToUDPAddrPort(payload, listen.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
		return err
	}
	if err := listen.SetReadDeadline(time.Now().Add(waitTime)); err != nil {
		return err
	}
	got := make([]byte, packetLength)
	n, sender, err := listen.ReadFromUDPAddrPort(got)
	if err != nil {
		return fmt.Errorf("no datagram from %s to %s: %w", from.Name, to.Name, err)
	}
	p.check(
		bytes.Equal(got[:n], payload) && sender.Addr() == from.Address,
		"2: %s read %d bytes from %v",
		to.Name,
		n,
		sender,
	)
	return nil
}

// socket opens a UDP socket on a container's address.
func (p *proof) socket(c lab.ContainerStatus) (*net.UDPConn, error) {
	ns, err := p.lab.Namespace(c.Name)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	var conn *net.UDPConn
	err = ns.Do(func() (err error) {
		conn, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.Address, 0)))
		return err
	})
	return conn, err
}

func (p *proof) capture(namespace, device string, options ...packet.CaptureOption) (*packet.Capture, error) {
	ns, err := p.lab.Namespace(namespace)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return packet.NewCapture(ns, device, options...)
}
