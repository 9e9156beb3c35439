package accelerate_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/cli"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/sdnotify"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// commandLine is the environment variable with which the tests' program is the command line.
const commandLine = "PILASTER_TEST_COMMAND_LINE"

func TestMain(m *testing.M) {
	line := os.Getenv(commandLine)
	if line == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	code := cli.Run(ctx, cli.Env{Args: strings.Fields(line), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	stop()
	os.Exit(code)
}

// node is a node of a cluster of two, with the devices of another network.
type node struct {
	ns         *netns.Namespace
	number     int
	dir        string
	containers map[string]*netns.Namespace // by device
	overlay    string
	mac        string // of the overlay's device
	gateway    string // address of the overlay's device
	prefix     string // of the containers
	selector   string // --containers
	device     string // begins the names of containers' devices
	mtu        int
	// connect returns commands that connect a container: of the node, and inside.
	connect func(device string, host int) (here, inside string)
}

func namespace(t *testing.T, dir, name string) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(filepath.Join(dir, name))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	return ns
}

// run runs lines of "ip -batch"; other commands begin with "!".
func run(ns *netns.Namespace, lines string) error {
	for line := range strings.Lines(lines) {
		words := append([]string{"ip"}, strings.Fields(line)...)
		if len(words) == 1 {
			continue
		}
		if words[1] == "!" {
			words = words[2:]
		}
		if out, err := output(ns, exec.Command(words[0], words[1:]...)); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, out)
		}
	}
	return nil
}

func ip(t *testing.T, ns *netns.Namespace, lines string, args ...any) {
	t.Helper()
	must(t, run(ns, fmt.Sprintf(lines, args...)))
}

func output(ns *netns.Namespace, c *exec.Cmd) (string, error) {
	var said strings.Builder
	c.Stdout, c.Stderr = &said, &said
	err := ns.Run(c)
	return said.String(), err
}

// nodes returns two nodes that are connected by their eth0, with underlay addresses 192.0.2.1 and 192.0.2.2, or
// 2001:db8::1 and 2001:db8::2.
func nodes(t *testing.T) [2]*node {
	t.Helper()
	dir := t.TempDir()
	var both [2]*node
	for i := range both {
		n := &node{number: i + 1, dir: dir, containers: map[string]*netns.Namespace{}}
		n.ns = namespace(t, dir, fmt.Sprintf("n%d", n.number))
		t.Cleanup(func() { // a killed daemon leaves it
			for _, file := range n.locks(t) {
				must(t, os.Remove(file))
			}
		})
		both[i] = n
	}
	ip(t, both[0].ns, "link add eth0 mtu 1500 type veth peer name eth0 mtu 1500 netns %s", both[1].ns.Path())
	for _, n := range both {
		ip(t, n.ns, `
			! sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
			addr add 192.0.2.%[1]d/24 dev eth0
			addr add 2001:db8::%[1]d/64 dev eth0 nodad
			link set eth0 up
			route add default via 192.0.2.254`, n.number)
	}
	return both
}

// flannel arranges the devices as Flannel and the CNI plugin bridge do. The bridge keeps its MAC, which otherwise
// changes with its ports, so that containers lose packets until they have resolved it again.
func flannel(t *testing.T) [2]*node {
	return flannelOver(t, "192.0.2.", "dstport 8472 nolearning", 1450)
}

// flannel6 does so over IPv6.
func flannel6(t *testing.T) [2]*node {
	return flannelOver(t, "2001:db8::", "dstport 8472 nolearning udp6zerocsumtx udp6zerocsumrx", 1430)
}

func flannelOver(t *testing.T, underlay, options string, mtu int) [2]*node {
	both := nodes(t)
	for _, n := range both {
		n.overlay, n.selector, n.device, n.mtu = "flannel.1", "bridge:cni0", "veth", mtu
		n.gateway, n.prefix = fmt.Sprintf("10.244.%d.0", n.number), fmt.Sprintf("10.244.%d.0/24", n.number)
		n.mac = fmt.Sprintf("02:fa:00:00:00:0%d", n.number)
		ip(t, n.ns, `
			link add flannel.1 address 02:fa:00:00:00:0%[1]d mtu %[5]d type vxlan id 1 local %[3]s%[1]d %[4]s
			addr add 10.244.%[1]d.0/32 dev flannel.1
			link set flannel.1 up
			link add cni0 address 02:cb:00:00:00:0%[1]d mtu %[5]d type bridge
			addr add 10.244.%[1]d.1/24 dev cni0
			link set cni0 up
			neigh add 10.244.%[2]d.0 lladdr 02:fa:00:00:00:0%[2]d dev flannel.1 nud permanent
			! bridge fdb add 02:fa:00:00:00:0%[2]d dev flannel.1 dst %[3]s%[2]d
			route add 10.244.%[2]d.0/24 via 10.244.%[2]d.0 dev flannel.1 onlink`,
			n.number, 3-n.number, underlay, options, mtu)
		n.connect = func(device string, host int) (here, inside string) {
			return fmt.Sprintf("link set %s master cni0 up", device), fmt.Sprintf(`
				addr add 10.244.%[1]d.%[2]d/24 dev eth0
				link set eth0 up
				route add default via 10.244.%[1]d.1`, n.number, host)
		}
		n.containers["veth1"] = n.add(t, "veth1", 2)
	}
	return both
}

// calico arranges the devices as Calico does with VXLAN.
func calico(t *testing.T) [2]*node {
	both := nodes(t)
	for _, n := range both {
		n.overlay, n.selector, n.device, n.mtu = "vxlan.calico", "veth:cali*", "cali", 1450
		n.gateway, n.prefix = fmt.Sprintf("10.65.%d.0", n.number), fmt.Sprintf("10.65.%d.0/26", n.number)
		n.mac = fmt.Sprintf("66:00:00:00:00:0%d", n.number)
		ip(t, n.ns, `
			link add vxlan.calico address 66:00:00:00:00:0%[1]d type vxlan id 4096 local 192.0.2.%[1]d %[3]s
			link set vxlan.calico mtu 1450
			addr add 10.65.%[1]d.0/32 dev vxlan.calico
			link set vxlan.calico up
			neigh add 10.65.%[2]d.0 lladdr 66:00:00:00:00:0%[2]d dev vxlan.calico nud permanent
			! bridge fdb add 66:00:00:00:00:0%[2]d dev vxlan.calico dst 192.0.2.%[2]d
			route add 10.65.%[2]d.0/26 via 10.65.%[2]d.0 dev vxlan.calico onlink
			route add blackhole 10.65.%[1]d.0/26`, n.number, 3-n.number, "dstport 4789 nolearning")
		n.connect = func(device string, host int) (here, inside string) {
			return fmt.Sprintf(`
				link set %[1]s address ee:ee:ee:ee:ee:ee up
				! sysctl -qw net.ipv4.conf.%[1]s.proxy_arp=1 net.ipv4.neigh.%[1]s.proxy_delay=0
				route add 10.65.%[2]d.%[3]d dev %[1]s scope link`, device, n.number, host), fmt.Sprintf(`
				addr add 10.65.%[1]d.%[2]d/32 dev eth0
				link set eth0 up
				route add 169.254.1.1 dev eth0 scope link
				route add default via 169.254.1.1`, n.number, host)
		}
		n.containers["cali1"] = n.add(t, "cali1", 2)
	}
	return both
}

// start starts a container.
func (n *node) start(device string, host int) (*netns.Namespace, error) {
	c, err := netns.Create(filepath.Join(n.dir, fmt.Sprintf("n%d-%s", n.number, device)))
	if err != nil {
		return nil, err
	}
	here, inside := n.connect(device, host)
	pair := fmt.Sprintf("link add %s mtu %d type veth peer name eth0 mtu %[2]d netns %s\n", device, n.mtu, c.Path())
	return c, errors.Join(run(n.ns, pair+here), run(c, inside))
}

// stop ends a container.
func (n *node) stop(device string, c *netns.Namespace) error {
	return errors.Join(run(n.ns, "link del "+device), c.Close(), netns.Remove(c.Path()))
}

// add starts a container that lives as long as the test.
func (n *node) add(t *testing.T, device string, host int) *netns.Namespace {
	t.Helper()
	c, err := n.start(device, host)
	must(t, err)
	t.Cleanup(func() { c.Close(); netns.Remove(c.Path()) })
	return c
}

// only returns the node's first container.
func (n *node) only() *netns.Namespace {
	for _, c := range n.containers {
		return c
	}
	return nil
}

// address returns the IPv4 address of a container.
func address(t *testing.T, c *netns.Namespace) netip.Addr {
	t.Helper()
	h, err := c.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName("eth0")
	must(t, err)
	all, err := h.AddrList(l, unix.AF_INET)
	if err != nil || len(all) != 1 {
		t.Fatalf("addresses %v, %v", all, err)
	}
	a, _ := netip.AddrFromSlice(all[0].IP.To4())
	return a
}

// daemon is a running `pilaster accelerate`.
type daemon struct {
	accelerate.Client
	process *os.Process
	ended   chan struct{} // closed after it has ended
	code    int
	log     *buffer
}

// buffer is a buffer for output of another process.
type buffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}
func (b *buffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.text.String() }

func (n *node) socket() string { return filepath.Join(n.dir, fmt.Sprintf("a%d.sock", n.number)) }

// locks returns the lock files of daemons of the node.
func (n *node) locks(t *testing.T) []string {
	t.Helper()
	inode, err := n.ns.Inode()
	must(t, err)
	all, err := filepath.Glob(fmt.Sprintf("/run/pilaster/accelerate-%d-*", inode))
	must(t, err)
	return all
}

// command returns a command of the command line.
func command(line string) *exec.Cmd {
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), commandLine+"="+line)
	return c
}

// accelerate starts the daemon and waits until it is ready, or has ended.
func (n *node) accelerate(t *testing.T, more ...string) *daemon {
	t.Helper()
	notify := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify})
	must(t, err)
	defer l.Close()
	d := &daemon{Client: accelerate.Client{Socket: n.socket()}, ended: make(chan struct{}), log: &buffer{}}
	c := command(fmt.Sprintf("accelerate --uplink eth0 --overlay %s --containers %s --socket %s %s", n.overlay,
		n.selector, n.socket(), strings.Join(more, " ")))
	c.Env = append(c.Env, "NOTIFY_SOCKET="+notify)
	c.Stderr = d.log
	must(t, n.ns.Start(c))
	d.process = c.Process
	go func() {
		defer close(d.ended)
		_ = c.Wait() // the exit code says it
		d.code = c.ProcessState.ExitCode()
		l.Close()
	}()
	t.Cleanup(func() {
		d.end(unix.SIGTERM)
		if t.Failed() {
			t.Logf("the daemon of node %d: %s", n.number, d.log)
		}
	})
	b := make([]byte, 64)
	must(t, l.SetReadDeadline(time.Now().Add(time.Minute)))
	switch got, err := l.Read(b); {
	case errors.Is(err, os.ErrDeadlineExceeded):
		t.Fatal("the daemon is not ready after a minute")
	case err == nil && string(b[:got]) != sdnotify.Ready:
		t.Fatalf("got %q, want %q", b[:got], sdnotify.Ready)
	case err != nil:
		<-d.ended
	}
	return d
}

// end sends a signal and waits for the end.
func (d *daemon) end(s os.Signal) {
	_ = d.process.Signal(s) // it may have ended
	<-d.ended
}

// until waits until the status is as wanted. Each look lets the daemon process what it has received.
func (d *daemon) until(t *testing.T, what string, ok func(accelerate.Status) bool) accelerate.Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var last accelerate.Status
	for {
		s, err := d.Status(ctx)
		if err != nil {
			t.Fatalf("wait for %s: %v\nthe last status: %+v", what, err, last)
		}
		if last = s; ok(s) {
			return s
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// conversation is a TCP connection between two containers.
type conversation struct{ client, server net.Conn }

func talk(t *testing.T, from, to *netns.Namespace) conversation {
	t.Helper()
	at := netip.AddrPortFrom(address(t, to), 7000)
	return dial(t, from, at, to, at)
}

func inside[T any](t *testing.T, ns *netns.Namespace, open func() (T, error)) (it T) {
	t.Helper()
	must(t, ns.Do(func() (err error) { it, err = open(); return err }))
	return it
}

// echo sends one byte there and back, n times.
func (c conversation) echo(n int) error {
	b := make([]byte, 1)
	for i := range n {
		for _, way := range [][2]net.Conn{{c.client, c.server}, {c.server, c.client}} {
			_ = way[0].SetDeadline(time.Now().Add(10 * time.Second))
			_ = way[1].SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := way[0].Write([]byte{byte(i)}); err != nil {
				return err
			}
			if _, err := io.ReadFull(way[1], b); err != nil {
				return err
			}
			if b[0] != byte(i) {
				return errors.New("another byte")
			}
		}
	}
	return nil
}

// bulk sends bytes from the client.
func (c conversation) bulk(size int) error {
	sent := make(chan error, 1)
	go func() {
		_, err := c.client.Write(make([]byte, size))
		sent <- err
	}()
	_ = c.server.SetDeadline(time.Now().Add(20 * time.Second))
	_, err := io.CopyN(io.Discard, c.server, int64(size))
	return errors.Join(err, <-sent)
}
