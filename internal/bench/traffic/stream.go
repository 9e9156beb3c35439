package traffic

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// streaming: as much as possible, over one connection, or over several with poll.
var streaming = traffic{Serve: serveStream, drive: driveStream}

func serveStream(listening Socket, m Metric) (Answer, error) {
	flows, err := acceptAll(listening, m)
	if err != nil {
		return Answer{}, err
	}
	buffer := make([]byte, m.block)
	for open := len(flows.polled); open > 0; {
		err := flows.each(func(i int, s Socket) error {
			n, err := s.read(buffer)
			if n == 0 && err == nil {
				flows.polled[i].Fd = -1 // poll ignores it
				open--
			}
			return err
		})
		if err != nil {
			return Answer{}, err
		}
	}
	return Answer{}, nil
}

func acceptAll(listening Socket, m Metric) (*flows, error) {
	f := &flows{events: unix.POLLIN}
	for range m.flows {
		s, err := listening.accept(m.kind)
		if err != nil {
			return nil, err
		}
		if err := f.add(s, m.flows); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func driveStream(c *client) (Answer, error) {
	f := &flows{events: unix.POLLOUT}
	for range c.metric.flows {
		s, err := c.dial()
		if err != nil {
			return Answer{}, err
		}
		if err := f.add(s, c.metric.flows); err != nil {
			return Answer{}, err
		}
	}
	buffer := make([]byte, c.metric.block)
	return c.measure(func() (written float64, err error) {
		err = f.each(func(_ int, s Socket) error {
			n, err := s.write(buffer)
			written += float64(n) / float64(len(buffer))
			return err
		})
		return written, err
	}, func() {})
}

// turns is how often a process uses a ready connection before it uses the next one. iperf3's sender also writes ten
// times, but its receiver reads once; ours also reads ten times.
const turns = 10

// flows are connections of one process. A single connection is used with blocking calls, several with poll.
type flows struct {
	polled []unix.PollFd
	events int16
}

func (f *flows) add(s Socket, of int) error {
	f.polled = append(f.polled, unix.PollFd{Fd: int32(s), Events: f.events})
	if of == 1 {
		return nil
	}
	return unix.SetNonblock(int(s), true)
}

// each calls use with every connection that is ready.
func (f *flows) each(use func(int, Socket) error) error {
	if len(f.polled) == 1 {
		return use(0, Socket(f.polled[0].Fd))
	}
	n, err := unix.Poll(f.polled, int(DialTimeout.Milliseconds()))
	if errors.Is(err, unix.EINTR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("poll: %w", err)
	}
	if n == 0 {
		return fmt.Errorf("no connection became ready: %w", unix.EAGAIN)
	}
	for i, p := range f.polled {
		if p.Revents != 0 {
			if err := f.inTurn(i, use); err != nil {
				return err
			}
		}
	}
	return nil
}

// inTurn uses a ready connection until a call would block, at most turns times.
func (f *flows) inTurn(i int, use func(int, Socket) error) error {
	for range turns {
		if f.polled[i].Fd < 0 {
			return nil
		}
		err := use(i, Socket(f.polled[i].Fd))
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}
