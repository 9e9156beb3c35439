package restart_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	servicePort, backendPort = 80, 8080

	nameBytes   = 8 // of the name of a backend in its answers
	numberBytes = 8

	// noticeTime is the bound after which new connections reach no backend that drains or is gone, from when all agents
	// run and are connected to the orchestrator, on a busy machine. Without kills a change takes milliseconds
	// (TestChangesAreInForce). The start of an agent takes seconds, and its node notices nothing until then.
	noticeTime = 5 * time.Second

	// livingTime is the bound within which a caller gets a living backend, whatever is killed: a call to a backend that
	// is gone ends after attemptTime, and the next one most likely gets another backend.
	livingTime = 5 * time.Second

	// betweenDatagrams is the pause of a flow through a service.
	betweenDatagrams = 4 * time.Millisecond
)

// stable are the backends that are there throughout.
var stable = []string{"w1", "w2", "w3"}

// TestKillsOfServices kills the agents of three nodes, also for another build, and the orchestrator, which is away for
// a while too (a minute in a long run). Meanwhile containers use a service: over connections whose socket got its
// backend, over TCP on the packet path, and over UDP. Backends come, drain and go. No datagram and no segment of an
// established flow is lost. New connections get a living backend within livingTime, and at once when all agents have
// run for noticeTime.
func TestKillsOfServices(t *testing.T) {
	if labtest.Network() != tenant.Netpila {
		t.Setenv(labtest.NetworkVariable, tenant.Netpila)
	}
	kills := setting(t, "PILASTER_RESTART_KILLS", 8)
	away := 3 * time.Second
	if kills >= 50 {
		away = time.Minute
	}
	seed := uint64(rand.Uint32())
	t.Logf("seed %d", seed)
	b := newServiceBed(t, seed)
	var held []*stream
	for _, from := range []string{"c1", "c2"} {
		held = append(held, b.keepFlows(from)...)
	}
	var callers []*calling
	for _, from := range []string{"c1", "c2"} {
		callers = append(callers, b.callOnPackets(from))
	}
	for _, from := range []string{"p1", "p3"} {
		callers = append(callers, b.callByProcess(from))
	}
	for _, c := range callers {
		c.isReady(t)
	}
	nodes := b.lab.NodeNames()
	for turn, wasAway := 0, false; b.kills < kills || turn < len(steps); turn++ {
		node, step := nodes[turn%len(nodes)], turn%len(steps)
		changed := make(chan error, 1)
		go func() { changed <- b.change(turn, nodes[(turn+1)%len(nodes)]) }()
		if !labtest.OtherHasServices(t) || turn%2 == 1 {
			b.young(node)
		} else {
			b.duringUpgrade(node)
		}
		b.must(<-changed)
		b.ready(node)
		// No node has to notice that a backend is gone while there is no orchestrator.
		switch {
		case step == len(steps)-1:
			_, err := b.lab.Crash(t.Context(), lab.Orchestrator)
			b.must(err)
			b.must(b.lab.Await(t.Context(), lab.Orchestrator))
		case step == 1 && !wasAway:
			b.withoutOrchestrator(away)
			wasAway = true
		}
		b.connected()
		b.settle()
	}
	for node, build := range b.running {
		if build != 0 {
			b.builds.choose(t, 0)
			b.crash(node, "to go back to this build")
			b.ready(node)
		}
	}
	for _, c := range callers {
		b.judgeSockets(c)
	}
	b.stop()
	for _, s := range held {
		s.finish(t, b.start)
	}
	b.judge(callers)
	t.Logf("%d kills in %v; %d starts were of another build than the previous one, and %d of those were interrupted; "+
		"%d changes of backends", b.kills, time.Since(b.start).Round(time.Second), b.upgrades, b.cutUpgrades,
		len(b.changes))
}

// serviceBed is a lab with a service.
type serviceBed struct {
	*killer
	to      netip.AddrPort
	sending context.Context
	stop    context.CancelFunc

	servers map[string]func() // what stops the servers of a backend
	lost    atomic.Int64      // segments of stable backends
	changes []change
}

func newServiceBed(t *testing.T, seed uint64) *serviceBed {
	t.Helper()
	builds := newBuilds(t)
	spec := lab.Spec{
		Nodes:   []string{"n1", "n2", "n3"},
		Device:  labtest.Device(),
		Tenants: []lab.Tenant{{Name: "shop"}},
		Containers: []lab.Container{
			{Name: "c1", Node: "n1", Tenant: "shop"}, {Name: "c2", Node: "n2", Tenant: "shop"},
			{Name: "p1", Node: "n1", Tenant: "shop"}, {Name: "p3", Node: "n3", Tenant: "shop"},
		},
	}
	for i, name := range stable {
		spec.Containers = append(spec.Containers, backend(name, spec.Nodes[i]))
	}
	l := labtest.New(t, spec, func(o *lab.Options) {
		// Another build without services, and so without this flag, never runs.
		o.Binary, o.WithoutCgroups = builds.binary, false
	})
	b := &serviceBed{servers: map[string]func(){}, killer: &killer{T: t, lab: l, builds: builds,
		running: map[string]int{}, random: rand.New(rand.NewPCG(seed, 0)), start: time.Now()}}
	for _, name := range stable {
		b.must(b.serve(name))
	}
	made, err := l.Operator().CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{
		Service: &pilasterv1.Service{
			Tenant: "shop", Name: "web", Selector: map[string]string{"app": "web"},
			Ports: []*pilasterv1.ServicePort{
				{Name: "tcp", Protocol: "TCP", Port: servicePort, Target: backendPort},
				{Name: "udp", Protocol: "UDP", Port: servicePort, Target: backendPort},
			},
		},
	}))
	b.must(err)
	at, err := netip.ParseAddr(made.Msg.Service.Address)
	b.must(err)
	b.to = netip.AddrPortFrom(at, servicePort)
	b.sending, b.stop = context.WithCancel(t.Context())
	t.Cleanup(b.stop)
	return b
}

func backend(name, node string) lab.Container {
	return lab.Container{Name: name, Node: node, Tenant: "shop", Labels: map[string]string{"app": "web"}}
}

// serve runs the servers of a backend: each answers with the backend's name first. That of TCP then echoes, that of UDP
// repeats the datagram.
func (b *serviceBed) serve(name string) error {
	var l net.Listener
	var u *net.UDPConn
	if err := <-labtest.RunIn(b.T, b.lab, name, func() (err error) {
		at := fmt.Sprintf("[::]:%d", backendPort)
		if l, err = net.Listen("tcp6", at); err != nil {
			return err
		}
		u, err = listenLarge(at)
		return err
	}); err != nil {
		return fmt.Errorf("serve in %s: %w", name, err)
	}
	title := append([]byte(name), make([]byte, nameBytes)...)[:nameBytes]
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.Write(title) //nolint:errcheck // the caller notices
				io.Copy(c, c)  //nolint:errcheck // the caller notices
				if slices.Contains(stable, name) {
					b.lost.Add(int64(lostSegments(c)))
				}
			}()
		}
	}()
	go func() {
		answer := make([]byte, nameBytes+numberBytes)
		copy(answer, title)
		for {
			n, from, err := u.ReadFromUDPAddrPort(answer[nameBytes:])
			if err != nil {
				return
			}
			u.WriteToUDPAddrPort(answer[:nameBytes+n], from) //nolint:errcheck // the caller notices
		}
	}()
	stop := func() { l.Close(); u.Close() }
	b.servers[name] = stop
	b.Cleanup(stop)
	return nil
}

// nameIn is the name in the answer of a backend.
func nameIn(answer []byte) string { return strings.TrimRight(string(answer[:nameBytes]), "\x00") }

// listenLarge listens with a buffer so large that a slow server loses nothing.
func listenLarge(at string) (*net.UDPConn, error) {
	c, err := net.ListenPacket("udp6", at)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), enlarge(c.(*net.UDPConn))
}

func enlarge(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	}); e != nil {
		return e
	}
	return err
}

// caller is a caller in the test's process, which is in no cgroup of a node: its packets are translated.
func (b *serviceBed) caller(from string) *caller {
	dial := func(network string) (c net.Conn, err error) {
		err = <-labtest.RunIn(b.T, b.lab, from, func() (err error) {
			c, err = net.DialTimeout(network, b.to.String(), attemptTime)
			return err
		})
		return c, err
	}
	return &caller{dial: dial, networks: []string{"tcp6", "udp6"}, keep: len(stable)}
}

// keepFlows opens a flow of datagrams to each stable backend, and sends on it until b.stop.
func (b *serviceBed) keepFlows(from string) (all []*stream) {
	b.Helper()
	c, flows := b.caller(from), map[string]net.Conn{}
	labtest.Until(b.T, labtest.Patience, from+" reaches all backends", func() bool {
		if name, conn, err := c.open("udp6"); err == nil && flows[name] == nil {
			flows[name] = conn
		} else if err == nil {
			conn.Close()
		}
		return len(flows) == len(stable)
	})
	for name, conn := range flows {
		conn.SetDeadline(time.Time{}) //nolint:errcheck // a read that fails counts
		b.must(enlarge(conn.(*net.UDPConn)))
		b.Cleanup(func() { conn.Close() })
		s := &stream{from: from, to: name + " through the service", complete: make(chan struct{})}
		go s.readAnswers(conn, name)
		ended := make(chan error, 1)
		s.ended = ended
		go func() { ended <- s.ask(b.sending, conn) }()
		all = append(all, s)
	}
	return all
}

// ask sends numbered datagrams.
func (s *stream) ask(ctx context.Context, conn net.Conn) error {
	s.flows = 1
	next := time.Now()
	for ; ctx.Err() == nil; time.Sleep(time.Until(next)) {
		if _, err := conn.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s.sent)))); err != nil {
			return fmt.Errorf("datagram %d: %w", len(s.sent), err)
		}
		now := time.Now()
		s.sent = append(s.sent, now)
		if next = next.Add(betweenDatagrams); now.Sub(next) > maxLate {
			next = now
		}
	}
	return nil
}

// readAnswers notes the numbers of answers of a backend. Those of another one are missing in the end.
func (s *stream) readAnswers(conn net.Conn, backend string) {
	answer := make([]byte, nameBytes+numberBytes)
	for {
		n, err := conn.Read(answer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && n == len(answer) && nameIn(answer) == backend {
			s.note(int(binary.BigEndian.Uint64(answer[nameBytes:])))
		}
	}
}

// calling is a caller that runs.
type calling struct {
	from   string
	ready  chan struct{}
	result chan callReport
	failed chan error
	end    func()

	translated bool // packets are, so sockets are connected to the service
}

func newCalling(from string) *calling {
	return &calling{from: from, ready: make(chan struct{}), result: make(chan callReport, 1),
		failed: make(chan error, 1), end: func() {}, translated: true}
}

func (c *calling) isReady(t *testing.T) {
	t.Helper()
	select {
	case <-c.ready:
	case err := <-c.failed:
		t.Fatalf("%s: %v", c.from, err)
	case <-time.After(labtest.Patience):
		t.Fatalf("%s does not reach all backends", c.from)
	}
}

// callOnPackets runs a caller on the packet path.
func (b *serviceBed) callOnPackets(from string) *calling {
	c := newCalling(from)
	go func() {
		report, err := b.caller(from).run(b.sending, func() { close(c.ready) })
		if err != nil {
			c.failed <- err
			return
		}
		c.result <- report
	}()
	return c
}

// callByProcess runs a process of the cgroup of the container's node as a caller: its sockets get their backends.
func (b *serviceBed) callByProcess(from string) *calling {
	b.Helper()
	c := newCalling(from)
	command := exec.Command("/proc/self/exe", "-test.run=^TestCallingProcess$")
	command.Env = append(os.Environ(), callerVariable+"="+b.to.String())
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	b.must(err)
	out, err := command.StdoutPipe()
	b.must(err)
	b.must(b.lab.Launch(from, command))
	c.translated, c.end = false, func() { in.Close() }
	b.Cleanup(func() { in.Close() })
	go func() {
		defer command.Wait() //nolint:errcheck // the report counts
		lines := bufio.NewReader(out)
		if _, err := lines.ReadString('\n'); err != nil {
			c.failed <- fmt.Errorf("the process ended: %w", err)
			return
		}
		close(c.ready)
		var report callReport
		if err := json.NewDecoder(lines).Decode(&report); err != nil {
			c.failed <- fmt.Errorf("report of the process: %w", err)
			return
		}
		c.result <- report
	}()
	return c
}

// judgeSockets checks what the kernel's sockets of a caller are connected to: the service, or its backends. That
// includes connections of the last minute.
func (b *serviceBed) judgeSockets(c *calling) {
	b.Helper()
	var text []byte
	b.must(<-labtest.RunIn(b.T, b.lab, c.from, func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/tcp6")
		return err
	}))
	if strings.Contains(string(text), kernelHex(b.to.Addr())) != c.translated {
		b.Errorf("%s: sockets are connected to the service: %v, want %v", c.from, !c.translated, c.translated)
	}
}

// kernelHex is an address as /proc/net/tcp6 has it: words in the byte order of the machine.
func kernelHex(a netip.Addr) (text string) {
	bytes := a.As16()
	for word := range slices.Chunk(bytes[:], 4) {
		text += fmt.Sprintf("%08X", binary.NativeEndian.Uint32(word))
	}
	return text
}

// change is what happens to a backend that comes: it serves until leave, when it begins to drain or is gone. Since
// settled all agents can have noticed that. A zero time has not come.
type change struct {
	backend                       string
	added, served, leave, settled time.Time
	drains                        bool
}

// settle notes that all agents are connected.
func (b *serviceBed) settle() {
	for i := range b.changes {
		if c := &b.changes[i]; !c.leave.IsZero() && c.settled.IsZero() {
			c.settled = time.Now()
		}
	}
}

// steps are the changes, one a turn: two backends come, one goes at once, the other drains and then goes.
var steps = []func(*serviceBed, string) error{
	(*serviceBed).add, (*serviceBed).add, (*serviceBed).removeAtOnce, (*serviceBed).drain, (*serviceBed).removeDrained,
}

// change makes the change of a turn; backends that come run on this node.
func (b *serviceBed) change(turn int, node string) error { return steps[turn%len(steps)](b, node) }

func (b *serviceBed) add(node string) error {
	c := backend(fmt.Sprint("x", len(b.changes)), node)
	b.changes = append(b.changes, change{backend: c.Name, added: time.Now()})
	if err := b.lab.AddContainer(b.Context(), c); err != nil {
		return err
	}
	if err := b.serve(c.Name); err != nil {
		return err
	}
	b.changes[len(b.changes)-1].served = time.Now()
	return nil
}

func (b *serviceBed) removeAtOnce(string) error {
	c := &b.changes[len(b.changes)-2]
	c.leave = time.Now()
	return b.remove(c.backend)
}

func (b *serviceBed) drain(string) error {
	c := &b.changes[len(b.changes)-1]
	at, err := b.lab.Container(c.backend)
	if err != nil {
		return err
	}
	c.leave, c.drains = time.Now(), true
	yes := true
	_, err = b.lab.Agent(at.Node).SetEndpoint(b.Context(), connect.NewRequest(&pilasterv1.SetEndpointRequest{
		Key: b.lab.ContainerID(c.backend), Terminating: &yes,
	}))
	return err
}

// removeDrained removes the backend that drains, as soon as new connections may not reach it any more.
func (b *serviceBed) removeDrained(string) error {
	c := b.changes[len(b.changes)-1]
	time.Sleep(time.Until(c.settled.Add(noticeTime)))
	return b.remove(c.backend)
}

func (b *serviceBed) remove(name string) error {
	if err := b.lab.RemoveContainer(b.Context(), name); err != nil {
		return err
	}
	b.servers[name]()
	return nil
}

// withoutOrchestrator kills agents while there is no orchestrator, for this long.
func (b *serviceBed) withoutOrchestrator(away time.Duration) {
	b.Helper()
	b.must(b.lab.KillNoRestart(b.Context(), lab.Orchestrator))
	begun, nodes := time.Now(), b.lab.NodeNames()
	for i := 0; time.Since(begun) < away; i++ {
		node := nodes[i%len(nodes)]
		b.crash(node, "without an orchestrator")
		b.must(b.lab.Await(b.Context(), lab.AgentProcess(node)))
	}
	b.must(b.lab.Start(b.Context(), lab.Orchestrator))
	b.Logf("the orchestrator was away for %v", time.Since(begun).Round(time.Millisecond))
}

// connected waits until all agents are connected to the orchestrator: they reconnect with a backoff.
func (b *serviceBed) connected() {
	b.Helper()
	for _, node := range b.lab.NodeNames() {
		labtest.Until(b.T, labtest.Patience, node+" is connected to the orchestrator", func() bool {
			request := connect.NewRequest(&pilasterv1.GetNodeRequest{Name: node})
			got, err := b.lab.Operator().GetNode(b.Context(), request)
			if err != nil || !got.Msg.Node.Connected {
				return false
			}
			status, err := b.lab.Agent(node).Status(b.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
			return err == nil && status.Msg.Orchestrator.GetConnected()
		})
	}
}

// judge ends the callers and judges their reports.
func (b *serviceBed) judge(callers []*calling) {
	b.Helper()
	reached := map[string]int{}
	for _, c := range callers {
		c.end()
		select {
		case r := <-c.result:
			b.judgeKept(c.from, r.Kept)
			b.judgeCalls(c.from, r.Calls, reached)
		case err := <-c.failed:
			b.Errorf("%s: %v", c.from, err)
		case <-time.After(2 * maxStall):
			b.Errorf("%s has not ended", c.from)
		}
	}
	if n := b.lost.Load(); n != 0 {
		b.Errorf("%d segments of backends were lost", n)
	}
	for _, c := range b.changes {
		if reached[c.backend] == 0 {
			b.Errorf("no new connection reached backend %s, which came at %v", c.backend, c.added.Sub(b.start))
		}
	}
}

func (b *serviceBed) judgeKept(from string, all []kept) {
	b.Helper()
	exchanges, longest := 0, time.Duration(0)
	for _, k := range all {
		exchanges, longest = exchanges+k.Exchanges, max(longest, k.Longest)
		if k.Error != "" || k.Lost != 0 || k.Exchanges == 0 {
			b.Errorf("%s: the connection to %s has lost %d segments in %d exchanges: %s", from, k.Backend, k.Lost,
				k.Exchanges, k.Error)
		}
	}
	b.Logf("%s: %d exchanges on %d connections, the longest took %v", from, exchanges, len(all), longest)
	if len(all) != len(stable) {
		b.Errorf("%s kept %d connections, want %d", from, len(all), len(stable))
	}
}

// judgeCalls checks when calls failed, how long callers waited for a living backend, and how long new connections
// reached backends that were leaving. It counts the answers of each backend.
func (b *serviceBed) judgeCalls(from string, all []call, reached map[string]int) {
	b.Helper()
	var waits []time.Duration
	var failed int
	var left, noticed time.Duration // the latest call to a backend that had left, from leave and settled
	for _, c := range all {
		after := c.Start.Sub(b.start).Round(time.Millisecond)
		if c.Error != "" {
			failed++
			if !b.mayFail(c.Start) {
				b.Errorf("%s: a call (%s) failed at %v, when no backend had come or gone: %s", from, c.Network, after,
					c.Error)
			}
			continue
		}
		reached[c.Backend]++
		waits = append(waits, c.Since)
		for _, ch := range b.changes {
			if ch.backend == c.Backend && !ch.leave.IsZero() {
				left, noticed = max(left, c.Start.Sub(ch.leave)), max(noticed, c.Start.Sub(ch.settled))
			}
		}
		if c.Since > livingTime {
			b.Errorf("%s: it took %v to get a living backend (%s) at %v, want at most %v", from, c.Since, c.Network,
				after, livingTime)
		}
	}
	if noticed > noticeTime {
		b.Errorf("%s: a backend that had left got a new connection %v after all agents ran, want at most %v", from,
			noticed, noticeTime)
	}
	if len(waits) == 0 {
		b.Errorf("%s made no call", from)
		return
	}
	slices.Sort(waits)
	b.Logf("%s: %d calls, %d attempts failed; a living backend after: median %v, P99 %v, maximum %v; a backend that "+
		"drains was chosen for at most %v, %v after all agents ran", from, len(waits), failed, waits[len(waits)/2],
		waits[len(waits)*99/100], waits[len(waits)-1], left, noticed)
}

// mayFail reports whether a call may fail that began at this time: while a backend has no server yet, or after one has
// gone without draining.
func (b *serviceBed) mayFail(at time.Time) bool {
	within := func(from, to time.Time) bool { return !at.Before(from) && at.Before(to) }
	return slices.ContainsFunc(b.changes, func(c change) bool {
		gone := !c.leave.IsZero() && !c.drains
		// A call that has begun just before may meet the change.
		return within(c.added.Add(-attemptTime), c.served) ||
			gone && within(c.leave.Add(-attemptTime), c.settled.Add(noticeTime))
	})
}
