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
	index   map[string]int // of a place's namespace
	ns      []*netns.Namespace
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
	Place   int // index of its namespace
	Network string
	To      netip.AddrPort
	Must    bool // be answered or refused; else silence is as likely
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

// TestPlacesProcess is not a test but a process in a node's cgroup. It has the namespaces as files, and connects from
// them as it reads.
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
		outcomes, err := b.run(func(place int) int { return 3 + place })
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
	p := &places{bed: b, index: map[string]int{}, process: map[string]*exchange{}}
	var files []*os.File
	for _, name := range b.PingTargets() {
		ns, err := b.Namespace(name)
		must(b.T, err)
		b.Cleanup(func() { ns.Close() })
		file, err := os.Open(ns.Path())
		must(b.T, err)
		defer file.Close()
		p.index[name] = len(p.ns)
		p.ns, files = append(p.ns, ns), append(files, file)
	}
	for _, node := range b.NodeNames() {
		command := exec.Command("/proc/self/exe", "-test.run=^TestPlacesProcess$")
		command.Env = append(os.Environ(), placesVar+"=1")
		command.ExtraFiles, command.Stderr = files, os.Stderr
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
			some, err = b.run(func(place int) int { return p.ns[place].FD() })
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
func (b batch) run(namespace func(place int) int) ([]string, error) {
	flows := make([]flow, len(b.Attempts))
	byPlace := map[int][]int{}
	for i, a := range b.Attempts {
		byPlace[a.Place] = append(byPlace[a.Place], i)
	}
	for place, some := range byPlace {
		if err := unix.Setns(namespace(place), unix.CLONE_NEWNET); err != nil {
			return nil, fmt.Errorf("enter namespace %d: %w", place, err)
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

// serveAt runs servers in a container at a port, for both protocols, which answer with the container's name and port.
func (b *bed) serveAt(container string, port uint16) {
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
		b.Cleanup(func() { l.Close() })
		datagrams, err = net.ListenUDP("udp6", &net.UDPAddr{Port: int(port)})
		return err
	}))
	b.Cleanup(func() { datagrams.Close() })
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
}

func serverName(container string, port uint16) string { return fmt.Sprintf("%s:%d", container, port) }
