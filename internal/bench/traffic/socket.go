package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket uses raw blocking system calls, because Go's wrappers add the cost of the scheduler or the poller, which
// exceeds the compared differences.
type Socket int

// Congestion is the congestion control of every TCP connection, independent of the machine's default.
const Congestion = "cubic"

func newSocket(kind int) (Socket, error) {
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET6, uintptr(kind|unix.SOCK_CLOEXEC), 0)
	if errno != 0 {
		return 0, fmt.Errorf("socket: %w", errno)
	}
	if kind == unix.SOCK_STREAM { // sockets of accept inherit it
		if err := unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, Congestion); err != nil {
			return 0, fmt.Errorf("use %s: %w", Congestion, err)
		}
	}
	return Socket(fd), nil
}

// patientSocket returns a socket with timeouts that sends data immediately (no Nagle).
func patientSocket(kind int) (Socket, error) {
	s, err := newSocket(kind)
	if err != nil {
		return 0, err
	}
	if kind == unix.SOCK_STREAM {
		err = unix.SetsockoptInt(int(s), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // inherited by accept
	}
	if err := errors.Join(err, s.Wait(DialTimeout)); err != nil {
		return 0, fmt.Errorf("set up the socket: %w", err)
	}
	return s, nil
}

// Wait bounds how long a call blocks; after that the call fails with EAGAIN.
func (s Socket) Wait(d time.Duration) error {
	tv := unix.NsecToTimeval(d.Nanoseconds())
	return errors.Join(
		unix.SetsockoptTimeval(int(s), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptTimeval(int(s), unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
}

// accept returns the socket to a client. The first datagram stays in the receive queue.
func (s Socket) accept(kind int) (Socket, error) {
	if kind == unix.SOCK_STREAM {
		for {
			fd, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(s), 0, 0, unix.SOCK_CLOEXEC, 0, 0)
			switch errno {
			case 0:
				return Socket(fd), nil
			case unix.EINTR:
			default:
				return 0, fmt.Errorf("wait for the client: %w", errno)
			}
		}
	}
	_, from, err := unix.Recvfrom(int(s), nil, unix.MSG_PEEK)
	for errors.Is(err, unix.EINTR) {
		_, from, err = unix.Recvfrom(int(s), nil, unix.MSG_PEEK)
	}
	if err != nil {
		return 0, fmt.Errorf("wait for the client: %w", err)
	}
	return s, unix.Connect(int(s), from)
}

func (s Socket) connect(to *unix.RawSockaddrInet6) error {
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(s), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet6)
	if errno != 0 {
		return errno
	}
	return nil
}

func (s Socket) read(b []byte) (int, error)  { return s.call(unix.SYS_READ, b) }
func (s Socket) write(b []byte) (int, error) { return s.call(unix.SYS_WRITE, b) }

func (s Socket) call(trap uintptr, b []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(trap, uintptr(s), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

func (s Socket) close() {
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(s), 0, 0)
}

// rawSockaddr returns an address as the kernel expects it; an IPv4 address is mapped to IPv6.
func rawSockaddr(a netip.AddrPort) *unix.RawSockaddrInet6 {
	raw := &unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: a.Addr().As16()}
	port := (*[2]byte)(unsafe.Pointer(&raw.Port))
	port[0], port[1] = byte(a.Port()>>8), byte(a.Port())
	return raw
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
