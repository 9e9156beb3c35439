package nimitz_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// helloSize is the size of the first message.
const helloSize = 64

func hello(name string, to net.Addr) string {
	seen := netip.MustParseAddrPort(to.String()).Addr()
	return fmt.Sprintf("%-*s", helloSize, name+" "+seen.String())
}

// stream sends 2 MiB over TCP and a datagram, and reads them back. It returns the name of the server, and the source
// that the server sees.
func (n north) stream(from string, to netip.Addr) (seen netip.Addr, by string, err error) {
	ns, err := n.Namespace(from)
	if err != nil {
		return seen, "", err
	}
	defer ns.Close()
	conn, err := dial(n.ctx, ns, "tcp", to, n.port)
	if err != nil {
		return seen, "", err
	}
	defer conn.Close()
	if seen, by, err = greeting(conn); err != nil {
		return seen, by, err
	}
	if err := comesBack(conn, 2<<20); err != nil {
		return seen, by, err
	}
	return seen, by, datagram(n.ctx, ns, to, n.port, by)
}

// echoes sends small and large echo requests. Each must get a reply. No stream may run concurrently: the userspace
// datapath of Open vSwitch reads packets from sockets with the kernel's default buffer (net.core.rmem_default, 208
// KiB). While ovs-vswitchd waits for a processor, streams would fill the buffer, and the kernel would drop later
// packets. TCP would retransmit them, but a lost echo request is not repeated.
func (n north) echoes(from string, to netip.Addr) error {
	ns, err := n.Namespace(from)
	if err != nil {
		return err
	}
	defer ns.Close()
	const fragments = 4000
	// The gateway drops the first packet from outside that exceeds the tunnel's MTU, and sends an error to the sender.
	for range 10 {
		r, err := packet.Ping(n.ctx, ns, to, packet.PingOptions{Timeout: time.Second, Size: fragments})
		if err != nil {
			return err
		}
		if r.Received > 0 {
			break
		}
	}
	for _, size := range []int{56, 1300, fragments} {
		r, err := packet.Ping(n.ctx, ns, to, packet.PingOptions{Count: 2, Timeout: 10 * time.Second, Size: size})
		if err != nil || r.Received != r.Sent {
			return errors.Join(err, fmt.Errorf("%d of %d echoes of %d bytes came back", r.Received, r.Sent, size))
		}
	}
	return nil
}

func dial(ctx context.Context, ns *netns.Namespace, network string, to netip.Addr, port uint16) (conn net.Conn,
	err error) {
	err = ns.Do(func() (err error) {
		conn, err = (&net.Dialer{Timeout: 20 * time.Second}).DialContext(ctx, network,
			netip.AddrPortFrom(to, port).String())
		return err
	})
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(time.Minute))
	}
	return conn, err
}

func greeting(conn io.Reader) (seen netip.Addr, by string, err error) {
	b := make([]byte, helloSize)
	if _, err := io.ReadFull(conn, b); err != nil {
		return seen, "", err
	}
	by, text, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	seen, err = netip.ParseAddr(text)
	return seen, by, err
}

// comesBack sends random bytes and checks that the server echoes them.
func comesBack(conn io.ReadWriter, size int) error {
	sent := make([]byte, size)
	rand.NewChaCha8(sha256.Sum256([]byte(fmt.Sprint(size)))).Read(sent)
	failed := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		failed <- err
	}()
	got := make([]byte, size)
	if read, err := io.ReadFull(conn, got); err != nil {
		return fmt.Errorf("%d of %d bytes came back: %w", read, size, err)
	}
	if !bytes.Equal(got, sent) {
		return errors.New("the received bytes differ")
	}
	return <-failed
}

// datagram sends a datagram, with retries, until it is echoed.
func datagram(ctx context.Context, ns *netns.Namespace, to netip.Addr, port uint16, by string) error {
	conn, err := dial(ctx, ns, "udp", to, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	b := make([]byte, 2000)
	for range 5 {
		if _, err = conn.Write([]byte("datagram")); err != nil {
			return err
		}
		conn.SetReadDeadline(time.Now().Add(4 * time.Second))
		var n int
		if n, err = conn.Read(b); err == nil {
			if said := string(b[:n]); !strings.HasPrefix(said, by+" ") || !strings.HasSuffix(said, "datagram") {
				return fmt.Errorf("a datagram came back as %q", said)
			}
			return nil
		}
	}
	return fmt.Errorf("no datagram came back: %w", err)
}
