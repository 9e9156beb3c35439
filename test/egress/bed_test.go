package egress_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// Ports of the servers in every place.
const (
	echoPort = 7  // TCP: the server says whom it sees, and echoes; UDP: it answers whom it sees
	httpPort = 80 // the server says whom it sees
)

// Limits of what takes milliseconds on an idle machine, and of how long silence is observed.
const (
	patience = 30 * time.Second
	silence  = 300 * time.Millisecond
)

var everywhere = netip.MustParsePrefix("::/0")

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bed is a lab with servers in its containers, nodes and hosts outside.
type bed struct {
	*lab.Lab
	*testing.T
}

func newBed(t *testing.T, spec lab.Spec) bed {
	spec.Device, spec.Uplinks = labtest.Device(), cmp.Or(spec.Uplinks, labtest.Uplinks())
	b := bed{labtest.New(t, spec), t}
	for _, place := range b.PingTargets() {
		t.Cleanup(b.serve(place))
	}
	return b
}

// of is the bed in a part of a test.
func (b bed) of(t *testing.T) bed { return bed{b.Lab, t} }

// serve starts the servers of a place, until the returned function is called.
func (b bed) serve(place string) (end func()) {
	b.Helper()
	at := netip.IPv6Unspecified()
	if slices.Contains(b.NodeNames(), place) {
		at = b.node(place) // the kernel would choose the uplink's as the source of answers
	}
	must(b.T, <-labtest.RunIn(b.T, b.Lab, place, func() error {
		echo, err := net.Listen("tcp6", fmt.Sprintf("[::]:%d", echoPort))
		if err != nil {
			return err
		}
		datagrams, err := net.ListenPacket("udp6", netip.AddrPortFrom(at, echoPort).String())
		if err != nil {
			return errors.Join(err, echo.Close())
		}
		web, err := net.Listen("tcp6", fmt.Sprintf("[::]:%d", httpPort))
		if err != nil {
			return errors.Join(err, echo.Close(), datagrams.Close())
		}
		go echoBytes(echo)
		go echoDatagrams(datagrams)
		go http.Serve(web, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			seen, _, _ := net.SplitHostPort(r.RemoteAddr)
			fmt.Fprintln(w, seen)
		}))
		end = func() { echo.Close(); datagrams.Close(); web.Close() }
		return nil
	}))
	return end
}

func echoBytes(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			fmt.Fprintln(c, addressOf(c.RemoteAddr()))
			io.Copy(c, c)
		}()
	}
}

func echoDatagrams(u net.PacketConn) {
	buffer := make([]byte, 65536)
	for {
		_, from, err := u.ReadFrom(buffer)
		if err != nil {
			return
		}
		u.WriteTo([]byte(addressOf(from).String()), from)
	}
}

func addressOf(a net.Addr) netip.Addr {
	at, _ := netip.ParseAddrPort(a.String())
	return at.Addr()
}

// flow is a connection to an echo server.
type flow struct {
	net.Conn
	reader *bufio.Reader
	seen   netip.Addr // whom the server sees
}

// connect connects a place to an echo server. from is the source address, or the zero Addr for the kernel's choice. If
// the server does not answer within the time, the error is a timeout.
func (b bed) connect(place string, from, to netip.Addr, within time.Duration) (*flow, error) {
	b.Helper()
	var f *flow
	err := <-labtest.RunIn(b.T, b.Lab, place, func() error {
		dialer := net.Dialer{Timeout: within}
		if from.IsValid() {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
		}
		c, err := dialer.Dial("tcp6", netip.AddrPortFrom(to, echoPort).String())
		if err != nil {
			return err
		}
		f = &flow{Conn: c, reader: bufio.NewReader(c)}
		c.SetDeadline(time.Now().Add(within))
		line, err := f.reader.ReadString('\n')
		if err == nil {
			f.seen, err = netip.ParseAddr(strings.TrimSpace(line))
		}
		if err != nil {
			return errors.Join(err, c.Close())
		}
		return c.SetDeadline(time.Time{})
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// echo sends bytes on a connection and reads them back.
func (f *flow) echo(within time.Duration) error {
	f.SetDeadline(time.Now().Add(within))
	if _, err := f.Write([]byte("pilaster")); err != nil {
		return err
	}
	got := make([]byte, 8)
	if _, err := io.ReadFull(f.reader, got); err != nil {
		return err
	}
	if string(got) != "pilaster" {
		return fmt.Errorf("%q came back", got)
	}
	return nil
}

// datagram sends a datagram to an echo server, and returns whom it sees. from is the source address, or the zero Addr.
// Without an answer it repeats the datagram, as TCP would: on a busy machine a gateway may seem dead for a moment.
func (b bed) datagram(place string, from, to netip.Addr, within time.Duration) (seen netip.Addr, err error) {
	b.Helper()
	return b.datagrams(place, from, to, within, silence)
}

// datagrams sends a datagram, and again each time that no answer has come for so long.
func (b bed) datagrams(place string, from, to netip.Addr, within, again time.Duration) (seen netip.Addr, err error) {
	b.Helper()
	err = <-labtest.RunIn(b.T, b.Lab, place, func() error {
		var dialer net.Dialer
		if from.IsValid() {
			dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
		}
		c, err := dialer.Dial("udp6", netip.AddrPortFrom(to, echoPort).String())
		if err != nil {
			return err
		}
		defer c.Close()
		got := make([]byte, 64)
		for end := time.Now().Add(within); ; {
			if _, err := c.Write([]byte("who am I?")); err != nil {
				return err
			}
			c.SetReadDeadline(time.Now().Add(min(again, time.Until(end))))
			n, err := c.Read(got)
			if err == nil {
				seen, err = netip.ParseAddr(string(got[:n]))
				return err
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(end) {
				return err
			}
		}
	})
	return seen, err
}

// reaches waits until a place reaches an echo server by TCP, and returns whom it sees.
func (b bed) reaches(place string, to netip.Addr) (seen netip.Addr) {
	b.Helper()
	var last error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		f, err := b.connect(place, netip.Addr{}, to, silence)
		if err == nil {
			must(b.T, f.Close())
			return f.seen
		}
		last = err
	}
	b.Fatalf("%s does not reach %v within %v: %v", place, to, patience, last)
	return seen
}

// becomes waits until the attempt to reach an echo server ends as it must.
func (b bed) becomes(place string, to netip.Addr, want outcome) {
	b.Helper()
	var last outcome
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if last = b.try(place, netip.Addr{}, to); last == want {
			return
		}
	}
	b.Fatalf("%s to %v: %s, want %s", place, to, last, want)
}

// outcome says how an attempt to reach an echo server has ended.
type outcome string

const (
	reached   outcome = "reached"
	denied    outcome = "denied" // an ICMPv6 error: administratively prohibited
	silent    outcome = "no answer"
	routeless outcome = "no route" // without a packet
)

// try sends a datagram. Unlike a connection, it fails at once after an ICMPv6 error: the kernel ignores an error that
// arrives while connect holds the socket's lock, until it repeats the SYN a second later.
func (b bed) try(place string, from, to netip.Addr) outcome {
	b.Helper()
	_, err := b.datagram(place, from, to, silence)
	return outcomeOf(err)
}

func outcomeOf(err error) outcome {
	var timeout net.Error
	switch {
	case err == nil:
		return reached
	case errors.Is(err, unix.EACCES):
		return denied
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return routeless
	case errors.As(err, &timeout) && timeout.Timeout():
		return silent
	}
	return outcome(err.Error())
}

func (b bed) address(name string) netip.Addr {
	b.Helper()
	a, err := b.Address(name)
	must(b.T, err)
	return a
}

func (b bed) plaintext(name string) netip.Addr {
	b.Helper()
	c, err := b.Container(name)
	must(b.T, err)
	return c.Plaintext
}

// allow sets a rule of a tenant that allows a prefix.
func (b bed) allow(ctx context.Context, tenant string, to netip.Prefix, via ...string) {
	b.Helper()
	must(b.T, b.SetEgress(ctx, tenant, lab.EgressRule{To: to, Action: lab.AllowEgress, Via: via}))
}

func (b bed) deny(ctx context.Context, tenant string, to netip.Prefix) {
	b.Helper()
	must(b.T, b.SetEgress(ctx, tenant, lab.EgressRule{To: to, Action: lab.DenyEgress}))
}

func (b bed) apply(ctx context.Context, tenant string, documents ...string) {
	b.Helper()
	_, err := b.Operator().ApplyPolicies(ctx, connect.NewRequest(
		&pilasterv1.ApplyPoliciesRequest{Tenant: tenant, Documents: documents}))
	must(b.T, err)
}

func (b bed) drops(ctx context.Context, node, reason string) uint64 {
	b.Helper()
	all, err := b.Drops(ctx, node)
	must(b.T, err)
	return all[reason]
}

func (b bed) unapply(ctx context.Context, tenant string, documents ...string) {
	b.Helper()
	_, err := b.Operator().DeletePolicies(ctx, connect.NewRequest(
		&pilasterv1.DeletePoliciesRequest{Tenant: tenant, Documents: documents}))
	must(b.T, err)
}
