package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestEgressScenarios: each scenario translates the client's address to the one that it should measure.
func TestEgressScenarios(t *testing.T) {
	first, second := address.DefaultPlan().Node(1), address.DefaultPlan().Node(2)
	ofNode := func(a netip.Addr) bool { return a == netip.MustParseAddr("2001:db8:70::2") }
	seen := map[string]func(netip.Addr) bool{
		"egress": func(a netip.Addr) bool {
			return a == tenant.EgressAddress(first, tenant.FirstEgressIndex+1)
		},
		"egress-gateway": func(a netip.Addr) bool {
			return a == tenant.EgressAddress(second, tenant.FirstGatewayIndex)
		},
		"egress-nptv6":            first.Contains,
		"egress-masquerade":       ofNode,
		"egress-masquerade-vxlan": ofNode,
	}
	offered, leftOut := Offered(EgressScenarios())
	t.Logf("left out: %q", leftOut)
	if len(offered) < 2 {
		t.Fatal("the scenarios of our datapath are left out")
	}
	for _, s := range offered {
		t.Run(s.Name, func(t *testing.T) {
			must(t, Once(filepath.Join(t.TempDir(), "w"), s, func(p Pair) error {
				client, err := clientOf(p)
				if err == nil && !seen[s.Name](client) {
					t.Errorf("the server sees the client as %v", client)
				}
				return err
			}))
		})
	}
}

// clientOf connects the pair, and returns the client's address as the server sees it.
func clientOf(p Pair) (a netip.Addr, err error) {
	const patience = 10 * time.Second
	var l net.Listener
	if err := p.Server.Do(func() (err error) { l, err = net.Listen("tcp6", "[::]:0"); return err }); err != nil {
		return a, err
	}
	defer l.Close()
	to := netip.AddrPortFrom(p.Target, uint16(l.Addr().(*net.TCPAddr).Port))
	err = p.Client.Do(func() error {
		c, err := net.DialTimeout("tcp6", to.String(), patience)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	if err != nil {
		return a, err
	}
	c, err := l.Accept()
	if err != nil {
		return a, err
	}
	defer c.Close()
	return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), nil
}

// TestLacksRule: a machine without ip6tables, or without a target, lacks the scenario, and the reason says what.
func TestLacksRule(t *testing.T) {
	if err := lacksRule([]string{"-t", "nat", "-A", "POSTROUTING", "-j", "NONSENSE"})(); err == nil ||
		!strings.Contains(err.Error(), "NONSENSE") {
		t.Errorf("a target that does not exist: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if err := lacksRule(masquerade)(); err == nil || !strings.Contains(err.Error(), "(Debian: iptables)") {
		t.Errorf("without ip6tables: %v", err)
	}
}

// TestEgressIsLikeNPTv6: a host outside gets from a container what it gets behind NPTv6 of the kernel (RFC 6296),
// except for addresses and checksum, which is right; and the container learns from an ICMPv6 error that no one listens.
func TestEgressIsLikeNPTv6(t *testing.T) {
	offered, leftOut := Offered(EgressScenarios())
	got := map[string][]byte{}
	for _, s := range offered {
		if s.Name != "egress" && s.Name != "egress-nptv6" {
			continue
		}
		must(t, Once(filepath.Join(t.TempDir(), "w"), s, func(p Pair) (err error) {
			got[s.Name], err = datagramSeen(t.Context(), p)
			return err
		}))
	}
	if len(got) != 2 {
		t.Fatalf("only %d of both paths are offered; left out: %q", len(got), leftOut)
	}
	if !bytes.Equal(got["egress"], got["egress-nptv6"]) {
		t.Errorf("the host outside gets\n%x from a container, and\n%x behind NPTv6", got["egress"], got["egress-nptv6"])
	}
}

// datagramSeen sends a datagram to a closed port of the server, and returns it as the server receives it, without
// addresses and checksum.
func datagramSeen(ctx context.Context, p Pair) ([]byte, error) {
	const closed = 4444
	capture, err := packet.NewCapture(p.Server, "eth0", packet.IncomingOnly)
	if err != nil {
		return nil, err
	}
	defer capture.Close()
	sent := errors.New("nothing was sent")
	err = p.Client.Do(func() error {
		c, err := net.DialUDP("udp6", &net.UDPAddr{Port: 5555}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Target,
			closed)))
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		err = raw.Control(func(fd uintptr) {
			failed = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, 0x2a),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 33))
		})
		if err = errors.Join(err, failed); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			return err
		}
		if _, err := c.Write([]byte("what does the host see?")); err != nil {
			return err
		}
		_, sent = c.Read(make([]byte, 1))
		return nil
	})
	if err != nil {
		return nil, err
	}
	if !errors.Is(sent, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("the client gets %w, want an error that no one listens", sent)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	all, err := capture.Until(ctx, func(c packet.Captured) bool { return isDatagram(c.Frame) })
	if err != nil {
		return nil, err
	}
	b := bytes.Clone(all[len(all)-1].Frame[14:])
	clear(b[0+8 : 40]) // both addresses
	b[1] &= 0xf0       // flow label
	b[2], b[3] = 0, 0
	clear(b[40+6 : 40+8]) // checksum
	return b, nil
}

func isDatagram(frame []byte) bool {
	return len(frame) > 62 && frame[12] == 0x86 && frame[13] == 0xdd && frame[20] == unix.IPPROTO_UDP
}
