package labtest

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
)

// numberSize is the size of a numbered datagram's payload, in bytes.
const numberSize = 8

// ReceiveNumbered listens on a UDP port of a container, calls received with the number of each datagram of
// SendNumbered, and stops at the end of the test. buffer is the size of the receive buffer in bytes; 0 means the
// kernel's default. It returns the container's address.
func ReceiveNumbered(t testing.TB, l *lab.Lab, container string, port, buffer int, received func(int)) netip.Addr {
	t.Helper()
	address, err := l.Address(container)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := l.Namespace(container)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var conn *net.UDPConn
	if err := ns.Do(func() (err error) {
		conn, err = listen(netip.AddrPortFrom(address, uint16(port)), buffer)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 64)
		for {
			n, err := conn.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n == numberSize {
				received(int(binary.BigEndian.Uint64(b)))
			}
		}
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return address
}

func listen(at netip.AddrPort, buffer int) (*net.UDPConn, error) {
	conn, err := net.ListenUDP("udp6", net.UDPAddrFromAddrPort(at))
	if err != nil || buffer == 0 {
		return conn, err
	}
	raw, err := conn.SyscallConn()
	if err == nil {
		e := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
		})
		err = errors.Join(e, err)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// RunIn calls run on a thread in a container's network namespace, and returns a channel with its error.
func RunIn(t testing.TB, l *lab.Lab, container string, run func() error) <-chan error {
	t.Helper()
	ns, err := l.Namespace(container)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		defer ns.Close()
		ended <- ns.Do(run)
	}()
	return ended
}

// OpenFlow returns a UDP socket with this source port in the thread's namespace.
func OpenFlow(port int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet6{Port: port}); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// SendNumbered sends a datagram with a number on a socket.
func SendNumbered(fd, number int, to unix.Sockaddr) error {
	return unix.Sendto(fd, binary.BigEndian.AppendUint64(nil, uint64(number)), 0, to)
}
