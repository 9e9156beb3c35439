package restart_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// attemptTime is the timeout of a new connection. A lost SYN is repeated after a second.
	attemptTime = time.Second
	// maxStall is the longest time that an exchange on a connection may take, on a busy machine. That nothing is lost
	// is judged by the kernel's counters, not by this time.
	maxStall = 5 * time.Second
	// betweenExchanges and betweenCalls are the pauses of a caller.
	betweenExchanges = 10 * time.Millisecond
	betweenCalls     = 20 * time.Millisecond
)

// caller is a client of a service. It keeps one TCP connection to each of some backends, and opens new ones.
type caller struct {
	dial     func(network string) (net.Conn, error) // to the service
	keep     int                                    // number of backends
	networks []string                               // of new connections: tcp6, udp6
}

// kept is a TCP connection with an exchange every betweenExchanges.
type kept struct {
	Backend   string
	Exchanges int
	Longest   time.Duration
	Lost      int    // segments of the client that were lost
	Error     string // "" if all exchanges succeeded
}

// call is an attempt to get an answer on a new connection. Since is the time from the first attempt to the end of this
// one: a caller tries again until one succeeds.
type call struct {
	Network, Backend string
	Start            time.Time
	Since            time.Duration
	Error            string
}

type callReport struct {
	Kept  []kept
	Calls []call
}

// run calls until ctx ends. It calls ready when it has its connections.
func (c *caller) run(ctx context.Context, ready func()) (report callReport, err error) {
	conns, err := c.connect(ctx)
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	if err != nil {
		return report, err
	}
	ready()
	var all sync.WaitGroup
	var mu sync.Mutex
	for name, conn := range conns {
		all.Go(func() {
			k := exchanges(ctx, name, conn)
			mu.Lock()
			report.Kept = append(report.Kept, k)
			mu.Unlock()
		})
	}
	report.Calls = c.callAgain(ctx)
	all.Wait()
	return report, nil
}

// connect returns a connection to each backend.
func (c *caller) connect(ctx context.Context) (map[string]net.Conn, error) {
	conns := map[string]net.Conn{}
	for len(conns) < c.keep {
		name, conn, err := c.open("tcp6")
		switch {
		case ctx.Err() != nil:
			return conns, fmt.Errorf("connections to %d of %d backends: %w", len(conns), c.keep,
				errors.Join(ctx.Err(), err))
		case err != nil || conns[name] != nil:
			if conn != nil {
				conn.Close()
			}
			time.Sleep(betweenCalls) // the service may still be on its way to the node
		default:
			conns[name] = conn
		}
	}
	return conns, nil
}

// open opens a connection, or a flow of datagrams, and returns the name of its backend.
func (c *caller) open(network string) (name string, conn net.Conn, err error) {
	if conn, err = c.dial(network); err != nil {
		return "", nil, err
	}
	conn.SetDeadline(time.Now().Add(attemptTime)) //nolint:errcheck // a read that fails counts
	if network == "udp6" {
		_, err = conn.Write(make([]byte, numberBytes))
	}
	answer := make([]byte, nameBytes+numberBytes)
	if network == "tcp6" {
		answer = answer[:nameBytes]
	}
	if err == nil {
		_, err = io.ReadFull(conn, answer)
	}
	if err != nil {
		conn.Close()
		return "", nil, err
	}
	return nameIn(answer), conn, nil
}

// exchanges writes numbers and reads them back.
func exchanges(ctx context.Context, backend string, conn net.Conn) kept {
	k := kept{Backend: backend}
	for ; ctx.Err() == nil; time.Sleep(betweenExchanges) {
		number := binary.BigEndian.AppendUint64(nil, uint64(k.Exchanges))
		answer := make([]byte, len(number))
		begun := time.Now()
		conn.SetDeadline(begun.Add(maxStall)) //nolint:errcheck // a read that fails counts
		_, err := conn.Write(number)
		if err == nil {
			_, err = io.ReadFull(conn, answer)
		}
		if err == nil && !bytes.Equal(answer, number) {
			err = fmt.Errorf("the answer to %x is %x", number, answer)
		}
		k.Longest = max(k.Longest, time.Since(begun))
		if err != nil {
			k.Error = fmt.Sprintf("exchange %d at %v: %v", k.Exchanges, begun.Format(time.StampMilli), err)
			break
		}
		k.Exchanges++
	}
	k.Lost = lostSegments(conn)
	return k
}

// callAgain makes calls until ctx ends, one after the other.
func (c *caller) callAgain(ctx context.Context) (all []call) {
	for i := 0; ctx.Err() == nil; i++ {
		network := c.networks[i%len(c.networks)]
		first := time.Now()
		for ctx.Err() == nil {
			now := call{Network: network, Start: time.Now()}
			name, conn, err := c.open(network)
			now.Since, now.Backend = time.Since(first), name
			if err != nil {
				now.Error = err.Error()
			} else {
				conn.Close()
			}
			all = append(all, now)
			time.Sleep(betweenCalls)
			if err == nil {
				break
			}
		}
	}
	return all
}

// lostSegments is how many segments the kernel has sent again, without those whose first copy arrived too.
func lostSegments(conn net.Conn) int {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return -1
	}
	lost := -1
	raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			lost = max(0, int(info.Total_retrans)-int(info.Dsack_dups))
		}
	})
	return lost
}

const callerVariable = "PILASTER_TEST_CALLER"

// TestCallingProcess is not a test but a process of TestKillsOfServices. It says when it has its connections, calls
// until its standard input ends, and prints what came of it.
func TestCallingProcess(t *testing.T) {
	to, err := netip.ParseAddrPort(os.Getenv(callerVariable))
	if err != nil {
		return
	}
	ctx, stop := context.WithCancel(t.Context())
	go func() { io.Copy(io.Discard, os.Stdin); stop() }() //nolint:errcheck // any end is the end
	c := caller{networks: []string{"tcp6"}, keep: len(stable), dial: func(network string) (net.Conn, error) {
		return net.DialTimeout(network, to.String(), attemptTime)
	}}
	out := bufio.NewWriter(os.Stdout)
	report, err := c.run(ctx, func() { fmt.Fprintln(out, "ready"); out.Flush() })
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	json.NewEncoder(out).Encode(report) //nolint:errcheck // the test sees that it is missing
	out.Flush()
	os.Exit(0)
}
