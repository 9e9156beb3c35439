//go:build flannel

package flannel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/sdnotify"
)

// patience is how long a test waits for a condition.
const patience = time.Minute

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// programs is the folder with the programs of Flannel.
func programs(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("PILASTER_TEST_FLANNEL")
	if _, err := os.Stat(filepath.Join(dir, "flannel")); dir == "" || err != nil {
		t.Fatalf("PILASTER_TEST_FLANNEL is %q, want a folder with flannel, bridge and host-local, as `make flannel` "+
			"builds them", dir)
	}
	return dir
}

// cluster is a switch with nodes.
type cluster struct {
	dir     string
	sw      *netns.Namespace
	etcd    *store.Embedded
	nodes   []*node
	rules   string // folder with iptables of one kind
	network string // Flannel's configuration
}

// node is a node of the cluster. Flannel runs on it after flanneld.
type node struct {
	*cluster
	number int
	ns     *netns.Namespace
	daemon *process // flanneld
}

func namespace(t *testing.T, path string) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(path)
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	return ns
}

// newCluster makes nodes that run iptables of a kind: nft or legacy.
func newCluster(t *testing.T, iptables, network string, size int) *cluster {
	t.Helper()
	c := &cluster{dir: t.TempDir(), network: network}
	c.rules = filepath.Join(c.dir, "bin")
	must(t, os.Mkdir(c.rules, 0o755))
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, part := range []string{"", "-save", "-restore"} {
			to, err := exec.LookPath(program + "-" + iptables + part)
			must(t, err)
			must(t, os.Symlink(to, filepath.Join(c.rules, program+part)))
		}
	}
	var err error
	c.etcd, err = store.Embed(t.Context(), c.dir, slog.New(slog.NewTextHandler(io.Discard, nil)))
	must(t, err)
	t.Cleanup(c.etcd.Close)
	c.put(t, "config", network)
	c.sw = namespace(t, filepath.Join(c.dir, "sw"))
	run(t, c.sw, "ip link add br0 type bridge\nip link set br0 up")
	for i := range size {
		n := &node{cluster: c, number: i + 1, ns: namespace(t, filepath.Join(c.dir, fmt.Sprintf("n%d", i+1)))}
		c.nodes = append(c.nodes, n)
		port := fmt.Sprintf("p%d", n.number)
		must(t, n.ns.Do(func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.MTU = "eth0", 1500
			return netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: attrs, PeerName: port, PeerNamespace: netlink.NsFd(c.sw.FD()),
			})
		}))
		run(t, c.sw, "ip link set %s master br0 up", port)
		run(t, n.ns, `sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
			ip addr add 192.0.2.%[1]d/24 dev eth0
			ip addr add 2001:db8::%[1]d/64 dev eth0 nodad
			ip link set eth0 up
			ip link set lo up
			ip route add default via 192.0.2.254`, n.number)
	}
	return c
}

const prefix = "/coreos.com/network/"

func (c *cluster) put(t *testing.T, key, value string) {
	t.Helper()
	_, err := c.etcd.Client.Put(t.Context(), prefix+key, value)
	must(t, err)
}

// subnet is a subnet that Flannel has given to a node.
type subnet struct{ key, value string }

func (n *node) subnet(t *testing.T) subnet {
	t.Helper()
	got, err := n.etcd.Client.Get(t.Context(), prefix+"subnets/", clientv3.WithPrefix())
	must(t, err)
	for _, kv := range got.Kvs {
		if strings.Contains(string(kv.Value), fmt.Sprintf(`"192.0.2.%d"`, n.number)) {
			return subnet{strings.TrimPrefix(string(kv.Key), prefix), string(kv.Value)}
		}
	}
	t.Fatalf("node %d has no subnet: %v", n.number, got.Kvs)
	return subnet{}
}

// run executes lines of commands.
func run(t *testing.T, ns *netns.Namespace, lines string, args ...any) string {
	t.Helper()
	var all strings.Builder
	for line := range strings.Lines(fmt.Sprintf(lines, args...)) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		var said strings.Builder
		c := exec.CommandContext(t.Context(), words[0], words[1:]...)
		c.Stdout, c.Stderr = &said, &said
		if err := ns.Run(c); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(words, " "), err, &said)
		}
		all.WriteString(said.String())
	}
	return all.String()
}

// process is a running daemon.
type process struct {
	*os.Process
	ended chan struct{}
	code  int
	log   *buffer
}

type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// start runs a daemon on the node until the test ends, and calls done when it has ended.
func (n *node) start(t *testing.T, c *exec.Cmd, done func()) *process {
	t.Helper()
	p := &process{ended: make(chan struct{}), log: &buffer{}}
	c.Stdout, c.Stderr = p.log, p.log
	must(t, n.ns.Start(c))
	p.Process = c.Process
	go func() {
		_ = c.Wait() // the exit code says it
		p.code = c.ProcessState.ExitCode()
		close(p.ended)
		done()
	}()
	t.Cleanup(func() {
		p.end(unix.SIGTERM)
		if t.Failed() {
			t.Logf("%s of node %d:\n%s", filepath.Base(c.Path), n.number, p.log)
		}
	})
	return p
}

func (p *process) end(s os.Signal) {
	_ = p.Signal(s) // it may have ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.Kill()
		<-p.ended
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s after %v", what, patience)
		}
	}
}

func (n *node) file(name string) string {
	return filepath.Join(n.dir, fmt.Sprintf("n%d-%s", n.number, name))
}

// flanneld starts Flannel's daemon and waits until it is ready. It uses the subnet that it had before.
func (n *node) flanneld(t *testing.T) {
	t.Helper()
	c := exec.Command(filepath.Join(programs(t), "flannel"), "--iface=eth0", "--ip-masq",
		"--etcd-endpoints=unix://"+filepath.Join(n.dir, "etcd.sock"), "--subnet-file="+n.file("subnet.env"),
		"--iptables-resync=1")
	c.Env = append(os.Environ(), "PATH="+n.rules+":"+os.Getenv("PATH"))
	n.daemon = n.start(t, c, func() {})
	until(t, "readiness of flanneld", func() bool {
		select {
		case <-n.daemon.ended:
			t.Fatalf("flanneld of node %d has ended with code %d: %s", n.number, n.daemon.code, n.daemon.log)
		default:
		}
		return strings.Contains(n.daemon.log.String(), "Running backend")
	})
}

// variable returns a line of the file that flanneld writes for the CNI.
func (n *node) variable(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(n.file("subnet.env"))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+"="); ok {
			return value
		}
	}
	t.Fatalf("%s is not in %s", name, text)
	return ""
}

// container is a container that the CNI plugin bridge has attached.
type container struct {
	*node
	ns         *netns.Namespace
	ip4, ip6   netip.Addr
	attachment libcni.RuntimeConf
	list       *libcni.NetworkConfigList
}

func (n *node) cni(t *testing.T) *libcni.CNIConfig {
	t.Helper()
	return libcni.NewCNIConfigWithCacheDir([]string{programs(t)}, n.file("cni"), nil)
}

// add attaches a container with the configuration that Flannel's CNI plugin gives the plugin bridge.
func (n *node) add(t *testing.T, name string) *container {
	t.Helper()
	ranges, routes := "", ""
	for _, family := range []struct{ enabled, network, subnet string }{
		{"10.244.", "FLANNEL_NETWORK", "FLANNEL_SUBNET"}, {"fd00:", "FLANNEL_IPV6_NETWORK", "FLANNEL_IPV6_SUBNET"},
	} {
		if !strings.Contains(n.network, family.enabled) {
			continue
		}
		own := netip.MustParsePrefix(n.variable(t, family.subnet)).Masked()
		ranges += fmt.Sprintf(`,[{"subnet":"%v"}]`, own)
		routes += fmt.Sprintf(`,{"dst":"%s"}`, n.variable(t, family.network))
	}
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"cbr0","plugins":[{
		"type":"bridge","mtu":%s,"isGateway":true,"isDefaultGateway":true,"ipMasq":false,"hairpinMode":true,
		"ipam":{"type":"host-local","dataDir":"%s","ranges":[%s],"routes":[%s]}}]}`,
		n.variable(t, "FLANNEL_MTU"), n.file("ipam"), ranges[1:], routes[1:]))
	must(t, err)
	c := &container{node: n, list: list, ns: namespace(t, n.file(name))}
	c.attachment = libcni.RuntimeConf{ContainerID: name, NetNS: c.ns.Path(), IfName: "eth0"}
	must(t, n.ns.Do(func() error {
		result, err := n.cni(t).AddNetworkList(t.Context(), list, &c.attachment)
		if err != nil {
			return err
		}
		got, err := types100.GetResult(result)
		if err != nil {
			return err
		}
		for _, ip := range got.IPs {
			a, _ := netip.AddrFromSlice(ip.Address.IP)
			if a = a.Unmap(); a.Is4() {
				c.ip4 = a
			} else {
				c.ip6 = a
			}
		}
		return nil
	}))
	return c
}

func (c *container) remove(t *testing.T) {
	t.Helper()
	must(t, c.node.ns.Do(func() error { return c.cni(t).DelNetworkList(t.Context(), c.list, &c.attachment) }))
}

func (c *container) address(v6 bool) netip.Addr {
	if v6 {
		return c.ip6
	}
	return c.ip4
}

// accelerator is a running daemon of ours.
type accelerator struct {
	*process
	accelerate.Client
}

// accelerate starts the daemon and waits until it is ready, or has ended.
func (n *node) accelerate(t *testing.T, overlay string) *accelerator {
	t.Helper()
	notify := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify})
	must(t, err)
	defer l.Close()
	socket := n.file(overlay + ".sock")
	c := exec.Command(labtest.Binary(t), "accelerate", "--uplink", "eth0", "--overlay", overlay, "--containers",
		"bridge:cni0", "--socket", socket)
	c.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify)
	a := &accelerator{Client: accelerate.Client{Socket: socket}}
	a.process = n.start(t, c, func() { l.Close() })
	b := make([]byte, 64)
	must(t, l.SetReadDeadline(time.Now().Add(patience)))
	switch got, err := l.Read(b); {
	case err == nil && string(b[:got]) != sdnotify.Ready:
		t.Fatalf("got %q, want %q", b[:got], sdnotify.Ready)
	case err != nil:
		<-a.ended
	}
	return a
}

// running fails the test if the daemon has ended.
func (a *accelerator) running(t *testing.T) *accelerator {
	t.Helper()
	select {
	case <-a.ended:
		t.Fatalf("the daemon has ended with code %d: %s", a.code, a.log)
	default:
	}
	return a
}

func (a *accelerator) until(t *testing.T, what string, ok func(accelerate.Status) bool) (s accelerate.Status) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the last status: %+v", s)
		}
	}()
	until(t, what, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		var err error
		s, err = a.Status(ctx)
		must(t, err)
		return ok(s)
	})
	return s
}

// conversation is a TCP connection between containers.
type conversation struct{ client, server net.Conn }

func talk(t *testing.T, from, to *container, v6 bool) conversation {
	t.Helper()
	at := netip.AddrPortFrom(to.address(v6), 7000)
	return dial(t, from, at, to, at)
}

// dial connects to an address that rules may translate to another one.
func dial(t *testing.T, from *container, target netip.AddrPort, to *container, at netip.AddrPort) (c conversation) {
	t.Helper()
	var l net.Listener
	until(t, "listener", func() bool { // an IPv6 address is tentative at first
		err := to.ns.Do(func() (err error) { l, err = net.Listen("tcp", at.String()); return err })
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Fatal(err)
		}
		return err == nil
	})
	defer l.Close()
	must(t, from.ns.Do(func() (err error) {
		c.client, err = net.DialTimeout("tcp", target.String(), patience)
		return err
	}))
	var err error
	c.server, err = l.Accept()
	must(t, err)
	t.Cleanup(c.close)
	return c
}

func (c conversation) close() { c.client.Close(); c.server.Close() }

// echo sends one byte there and back, n times.
func (c conversation) echo(t *testing.T, n int) {
	t.Helper()
	b := make([]byte, 1)
	for i := range n {
		for _, way := range [][2]net.Conn{{c.client, c.server}, {c.server, c.client}} {
			end := time.Now().Add(patience)
			_, err := way[0].Write([]byte{byte(i)})
			must(t, errors.Join(err, way[0].SetDeadline(end), way[1].SetDeadline(end)))
			_, err = io.ReadFull(way[1], b)
			must(t, err)
			if b[0] != byte(i) {
				t.Fatalf("byte %d is %d", i, b[0])
			}
		}
	}
}

// bulk sends bytes from the client.
func (c conversation) bulk(t *testing.T, size int64) {
	t.Helper()
	sent := make(chan error, 1)
	must(t, errors.Join(c.client.SetDeadline(time.Now().Add(patience)), c.server.SetDeadline(time.Now().Add(patience))))
	go func() { _, err := c.client.Write(make([]byte, size)); sent <- err }()
	_, err := io.CopyN(io.Discard, c.server, size)
	must(t, errors.Join(err, <-sent))
}
