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

// talkerEnv has the test's binary be a process with connections of its own in a container.
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

// pipe is how a test and a talker reach each other.
type pipe struct {
	io.Reader
	io.WriteCloser
}

// A Talker has one end of each of some connections, and says on demand something on those that it accepted. Who dialled
// says the same again: so the first word is that of the one who may begin nothing, and passes by what is remembered
// alone.
type Talker struct {
	listener net.Listener
	accepted chan error
	arrived  chan int // connections, as their words come back
	waits    int      // for so many of them

	open   atomic.Int64
	mu     sync.Mutex
	failed error // of one of the connections, the first time
	ends   []*talk
}

// talk is one connection. A word is the number that who accepted it gave it, and how many there were.
type talk struct {
	net.Conn
	number uint32
	words  atomic.Uint32
}

const wordLength = 8

func (c *talk) word() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, c.number), c.words.Load())
}

// Listen has connections be accepted from now on.
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

// keep has a connection end at once when the process does, so that nothing of it is on the way later.
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

// Accept returns when so many connections are accepted.
func (t *Talker) Accept(count int, _ *int) error {
	for n := range count {
		select {
		case err := <-t.accepted:
			if err != nil {
				return err
			}
		case <-time.After(patience):
			return fmt.Errorf("%d of %d connections were accepted, and none for %v", n, count, patience)
		}
	}
	return nil
}

// Dials are connections to make, to each of some in turn.
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

// repeat says every word again.
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
			return fmt.Errorf("%x arrives, and not %x", b, c.word())
		}
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
}

// receive wants every word back.
func (t *Talker) receive(c *talk) error {
	for b := make([]byte, wordLength); ; {
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
		if string(b) != string(c.word()) {
			return fmt.Errorf("%x comes back of %x", b, c.word())
		}
		t.arrived <- 1
	}
}

// Say says a word on a share of the connections, chosen by chance, and returns how many those are.
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

// Arrived returns how many of the words have come back, when all have, or none has for so long.
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

// Open is how many connections there are, none of which ever failed.
func (t *Talker) Open(_ int, open *int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	*open = int(t.open.Load())
	return t.failed
}

// talkers are processes of several containers.
type talkers []*rpc.Client

// start starts another one.
func (all *talkers) start(t *testing.T, l *lab.Lab, container string) *rpc.Client {
	t.Helper()
	cmd := exec.Command(os.Args[0]) // it ends when its standard input ends
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

// end has all of them end at the same time.
func (all talkers) end() {
	for _, c := range all {
		c.Close()
	}
}

// each asks all of them at once for a number, and adds those up.
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
