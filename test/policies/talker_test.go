package policies_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
)

// talkerEnv makes the test's binary act as a Talker, a process in a container.
const talkerEnv = "PILASTER_TEST_TALKER"

func TestMain(m *testing.M) {
	if os.Getenv(talkerEnv) == "" {
		os.Exit(m.Run())
	}
	server := rpc.NewServer()
	if err := server.Register(&Talker{accepted: make(chan error), arrived: make(chan int)}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	server.ServeConn(pipe{os.Stdin, os.Stdout})
}

// pipe connects a test and a talker.
type pipe struct {
	io.Reader
	io.WriteCloser
}

// Talker is one end of a number of connections. It sends messages on the connections that it has accepted, and echoes
// messages on those that it has dialled. So the first message comes from the end that may not open connections, and
// passes only because there is a session.
type Talker struct {
	listener net.Listener
	accepted chan error
	arrived  chan int // numbers of connections whose echo arrived
	waits    int      // number of missing echoes

	open   atomic.Int64
	mu     sync.Mutex
	failed error // first error of a connection
	ends   []*talk
}

// talk is one connection. A message has a sequence number, and the number of the connection at the accepting end.
type talk struct {
	net.Conn
	number uint32
	words  atomic.Uint32
}

const wordLength = 8

func (c *talk) word() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, c.number), c.words.Load())
}

// Listen starts to accept connections.
func (t *Talker) Listen(at netip.AddrPort, _ *int) (err error) {
	t.listener, err = net.Listen("tcp", at.String())
	if err == nil {
		go t.acceptAll()
	}
	return err
}

func (t *Talker) acceptAll() {
	for {
		c, err := t.listener.Accept()
		if err == nil {
			err = t.keep(c, t.receive)
		}
		t.accepted <- err
	}
}

// keep attends to a connection. When the process ends, the kernel resets the connection, so that no packets of it are
// in flight later.
func (t *Talker) keep(c net.Conn, attend func(*talk) error) error {
	end := &talk{Conn: c, number: uint32(len(t.ends))}
	t.ends = append(t.ends, end)
	t.open.Add(1)
	go func() {
		err := attend(end)
		t.open.Add(-1)
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.failed == nil {
			t.failed = fmt.Errorf("connection %d from %v to %v: %w", end.number, c.LocalAddr(), c.RemoteAddr(), err)
		}
	}()
	return c.(*net.TCPConn).SetLinger(0)
}

// Accept waits until count connections are accepted.
func (t *Talker) Accept(count int, _ *int) error {
	for n := range count {
		select {
		case err := <-t.accepted:
			if err != nil {
				return err
			}
		case <-time.After(patience):
			return fmt.Errorf("%d of %d connections were accepted, but none in the last %v", n, count, patience)
		}
	}
	return nil
}

// Dials is the number of connections to open, and the servers, which are used in turn.
type Dials struct {
	To    []netip.AddrPort
	Count int
}

func (t *Talker) Dial(d Dials, _ *int) error {
	for n := range d.Count {
		c, err := net.DialTimeout("tcp", d.To[n%len(d.To)].String(), patience)
		if err != nil {
			return fmt.Errorf("connection %d: %w", n, err)
		}
		if err := t.keep(c, repeat); err != nil {
			return err
		}
	}
	return nil
}

// repeat echoes every message.
func repeat(c *talk) error {
	for b := make([]byte, wordLength); ; {
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
		number := binary.BigEndian.Uint32(b)
		if c.words.Add(1) == 1 {
			c.number = number
		}
		if string(b) != string(c.word()) {
			return fmt.Errorf("received %x, want %x", b, c.word())
		}
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
}

// receive checks every echo.
func (t *Talker) receive(c *talk) error {
	for b := make([]byte, wordLength); ; {
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
		if string(b) != string(c.word()) {
			return fmt.Errorf("received echo %x, want %x", b, c.word())
		}
		t.arrived <- 1
	}
}

// Say sends a message on a random share of the connections, and returns the number of messages.
func (t *Talker) Say(share float64, said *int) error {
	for _, c := range t.ends {
		if rand.Float64() >= share {
			continue
		}
		c.words.Add(1)
		if _, err := c.Write(c.word()); err != nil {
			return fmt.Errorf("connection %d: %w", c.number, err)
		}
		*said++
	}
	t.waits = *said
	return nil
}

// Arrived returns the number of echoes when all have arrived, or when no echo has arrived for the duration of patience.
func (t *Talker) Arrived(patience time.Duration, arrived *int) error {
	for patient := time.NewTimer(patience); *arrived < t.waits; patient.Reset(patience) {
		select {
		case n := <-t.arrived:
			*arrived += n
		case <-patient.C:
			return nil
		}
	}
	return nil
}

// Open returns the number of connections, or the first error of any of them.
func (t *Talker) Open(_ int, open *int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	*open = int(t.open.Load())
	return t.failed
}

// talkers are processes in several containers.
type talkers []*rpc.Client

// start starts another process.
func (all *talkers) start(t *testing.T, l *lab.Lab, container string) *rpc.Client {
	t.Helper()
	cmd := exec.Command(os.Args[0]) // the process ends when its standard input is closed
	cmd.Env, cmd.Stderr = append(os.Environ(), talkerEnv+"=1"), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Launch(container, cmd); err != nil {
		t.Fatal(err)
	}
	client := rpc.NewClient(pipe{out, in})
	t.Cleanup(func() {
		client.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("a process in %s: %v", container, err)
		}
	})
	*all = append(*all, client)
	return client
}

// end ends all of them concurrently.
func (all talkers) end() {
	for _, c := range all {
		c.Close()
	}
}

// each calls a method of all of them concurrently, and returns the sum of the results.
func (all talkers) each(method string, argument any) (sum int, err error) {
	var calls []*rpc.Call
	for _, c := range all {
		calls = append(calls, c.Go("Talker."+method, argument, new(int), nil))
	}
	for _, call := range calls {
		<-call.Done
		sum += *call.Reply.(*int)
		err = errors.Join(err, call.Error)
	}
	return sum, err
}
