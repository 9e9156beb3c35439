package sharing

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds each wait for a packet.
const patience = 10 * time.Second

// transactions does n transactions with a connection each (TCP_CRR), from random addresses of the client and new ports.
// The server closes first. Both run on one CPU. It returns the time that they took.
func (b *bed) transactions(ctx context.Context, n, cpu int, random *rand.Rand) (took time.Duration, err error) {
	var listener int
	err = b.ends[backend].Do(func() (err error) {
		listener, err = listen(b.server)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("server: %w", err)
	}
	defer unix.Close(listener)
	served := make(chan error, 1)
	go func() {
		served <- b.ends[backend].Do(func() error { return errors.Join(pin(cpu), serve(listener, n)) })
	}()
	err = b.ends[sender].Do(func() error {
		if err := pin(cpu); err != nil {
			return err
		}
		began := time.Now()
		for range n {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := transact(b.clients[random.IntN(len(b.clients))], b.server); err != nil {
				return err
			}
		}
		took = time.Since(began)
		return nil
	})
	if err != nil {
		_ = unix.Shutdown(listener, unix.SHUT_RDWR) // ends the server
		return 0, errors.Join(fmt.Errorf("client: %w", err), <-served)
	}
	if err := <-served; err != nil {
		return 0, fmt.Errorf("server: %w", err)
	}
	return took, nil
}

// uninterrupted repeats a call that a signal of Go's runtime has interrupted: sockets with a timeout do not.
func uninterrupted(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func pin(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("pin to CPU %d: %w", cpu, err)
	}
	return nil
}

func newSocket(at netip.Addr, port int) (int, error) {
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	t := unix.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t),
		unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &t),
		unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(s, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1),
		unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1), // only a route says that it is local
	)
	if err == nil {
		err = unix.Bind(s, &unix.SockaddrInet6{Addr: at.As16(), Port: port})
	}
	if err != nil {
		return 0, errors.Join(err, unix.Close(s))
	}
	return s, nil
}

func listen(at netip.Addr) (int, error) {
	s, err := newSocket(at, serverPort)
	if err != nil {
		return 0, err
	}
	if err := unix.Listen(s, 1024); err != nil {
		return 0, errors.Join(err, unix.Close(s))
	}
	return s, nil
}

func serve(listener, n int) error {
	one := make([]byte, 1)
	for range n {
		var c, got int
		err := uninterrupted(func() (err error) {
			c, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
			return err
		})
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		err = uninterrupted(func() (err error) { got, err = unix.Read(c, one); return err })
		if err == nil && got == 1 {
			_, err = unix.Write(c, one)
		}
		if err = errors.Join(err, unix.Close(c)); err != nil {
			return err
		}
	}
	return nil
}

// transact connects, sends a byte, and reads until the server closes.
func transact(from, to netip.Addr) error {
	s, err := newSocket(from, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	err = uninterrupted(func() error {
		return unix.Connect(s, &unix.SockaddrInet6{Addr: to.As16(), Port: serverPort})
	})
	if err != nil {
		return fmt.Errorf("connect from %v: %w", from, err)
	}
	one := []byte{1}
	if _, err := unix.Write(s, one); err != nil {
		return err
	}
	for echoed := false; ; echoed = true {
		var n int
		err := uninterrupted(func() (err error) { n, err = unix.Read(s, one); return err })
		switch {
		case err != nil:
			return fmt.Errorf("read: %w", err)
		case n == 0 && !echoed:
			return errors.New("no echo")
		case n == 0:
			return nil
		}
	}
}
