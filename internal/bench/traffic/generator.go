package traffic

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Job is the input of one generator process.
type Job struct {
	Metric string
	Serve  bool
	// Target is the address to listen on (port 0) or to connect to.
	Target         netip.AddrPort
	Warmup, Window time.Duration
	// CPU is the CPU whose time is measured; -1 means all.
	CPU int
}

// Answer is the output of a generator. A server sends its port when it listens, and its counts when the client has
// disconnected. A client sends its results at its end or after each trial.
type Answer struct {
	Port uint16 `json:",omitempty"`

	Ops     float64 `json:",omitempty"` // in the window: writes, echoes, or received datagrams
	Seconds float64 `json:",omitempty"` // actual length of the window
	Busy    float64 `json:",omitempty"` // CPU seconds in the window
	// From and To are the ends of the window, by CLOCK_MONOTONIC, in ns.
	From, To int64 `json:",omitempty"`
	Lost     int   `json:",omitempty"` // datagrams whose echo did not arrive in time
	// Durations in seconds of first round trips, and of the following ones.
	First, Next []float64 `json:",omitempty"`
}

// DialTimeout bounds how long either side waits for the other.
const DialTimeout = 5 * time.Second

// traffic has the two sides of a metric. Both return when the client is done.
type traffic struct {
	Serve func(listening Socket, m Metric) (Answer, error)
	drive func(*client) (Answer, error)
}

// client is the side that starts the traffic and measures it.
type client struct {
	Job
	metric Metric
	in     *json.Decoder
	out    *json.Encoder
}

// Generate is the generator process: it reads one job from in, and writes answers to out. It blocks in raw system
// calls, which Go's scheduler does not notice, so it must be alone in its process.
func Generate(in io.Reader, out io.Writer) error {
	c := client{in: json.NewDecoder(in), out: json.NewEncoder(out)}
	if err := c.in.Decode(&c.Job); err != nil {
		return fmt.Errorf("read the Job: %w", err)
	}
	m, ok := MetricByName(c.Metric)
	if !ok {
		return fmt.Errorf("unknown metric %q", c.Metric)
	}
	c.metric = m
	run, role := m.Traffic.drive, "drive"
	if c.Serve {
		run, role = serve, "serve"
	}
	a, err := run(&c)
	if err != nil {
		return fmt.Errorf("%s %s, %v: %w", role, m.Name, c.Target, err)
	}
	return c.out.Encode(a)
}

// serve listens, reports its port, and serves one client.
func serve(c *client) (a Answer, err error) {
	m := c.metric
	s, err := patientSocket(m.kind)
	if err != nil {
		return a, err
	}
	// A chosen port may have connections of an earlier server in TIME_WAIT.
	if err := unix.SetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return a, err
	}
	if err := unix.Bind(int(s), sockaddr(c.Target)); err != nil {
		return a, fmt.Errorf("bind: %w", err)
	}
	if m.kind == unix.SOCK_STREAM {
		if err := unix.Listen(int(s), 128); err != nil {
			return a, fmt.Errorf("listen: %w", err)
		}
	}
	bound, err := unix.Getsockname(int(s))
	if err != nil {
		return a, err
	}
	if err := c.out.Encode(Answer{Port: uint16(bound.(*unix.SockaddrInet6).Port)}); err != nil {
		return a, err
	}
	return m.Traffic.Serve(s, m)
}

func (c *client) dial() (Socket, error) {
	s, err := patientSocket(c.metric.kind)
	if err != nil {
		return 0, err
	}
	if err := s.connect(rawSockaddr(c.Target)); err != nil {
		return 0, fmt.Errorf("connect: %w", err)
	}
	return s, nil
}

// measure calls once repeatedly for the warm-up, then calls begin, then calls once repeatedly for the window.
func (c *client) measure(once func() (float64, error), begin func()) (a Answer, err error) {
	if _, _, err := Repeat(once, c.Warmup); err != nil {
		return a, err
	}
	begin()
	idle, err := ReadIdle(c.CPU)
	if err != nil {
		return a, err
	}
	a.From = monotonic()
	if a.Ops, a.Seconds, err = Repeat(once, c.Window); err != nil {
		return a, err
	}
	a.To = monotonic()
	after, err := ReadIdle(c.CPU)
	a.Busy = a.Seconds*after.Cpus - (after.Seconds - idle.Seconds)
	return a, err
}

func monotonic() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // every Linux has this clock
	return now.Nano()
}

// Repeat calls once repeatedly for the given time and returns the sum. It rarely reads the clock, because this costs as
// much as a part of the packet path.
func Repeat(once func() (float64, error), window time.Duration) (sum, seconds float64, err error) {
	start := time.Now()
	for {
		for range 16 {
			n, err := once()
			if err != nil {
				return 0, 0, err
			}
			sum += n
		}
		if elapsed := time.Since(start); elapsed >= window {
			return sum, elapsed.Seconds(), nil
		}
	}
}
