package wire_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

const (
	openPort     = 51000
	closedPort   = 51001
	sentinelPort = 51009

	streamSize   = 1 << 20 // bytes in each direction: dozens of full GSO packets
	segmentSize  = 1200    // of UDP GSO
	manySegments = 40
	bigDatagram  = 8000 // is fragmented
)

// host is a container with its namespace and address.
type host struct {
	name    string
	ns      *netns.Namespace
	address netip.Addr
}

// talk exchanges all kinds of traffic between a and b: TCP streams; small, fragmented and GSO-segmented datagrams;
// echoes; and errors.
func talk(ctx context.Context, a, b host) error {
	for _, part := range []struct {
		name string
		run  func(context.Context, host, host) error
	}{
		{"TCP stream", streams}, {"UDP", datagrams}, {"echo", echoes},
		{"UDP to a closed port", portUnreachable}, {"TCP to a closed port", refused},
	} {
		if err := part.run(ctx, a, b); err != nil {
			return fmt.Errorf("%s from %s to %s: %w", part.name, a.name, b.name, err)
		}
	}
	return nil
}

func streams(ctx context.Context, a, b host) error {
	listener, err := listenTCP(b, openPort)
	if err != nil {
		return err
	}
	defer listener.Close()
	echoed := make(chan error, 1)
	go func() {
		c, err := listener.Accept()
		if err == nil {
			_, err = io.Copy(c, c)
			c.Close()
		}
		echoed <- err
	}()

	c, err := dial(a, "tcp6", b.address, openPort)
	if err != nil {
		return err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(deadline)
	}
	sent := pattern(streamSize)
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		written <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err := errors.Join(err, <-written); err != nil {
		return err
	}
	if !bytes.Equal(got, sent) {
		return fmt.Errorf("received %d bytes, want %d, or they differ", len(got), len(sent))
	}
	return <-echoed
}

func datagrams(ctx context.Context, a, b host) error {
	echo, err := listenUDP(b, openPort)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for buffer := make([]byte, 1<<16); ; {
			n, from, err := echo.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return // closed
			}
			_, _ = echo.WriteToUDPAddrPort(buffer[:n], from) // the client reports a lost reply
		}
	}()
	defer func() { echo.Close(); <-ended }()

	c, err := dial(a, "udp6", b.address, openPort)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	answer := make([]byte, 1<<16)
	for _, size := range []int{0, 1, 8, 333, 1400, bigDatagram} {
		sent := pattern(size)
		if _, err := c.Write(sent); err != nil {
			return err
		}
		n, err := c.Read(answer)
		if err != nil || !bytes.Equal(answer[:n], sent) {
			return fmt.Errorf("received %d of %d bytes, or they differ: %w", n, size, err)
		}
	}

	// One write, split into datagrams by the kernel or its device.
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	if err2 := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT,
			segmentSize)
	}); err != nil || err2 != nil {
		return errors.Join(err, err2)
	}
	if _, err := c.Write(pattern(manySegments * segmentSize)); err != nil {
		return err
	}
	for i := range manySegments {
		if n, err := c.Read(answer); err != nil || n != segmentSize {
			return fmt.Errorf("segment %d: %d bytes: %w", i, n, err)
		}
	}
	return nil
}

func echoes(ctx context.Context, a, b host) error {
	for _, size := range []int{56, 4000} {
		r, err := packet.Ping(ctx, a.ns, b.address, packet.PingOptions{Count: 3, Size: size})
		if err != nil || r.Received != 3 {
			return fmt.Errorf("received %d of 3 echo replies of %d bytes: %w", r.Received, size, err)
		}
	}
	return nil
}

// portUnreachable checks that an ICMPv6 error reaches the socket of the sender, with addresses that the container sees.
// The socket's error queue has the addresses of the quoted packet and of the error's source.
func portUnreachable(_ context.Context, a, b host) error {
	c, err := dial(a, "udp6", b.address, closedPort)
	if err != nil {
		return err
	}
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	if err2 := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVERR,
			1)
	}); err != nil || err2 != nil {
		return errors.Join(err, err2)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(pattern(100)); err != nil {
		return err
	}
	if _, err := c.Read(make([]byte, 200)); !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("want ECONNREFUSED, got %w", err)
	}
	var to, offender netip.Addr
	err2 := raw.Read(func(fd uintptr) bool {
		to, offender, err = readErrorQueue(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	if err != nil || err2 != nil {
		return fmt.Errorf("error queue: %w", errors.Join(err, err2))
	}
	if to != b.address || offender != b.address {
		return fmt.Errorf("error queue: destination %v, refused by %v; want only %v",
			to, offender, b.address)
	}
	return nil
}

// readErrorQueue returns the destination of the refused packet, and the source of the error.
func readErrorQueue(fd int) (to, offender netip.Addr, err error) {
	control := make([]byte, 512)
	_, n, _, from, err := unix.Recvmsg(fd, make([]byte, 200), control, unix.MSG_ERRQUEUE)
	if err != nil {
		return to, offender, err
	}
	if a, ok := from.(*unix.SockaddrInet6); ok {
		to = netip.AddrFrom16(a.Addr)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	for _, m := range messages {
		size := int(unsafe.Sizeof(unix.SockExtendedErr{}))
		if m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_RECVERR && len(m.Data) >= size+24 {
			offender = netip.AddrFrom16([16]byte(m.Data[size+8:])) // a sockaddr_in6 follows
		}
	}
	return to, offender, err
}

func refused(_ context.Context, a, b host) error {
	c, err := dial(a, "tcp6", b.address, closedPort)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("want ECONNREFUSED, got %w", err)
	}
	return nil
}

func dial(a host, network string, to netip.Addr, port uint16) (c net.Conn, err error) {
	err = a.ns.Do(func() error {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(to, port).String(), patience)
		return err
	})
	return c, err
}

func listenUDP(h host, port uint16) (c *net.UDPConn, err error) {
	err = h.ns.Do(func() error {
		c, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(h.address, port)))
		return err
	})
	return c, err
}

// pattern returns a payload that contains no address.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i%251) | 1
	}
	return b
}

// setOffload sets whether a container leaves checksums and segmentation to its device.
func setOffload(h host, on uint32) error {
	return h.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		value := struct{ command, data uint32 }{unix.ETHTOOL_STXCSUM, on}
		request := struct {
			name  [unix.IFNAMSIZ]byte
			value unsafe.Pointer
			_     [16]byte // the kernel copies a complete struct ifreq
		}{value: unsafe.Pointer(&value)}
		copy(request.name[:], "eth0")
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
			uintptr(unsafe.Pointer(&request))); errno != 0 {
			return fmt.Errorf("checksum offload of %s to %d: %w", h.name, on, errno)
		}
		return nil
	})
}
