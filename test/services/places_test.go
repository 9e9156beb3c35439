package services_test

import (
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// places has the namespaces of a lab, and a process in the cgroup of each node that connects from them.
type places struct {
	*bed
	ns      map[string]*netns.Namespace
	process map[string]*exchange // by node
}

// exchange is the connection to a process.
type exchange struct {
	to   *gob.Encoder
	from *gob.Decoder
}

// Attempt is a new connection, or a new flow of datagrams, whose server answers with its name. The fields are those
// that a process receives.
type Attempt struct {
	Namespace string // its path, also for a process with other mounts
	Network   string
	To        netip.AddrPort
	Must      bool // be answered or refused; else silence is as likely
}

// batch are attempts at the same time, and how long the process waits for answers that must come.
type batch struct {
	Attempts []Attempt
	Wait     time.Duration
}

// Outcomes besides names of servers and texts of other errors.
const (
	refused = "refused"
	denied  = "denied"
	silent  = "silent"
)

// quiet is how long after the last answer others may come that need not. The links are veths and macvlans: usually an
// answer has arrived when the call returns that connects.
const quiet = 3 * time.Millisecond

const placesVar = "PILASTER_TEST_PLACES"

// TestPlacesProcess is not a test but a process in a node's cgroup, which connects as it reads.
func TestPlacesProcess(*testing.T) {
	if os.Getenv(placesVar) == "" {
		return
	}
	runtime.LockOSThread()
	in, out := gob.NewDecoder(os.Stdin), gob.NewEncoder(os.Stdout)
	for {
		var b batch
		if err := in.Decode(&b); err != nil {
			os.Exit(0) // the test has closed the pipe
		}
		outcomes, err := b.run()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if err := out.Encode(outcomes); err != nil {
			os.Exit(1)
		}
	}
}

func newPlaces(b *bed) *places {
	p := &places{bed: b, ns: map[string]*netns.Namespace{}, process: map[string]*exchange{}}
	b.Cleanup(func() {
		for _, ns := range p.ns {
			ns.Close()
		}
	})
	for _, name := range b.PingTargets() {
		p.enter(name)
	}
	for _, node := range b.NodeNames() {
		command := exec.Command("/proc/self/exe", "-test.run=^TestPlacesProcess$")
		command.Env = append(os.Environ(), placesVar+"=1")
		command.Stderr = os.Stderr
		in, err := command.StdinPipe()
		must(b.T, err)
		out, err := command.StdoutPipe()
		must(b.T, err)
		must(b.T, b.Launch(node, command))
		b.Cleanup(func() {
			in.Close()
			command.Wait()
		})
		p.process[node] = &exchange{gob.NewEncoder(in), gob.NewDecoder(out)}
	}
	return p
}

// enter opens the namespace of a place, in which attempts then are made.
func (p *places) enter(name string) {
	p.Helper()
	ns, err := p.Namespace(name)
	must(p.T, err)
	p.ns[name] = ns
}

// leave closes the namespace of a place, which is about to end.
func (p *places) leave(name string) {
	p.ns[name].Close()
	delete(p.ns, name)
}

// path is where processes find the namespace of a place.
func (p *places) path(name string) string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.ns[name].FD())
}

// connect makes attempts at the same time. Those with the name of a node run in its cgroup, the others in none.
func (p *places) connect(all []Attempt, cgroups []string, wait time.Duration) []string {
	p.Helper()
	indexes, batches := map[string][]int{}, map[string]*batch{}
	for i, a := range all {
		b := batches[cgroups[i]]
		if b == nil {
			b = &batch{Wait: wait}
			batches[cgroups[i]] = b
		}
		b.Attempts, indexes[cgroups[i]] = append(b.Attempts, a), append(indexes[cgroups[i]], i)
	}
	outcomes := make([]string, len(all))
	put := func(cgroup string, some []string) {
		for i, outcome := range some {
			outcomes[indexes[cgroup][i]] = outcome
		}
	}
	for cgroup, b := range batches {
		if cgroup != "" {
			must(p.T, p.process[cgroup].to.Encode(b))
		}
	}
	if b := batches[""]; b != nil {
		var some []string
		must(p.T, netns.OnThread(func() (err error) {
			some, err = b.run()
			return err
		}))
		put("", some)
	}
	for cgroup := range batches {
		if cgroup != "" {
			var some []string
			must(p.T, p.process[cgroup].from.Decode(&some))
			put(cgroup, some)
		}
	}
	return outcomes
}

// flow is an attempt that has begun.
type flow struct {
	fd      int
	must    bool
	outcome string // empty: open
}

// run makes the attempts on this thread, which it leaves in another namespace.
func (b batch) run() ([]string, error) {
	flows := make([]flow, len(b.Attempts))
	byPlace := map[string][]int{}
	for i, a := range b.Attempts {
		byPlace[a.Namespace] = append(byPlace[a.Namespace], i)
	}
	for path, some := range byPlace {
		if err := enter(path); err != nil {
			return nil, err
		}
		for _, i := range some {
			if err := flows[i].open(b.Attempts[i]); err != nil {
				return nil, err
			}
			defer unix.Close(flows[i].fd)
		}
	}
	if err := receive(flows, time.Now().Add(b.Wait)); err != nil {
		return nil, err
	}
	outcomes := make([]string, len(flows))
	for i, f := range flows {
		if outcomes[i] = f.outcome; f.outcome == "" {
			outcomes[i] = silent
		}
	}
	return outcomes, nil
}

// enter moves this thread to a namespace.
func enter(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open namespace %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter namespace %s: %w", path, err)
	}
	return nil
}

// open begins an attempt. Its end resets a TCP connection, so that none stays.
func (f *flow) open(a Attempt) (err error) {
	kind := unix.SOCK_STREAM
	if a.Network == "UDP" {
		kind = unix.SOCK_DGRAM
	}
	f.must = a.Must
	if f.fd, err = unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if err := unix.SetsockoptLinger(f.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("linger: %w", err)
	}
	err = unix.Connect(f.fd, &unix.SockaddrInet6{Addr: a.To.Addr().As16(), Port: int(a.To.Port())})
	if err == nil && kind == unix.SOCK_DGRAM {
		_, err = unix.Write(f.fd, []byte("?"))
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		f.outcome = outcomeOf(err)
	}
	return nil
}

// receive takes answers until those that must come have come and nothing else does, or until the time is over.
func receive(flows []flow, end time.Time) error {
	for {
		var wait time.Duration = quiet
		var fds []unix.PollFd
		var open []*flow
		for i := range flows {
			f := &flows[i]
			if f.outcome != "" {
				continue
			}
			if f.must {
				wait = max(quiet, time.Until(end))
			}
			fds, open = append(fds, unix.PollFd{Fd: int32(f.fd), Events: unix.POLLIN}), append(open, f)
		}
		if len(open) == 0 {
			return nil
		}
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll: %w", err)
		}
		if err == nil && n == 0 {
			return nil
		}
		for i, f := range open {
			if err == nil && fds[i].Revents != 0 {
				f.take()
			}
		}
	}
}

// take takes the answer of an attempt, or its error.
func (f *flow) take() {
	var name [64]byte
	n, err := unix.Read(f.fd, name[:])
	switch {
	case errors.Is(err, unix.EAGAIN):
	case err != nil:
		f.outcome = outcomeOf(err)
	default:
		f.outcome = strings.TrimSpace(string(name[:n]))
	}
}

func outcomeOf(err error) string {
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return refused
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return denied
	}
	return err.Error()
}

// serveAt runs servers in a container at a port, for both protocols, which answer with the container's name and port
// until the returned function is called.
func (b *bed) serveAt(container string, port uint16) (end func()) {
	b.Helper()
	ns, err := b.Namespace(container)
	must(b.T, err)
	defer ns.Close()
	var l net.Listener
	var datagrams *net.UDPConn
	must(b.T, ns.Do(func() (err error) {
		if l, err = net.Listen("tcp6", fmt.Sprintf("[::]:%d", port)); err != nil {
			return err
		}
		datagrams, err = net.ListenUDP("udp6", &net.UDPAddr{Port: int(port)})
		return err
	}))
	name := []byte(serverName(container, port))
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.Write(name)
				c.Read(make([]byte, 1)) // until the client resets
			}()
		}
	}()
	go func() {
		for {
			_, from, err := datagrams.ReadFromUDPAddrPort(make([]byte, 8))
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				datagrams.WriteToUDPAddrPort(name, from)
			}
		}
	}()
	return func() { l.Close(); datagrams.Close() }
}

func serverName(container string, port uint16) string { return fmt.Sprintf("%s:%d", container, port) }
