package traffic

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// echoing: the client waits for the echo of every write.
var echoing = traffic{Serve: serveEcho, drive: driveEcho}

// serveEcho returns when the client is done: at the end of the stream, or at an empty datagram.
func serveEcho(s Socket, m Metric) (Answer, error) {
	s, err := s.accept(m.kind)
	if err != nil {
		return Answer{}, err
	}
	buffer := make([]byte, m.block)
	for {
		n, err := s.read(buffer)
		if n == 0 || err != nil {
			return Answer{}, err
		}
		if _, err := s.write(buffer[:n]); err != nil {
			return Answer{}, err
		}
	}
}

func driveEcho(c *client) (Answer, error) {
	s, err := c.dial()
	if err != nil {
		return Answer{}, err
	}
	buffer := make([]byte, c.metric.block)
	once := func() (float64, error) {
		if _, err := s.write(buffer); err != nil {
			return 0, err
		}
		_, err := s.read(buffer)
		return 1, err
	}
	if c.metric.kind == unix.SOCK_STREAM {
		return c.measure(once, func() {})
	}
	// If a datagram is lost, the run continues, and the timeout counts as part of the time.
	if err := s.Wait(echoWait); err != nil {
		return Answer{}, err
	}
	lost := 0
	a, err := c.measure(func() (float64, error) {
		n, err := once()
		if errors.Is(err, unix.EAGAIN) {
			lost++
			return 0, nil
		}
		return n, err
	}, func() { lost = 0 })
	if err != nil {
		return a, err
	}
	a.Lost = lost
	_, err = s.write(nil)
	return a, err
}

// echoWait is the time after which a datagram without echo counts as lost.
const echoWait = 100 * time.Millisecond

// connecting: each transaction has its own connection. The server closes first, as in HTTP 1.0. So TIME_WAIT is at the
// server, and the client does not run out of ports.
var connecting = traffic{
	Serve: func(s Socket, m Metric) (Answer, error) {
		buffer := make([]byte, m.block)
		for {
			c, err := s.accept(m.kind)
			if err != nil {
				return Answer{}, err
			}
			n, err := c.read(buffer)
			if err == nil && n > 0 {
				_, err = c.write(buffer[:n])
			}
			c.close()
			if n == 0 || err != nil {
				return Answer{}, err
			}
		}
	},
	drive: func(c *client) (Answer, error) {
		buffer := make([]byte, c.metric.block)
		to := rawSockaddr(c.Target)
		connect := func() (Socket, error) {
			s, err := newSocket(c.metric.kind)
			if err != nil {
				return 0, err
			}
			if err := s.connect(to); err != nil {
				s.close()
				return 0, fmt.Errorf("connect: %w", err)
			}
			return s, nil
		}
		a, err := c.measure(func() (float64, error) {
			s, err := connect()
			if err != nil {
				return 0, err
			}
			defer s.close()
			if _, err := s.write(buffer); err != nil {
				return 0, err
			}
			for { // the echo, and the end of the stream after it
				n, err := s.read(buffer)
				if n == 0 || err != nil {
					return 1, err
				}
			}
		}, func() {})
		if err != nil {
			return a, err
		}
		s, err := connect()
		if err != nil {
			return a, err
		}
		s.close() // a connection without a request ends the server
		return a, nil
	},
}

// First byte of a flooding datagram.
const (
	warmup byte = iota
	measured
	first // the server answers both: caches such as ONCache require packets in both directions
	last
)

// flooding: the client sends as many datagrams as possible; those that arrive count.
var flooding = traffic{
	Serve: func(s Socket, m Metric) (a Answer, err error) {
		// The reader may start to run only after some milliseconds. Datagrams that arrive earlier must not be lost.
		if err := unix.SetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
			return a, fmt.Errorf("enlarge the receive queue: %w", err)
		}
		if s, err = s.accept(m.kind); err != nil {
			return a, err
		}
		buffer := make([]byte, m.block)
		for {
			if _, err := s.read(buffer); err != nil {
				return a, err
			}
			switch buffer[0] {
			case measured:
				a.Ops++
			case first, last:
				if _, err := s.write(buffer); err != nil || buffer[0] == last {
					return a, err
				}
			}
		}
	},
	drive: func(c *client) (Answer, error) {
		s, err := c.dial()
		if err != nil {
			return Answer{}, err
		}
		if err := s.ask(first, c.metric.block); err != nil {
			return Answer{}, err
		}
		buffer := make([]byte, c.metric.block)
		a, err := c.measure(func() (float64, error) {
			_, err := s.write(buffer)
			return 1, err
		}, func() { buffer[0] = measured })
		if err != nil {
			return a, err
		}
		return a, s.ask(last, c.metric.block)
	},
}

// ask sends a datagram until it receives an answer.
func (s Socket) ask(what byte, block int) error {
	if err := s.Wait(echoWait); err != nil {
		return err
	}
	question, reply := make([]byte, block), make([]byte, block)
	question[0] = what
	for range int(DialTimeout / echoWait) {
		if _, err := s.write(question); err != nil {
			return err
		}
		_, err := s.read(reply)
		for err == nil && reply[0] != what { // the reply to an earlier datagram
			_, err = s.read(reply)
		}
		if !errors.Is(err, unix.EAGAIN) {
			return errors.Join(err, s.Wait(DialTimeout))
		}
	}
	return errors.New("the server does not answer")
}

// firsts: each trial uses a new socket and begins with empty caches. The parent process starts each trial.
var firsts = traffic{
	Serve: func(s Socket, m Metric) (a Answer, err error) {
		buffer, bench := make([]byte, m.block), os.Getppid()
		for {
			n, from, err := unix.Recvfrom(int(s), buffer, 0)
			if (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)) && os.Getppid() == bench {
				continue // the trials of other scenarios may take any time
			}
			if n == 0 || err != nil {
				return a, err
			}
			if err := unix.Sendto(int(s), buffer[:n], 0, from); err != nil {
				return a, err
			}
		}
	},
	drive: func(c *client) (a Answer, err error) {
		for {
			var another bool
			if err := c.in.Decode(&another); err != nil {
				return a, fmt.Errorf("wait for a turn: %w", err)
			}
			if !another {
				break
			}
			for start := time.Now(); time.Since(start) < settle; {
			}
			times, err := c.roundTrips(1 + followers)
			if errors.Is(err, unix.EAGAIN) {
				err = c.out.Encode(Answer{Lost: 1})
			} else if err == nil {
				err = c.out.Encode(Answer{First: times[:1], Next: times[1:]})
			}
			if err != nil {
				return a, err
			}
		}
		s, err := c.dial()
		if err == nil {
			_, err = s.write(nil)
		}
		return a, err
	},
}

// followers is the number of datagrams after a first datagram. Their median is the time of the cached path.
const followers = 4

// settle is how long a client waits after the caches were emptied, so that the node's work for this is not part of the
// first packet's time. The client busy-waits, because waking a CPU takes as long as a packet, and varies in a virtual
// machine.
const settle = 200 * time.Microsecond

// roundTrips returns the times in seconds of n consecutive echoes on a new socket.
func (c *client) roundTrips(n int) ([]float64, error) {
	s, err := c.dial()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.Wait(echoWait); err != nil {
		return nil, err
	}
	buffer := make([]byte, c.metric.block)
	times := make([]float64, n)
	for i := range times {
		start := time.Now()
		if _, err := s.write(buffer); err != nil {
			return nil, err
		}
		if _, err := s.read(buffer); err != nil {
			return nil, err
		}
		times[i] = time.Since(start).Seconds()
	}
	return times, nil
}
