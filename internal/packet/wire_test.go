package packet_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// wire returns two namespaces with a veth pair between them, "eth0" in both, addresses alice and bob.
func wire(t *testing.T) (a, b *netns.Namespace) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	var side [2]*netns.Namespace
	var handle [2]*netlink.Handle
	for i, name := range []string{"a", "b"} {
		path := filepath.Join(t.TempDir(), name)
		ns, err := netns.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close(); netns.Remove(path) })
		side[i] = ns
		if handle[i], err = ns.Netlink(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(handle[i].Close)
	}
	err := handle[0].LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "eth0", HardwareAddr: macs[0], MTU: 1500}, PeerName: "eth0",
		PeerHardwareAddr: macs[1], PeerNamespace: netlink.NsFd(side[1].FD()), PeerMTU: 1500,
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, addr := range []netip.Addr{alice, bob} {
		link, err := handle[i].LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		err = side[i].Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv6/conf/eth0/addr_gen_mode", []byte("1"), 0)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := handle[i].AddrAdd(link, &netlink.Addr{
			IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
		if err := handle[i].LinkSetUp(link); err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range side {
		if err := ns.WaitUp(shortly(t), "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	return side[0], side[1]
}

func shortly(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestBurstArrivesWholeAndInOrder(t *testing.T) {
	a, b := wire(t)
	c, err := packet.NewCapture(b, "eth0", packet.IncomingOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in, err := packet.NewInjector(a, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()

	const n = 100_000
	p := packet.Packet{
		Source:      alice,
		Destination: netip.MustParseAddr("fd00::c"),
		Body:        packet.UDP{SourcePort: 9, DestinationPort: 9},
	}
	if err := in.Burst(n, func(int) []byte { return p.Frame(macs[1], in.MAC()) }); err != nil {
		t.Fatal(err)
	}
	sentinel := packet.NewSentinel()
	p.Body = packet.UDP{SourcePort: 9, DestinationPort: 9, Payload: sentinel[:]}
	before := time.Now()
	if err := in.Send(p.Frame(macs[1], in.MAC())); err != nil {
		t.Fatal(err)
	}
	seen, err := c.Until(shortly(t), sentinel.In)
	if err != nil {
		t.Fatal(err)
	}
	arrived := 0
	for _, c := range seen {
		if p, err := c.Packet(); err == nil && p.Source == alice { // skips the kernel's MLD packets
			arrived++
		}
	}
	if arrived != n+1 {
		t.Errorf("%d frames captured, sent %d and a sentinel", arrived, n)
	}
	last := seen[len(seen)-1]
	if got, err := last.Packet(); err != nil || got.Source != alice {
		t.Errorf("sentinel decodes to %+v, %v", got, err)
	}
	if last.Outgoing || last.Time.Before(before.Add(-time.Second)) || last.Time.After(time.Now()) {
		t.Errorf("sentinel: outgoing %v at %v", last.Outgoing, last.Time)
	}
}

func TestCaptureSeesBothDirectionsAndPartialChecksums(t *testing.T) {
	a, b := wire(t)
	c, err := packet.NewCapture(a, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	err = b.Do(func() error {
		_, err := net.ListenUDP("udp6", &net.UDPAddr{IP: bob.AsSlice(), Port: 7}) // closed with the namespace's test
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	sentinel := packet.NewSentinel()
	err = a.Do(func() error {
		conn, err := net.DialUDP("udp6", nil, &net.UDPAddr{IP: bob.AsSlice(), Port: 7})
		if err == nil {
			defer conn.Close()
			_, err = conn.Write(sentinel[:])
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	seen, err := c.Until(shortly(t), sentinel.In)
	if err != nil {
		t.Fatal(err)
	}
	last := seen[len(seen)-1]
	if !last.Outgoing || !last.ChecksumPartial {
		t.Errorf("a packet of the host's stack: outgoing %v, partial checksum %v", last.Outgoing, last.ChecksumPartial)
	}
	incoming := 0
	for _, f := range seen {
		if !f.Outgoing {
			incoming++ // the neighbour's advertisement
		}
	}
	if incoming == 0 {
		t.Error("nothing incoming was captured")
	}
}

func TestCaptureEndsWithItsContext(t *testing.T) {
	a, _ := wire(t)
	c, err := packet.NewCapture(a, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for err == nil {
		_, err = c.Next(ctx)
	}
	if ctx.Err() == nil {
		t.Errorf("ended early: %v", err)
	}
}

func TestPing(t *testing.T) {
	a, _ := wire(t)
	r, err := packet.Ping(shortly(t), a, bob, packet.PingOptions{Count: 5, Size: 1400})
	if err != nil {
		t.Fatal(err)
	}
	if r.Sent != 5 || r.Received != 5 || len(r.RTT) != 5 {
		t.Errorf("%+v", r)
	}
	for _, rtt := range r.RTT {
		if rtt <= 0 || rtt > time.Second {
			t.Errorf("RTT %v", rtt)
		}
	}
	if r, err := packet.Ping(shortly(t), a, netip.MustParseAddr("127.0.0.1"),
		packet.PingOptions{Count: 2, Size: 1400}); err != nil ||
		r.Received != 2 {
		t.Errorf("IPv4: %+v, %v", r, err)
	}
	// No host has this address, and the ping leaves by the wire: no reply and no error.
	r, err = packet.Ping(
		shortly(t),
		a,
		netip.MustParseAddr("fd00::dead"),
		packet.PingOptions{Timeout: 50 * time.Millisecond},
	)
	if err != nil || r.Sent != 1 || r.Received != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err = packet.Ping(shortly(t), a, netip.MustParseAddr("2001:db8::1"), packet.PingOptions{}); err == nil {
		t.Error("a ping without a route was sent")
	}
}
