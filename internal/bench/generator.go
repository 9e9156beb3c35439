package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// job is what one generator process is told on its standard input.
type job struct {
	Metric string
	Serve  bool
	// Target is where to listen (port 0) or to connect.
	Target         netip.AddrPort
	Warmup, Window time.Duration
}

// answer is what it says on its standard output: a server its port as soon as it listens, a client
// what it counted when it is done.
type answer struct {
	Port      uint16  `json:",omitempty"`
	PerSecond float64 `json:",omitempty"` // writes, or echoes
	Lost      int     `json:",omitempty"` // datagrams whose echo did not come in time
}

// patience is how long either side waits for the other before it gives up.
const patience = 5 * time.Second

// Generate is the generator process: one job from in, answers to out. It blocks in system calls
// without telling Go's scheduler, so it must be alone in its process.
func Generate(in io.Reader, out io.Writer) error {
	var j job
	if err := json.NewDecoder(in).Decode(&j); err != nil {
		return fmt.Errorf("read the job: %w", err)
	}
	m, ok := metricByName(j.Metric)
	if !ok {
		return fmt.Errorf("no metric %q", j.Metric)
	}
	s, err := newSocket(m.kind, patience)
	if err != nil {
		return err
	}
	if j.Serve {
		return serve(s, m, j.Target, json.NewEncoder(out))
	}
	if err := unix.Connect(int(s), sockaddr(j.Target)); err != nil {
		return fmt.Errorf("connect to %v: %w", j.Target, err)
	}
	a, err := drive(s, m, j)
	if err != nil {
		return fmt.Errorf("%s to %v: %w", m.Name, j.Target, err)
	}
	return json.NewEncoder(out).Encode(a)
}

// serve answers one client and ends with it: at the end of its stream, or at an empty datagram.
func serve(s socket, m Metric, at netip.AddrPort, out *json.Encoder) error {
	if err := unix.Bind(int(s), sockaddr(at)); err != nil {
		return fmt.Errorf("bind %v: %w", at, err)
	}
	if m.kind == unix.SOCK_STREAM {
		if err := unix.Listen(int(s), 1); err != nil {
			return fmt.Errorf("listen on %v: %w", at, err)
		}
	}
	bound, err := unix.Getsockname(int(s))
	if err != nil {
		return err
	}
	if err := out.Encode(answer{Port: uint16(bound.(*unix.SockaddrInet6).Port)}); err != nil {
		return err
	}
	s, err = s.accept(m.kind)
	if err != nil {
		return fmt.Errorf("wait for the client: %w", err)
	}
	buffer := make([]byte, m.block)
	for {
		n, err := s.read(buffer)
		if err == nil && n > 0 && m.echo {
			_, err = s.write(buffer[:n])
		}
		if err != nil {
			return fmt.Errorf("serve %s: %w", m.Name, err)
		}
		if n == 0 {
			return nil
		}
	}
}

// drive counts writes, or echoes, for the window that follows the warm-up.
func drive(s socket, m Metric, j job) (answer, error) {
	buffer := make([]byte, m.block)
	var a answer
	once := func() (float64, error) {
		n, err := s.write(buffer)
		if err != nil || !m.echo {
			return float64(n) / float64(m.block), err
		}
		_, err = s.read(buffer)
		return 1, err
	}
	if m.kind == unix.SOCK_DGRAM {
		// A lost datagram is told and costs its time, and the run goes on.
		if err := s.wait(100 * time.Millisecond); err != nil {
			return a, err
		}
		lossless := once
		once = func() (float64, error) {
			n, err := lossless()
			if errors.Is(err, unix.EAGAIN) {
				a.Lost++
				return 0, nil
			}
			return n, err
		}
	}
	if _, err := rate(once, j.Warmup); err != nil {
		return a, err
	}
	a.Lost = 0
	var err error
	if a.PerSecond, err = rate(once, j.Window); err != nil {
		return a, err
	}
	if m.kind == unix.SOCK_DGRAM {
		_, err = s.write(nil)
	}
	return a, err
}

// rate repeats once for a time and says how much a second it came to. The clock is read once in a
// while only: it costs as much as a part of a packet's way.
func rate(once func() (float64, error), window time.Duration) (float64, error) {
	var sum float64
	start := time.Now()
	for {
		for range 16 {
			n, err := once()
			if err != nil {
				return 0, err
			}
			sum += n
		}
		if elapsed := time.Since(start); elapsed >= window {
			return sum / elapsed.Seconds(), nil
		}
	}
}

// socket is a blocking socket used by raw system calls: a wrapped one costs the scheduler's
// bookkeeping, and a non-blocking one the poller's, both more than what is compared here.
type socket int

func newSocket(kind int, patience time.Duration) (socket, error) {
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	s := socket(fd)
	if kind == unix.SOCK_STREAM {
		// The same congestion control everywhere, whatever the machine's default; inherited by accept.
		err = errors.Join(
			unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion),
			unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	}
	if err := errors.Join(err, s.wait(patience)); err != nil {
		return 0, fmt.Errorf("set up the socket: %w", err)
	}
	return s, nil
}

// wait bounds how long a call blocks; it fails with EAGAIN then.
func (s socket) wait(d time.Duration) error {
	tv := unix.NsecToTimeval(d.Nanoseconds())
	return errors.Join(
		unix.SetsockoptTimeval(int(s), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptTimeval(int(s), unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
}

// accept is the socket to the client that comes first; its first datagram stays to be read.
func (s socket) accept(kind int) (socket, error) {
	if kind == unix.SOCK_STREAM {
		fd, _, err := unix.Accept4(int(s), unix.SOCK_CLOEXEC)
		return socket(fd), err
	}
	_, from, err := unix.Recvfrom(int(s), nil, unix.MSG_PEEK)
	if err != nil {
		return 0, err
	}
	return s, unix.Connect(int(s), from)
}

func (s socket) read(b []byte) (int, error)  { return s.call(unix.SYS_READ, b) }
func (s socket) write(b []byte) (int, error) { return s.call(unix.SYS_WRITE, b) }

func (s socket) call(trap uintptr, b []byte) (int, error) {
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

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
