//go:build flannel

package flannel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/packet"
)

const (
	network4  = `{"Network":"10.244.0.0/16",%s"Backend":{"Type":"vxlan","VNI":1,"Port":8472}}`
	dualStack = `"EnableIPv6":true,"IPv6Network":"fd00:10:244::/48","IPv6SubnetLen":64,`
)

// modes are the ways in which Flannel installs its rules, and its address families.
var modes = []struct {
	name, iptables, network string
	overlay                 string
	v6                      bool // of the traffic
	kubeProxy               string
}{
	{"iptables-nft", "nft", fmt.Sprintf(network4, ""), "flannel.1", false, "kube-proxy.iptables"},
	{"iptables-legacy", "legacy", fmt.Sprintf(network4, ""), "flannel.1", false, "kube-proxy.iptables"},
	{"nftables", "nft", fmt.Sprintf(network4, `"EnableNFTables":true,`), "flannel.1", false, "kube-proxy.nft"},
	{"dual stack", "nft", fmt.Sprintf(network4, dualStack), "flannel.1", false, "kube-proxy.iptables"},
	{"IPv6", "nft", fmt.Sprintf(network4, dualStack), "flannel-v6.1", true, ""},
	{"IPv6 nftables", "nft", fmt.Sprintf(network4, `"EnableNFTables":true,`+dualStack), "flannel-v6.1", true, ""},
}

// kubeProxy installs kube-proxy's rules of a file, with a service 10.96.0.10:80 at the container's port 7000.
func (n *node) kubeProxy(t *testing.T, file string, backend *container) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	must(t, err)
	c := exec.CommandContext(t.Context(), filepath.Join(n.rules, "iptables-restore"), "--noflush")
	if strings.HasSuffix(file, ".nft") {
		c = exec.CommandContext(t.Context(), "nft", "-f", "-")
	}
	c.Stdin = strings.NewReader(strings.ReplaceAll(string(text), "BACKEND", backend.ip4.String()))
	var said bytes.Buffer
	c.Stdout, c.Stderr = &said, &said
	if err := n.ns.Run(c); err != nil {
		t.Fatalf("%v: %v: %s", c.Args, err, &said)
	}
}

// uses exchanges bytes until both nodes' caches forward them in both directions.
func (c conversation) uses(t *testing.T, daemons ...*accelerator) {
	t.Helper()
	for _, a := range daemons {
		before := a.until(t, "status", func(accelerate.Status) bool { return true })
		a.until(t, "hits", func(s accelerate.Status) bool {
			c.echo(t, 20)
			return s.InUse && s.Egress.Hits > before.Egress.Hits+100 && s.Ingress.Hits > before.Ingress.Hits+100
		})
	}
}

// TestModes: beside Flannel and kube-proxy in each mode, direct connections use the cache, and those to services work.
func TestModes(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			cluster := newCluster(t, m.iptables, m.network, 2)
			n1, n2 := cluster.nodes[0], cluster.nodes[1]
			if m.v6 {
				cluster.refusesStockIPv6(t)
			}
			n1.flanneld(t)
			n2.flanneld(t)
			a, b := n1.add(t, "a"), n2.add(t, "b")
			if m.kubeProxy != "" {
				n1.kubeProxy(t, m.kubeProxy, b)
			}
			before := talk(t, a, b, m.v6)
			before.echo(t, 10)
			daemons := []*accelerator{n1.accelerate(t, m.overlay).running(t), n2.accelerate(t, m.overlay).running(t)}
			before.uses(t, daemons...)
			before.close()
			for _, ends := range [][2]*container{{a, b}, {b, a}} {
				c := talk(t, ends[0], ends[1], m.v6)
				from, _, _ := net.SplitHostPort(c.server.RemoteAddr().String())
				if want := ends[0].address(m.v6).String(); from != want {
					t.Errorf("the connection comes from %s, want %s: a rule has translated it", from, want)
				}
				c.uses(t, daemons...)
				c.bulk(t, 4<<20)
				c.echo(t, 10)
			}
			if m.kubeProxy != "" {
				service := dial(t, a, netip.MustParseAddrPort("10.96.0.10:80"), b, netip.AddrPortFrom(b.ip4, 7000))
				service.echo(t, 200)
			}
			if a.ip6.IsValid() { // of the other family
				talk(t, a, b, !m.v6).echo(t, 100)
			}
			for _, d := range daemons {
				s, err := d.Status(t.Context())
				if err != nil || !s.InUse || len(s.Problems) > 0 || !s.Tracks {
					t.Errorf("got status %+v, %v", s, err)
				}
			}
		})
	}
}

// refusesStockIPv6 checks that the daemon refuses the device that Flannel makes for IPv6, and replaces it as the how-to
// says: Flannel then uses the device that is there.
func (c *cluster) refusesStockIPv6(t *testing.T) {
	t.Helper()
	n := c.nodes[0]
	n.flanneld(t)
	n.add(t, "first").remove(t)
	d := n.accelerate(t, "flannel-v6.1")
	select {
	case <-d.ended:
	default:
		t.Fatal("the daemon accelerates a device with UDP checksums")
	}
	if !strings.Contains(d.log.String(), "udp6zerocsumtx and udp6zerocsumrx") {
		t.Fatalf("got %s", d.log)
	}
	n.daemon.end(unix.SIGTERM)
	run(t, n.ns, "ip link del flannel-v6.1")
	for _, n := range c.nodes {
		run(t, n.ns, "ip link add flannel-v6.1 mtu 1430 type vxlan id 1 dev eth0 local 2001:db8::%d dstport 8472 "+
			"nolearning udp6zerocsumtx udp6zerocsumrx", n.number)
	}
}

// innerMAC returns the inner destination MAC of a packet in the tunnel, nil of others.
func innerMAC(frame []byte) net.HardwareAddr {
	const udp = 14 + 20
	if len(frame) < udp+16+14 || binary.BigEndian.Uint16(frame[12:]) != 0x0800 || frame[14+9] != packet.ProtocolUDP ||
		binary.BigEndian.Uint16(frame[udp+2:]) != 8472 {
		return nil
	}
	return net.HardwareAddr(frame[udp+16:][:6])
}

// arriving returns the inner destination MACs of the tunnel's packets that arrive at the node while f runs.
func (n *node) arriving(t *testing.T, f func()) map[string]int {
	t.Helper()
	tap, err := packet.NewCapture(n.ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer tap.Close()
	i, err := packet.NewInjector(n.sw, "br0")
	must(t, err)
	defer i.Close()
	f()
	// A broadcast from the switch comes last.
	end := packet.Frame(net.HardwareAddr{255, 255, 255, 255, 255, 255}, net.HardwareAddr{2, 0, 0, 0, 0, 9}, 0x88b5,
		make([]byte, 50))
	must(t, i.Send(end))
	frames, err := tap.Until(t.Context(), func(c packet.Captured) bool {
		return bytes.Equal(c.Frame[12:14], end[12:14])
	})
	must(t, err)
	if lost, err := tap.Lost(); err != nil || lost > 0 {
		t.Fatalf("the capture has lost %d frames: %v", lost, err)
	}
	all := map[string]int{}
	for _, f := range frames {
		if mac := innerMAC(f.Frame); mac != nil {
			all[mac.String()]++
		}
	}
	return all
}

func (n *node) mac(t *testing.T, device string) string {
	t.Helper()
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName(device)
	must(t, err)
	return l.Attrs().HardwareAddr.String()
}

// settled is how long after a change of the overlay a packet may still be one of before.
const settled = 50 * time.Millisecond

// TestChanges: while one connection goes on, Flannel's daemons are killed and restarted, a node gets another VTEP MAC,
// and a subnet moves to another node. The cache follows.
func TestChanges(t *testing.T) {
	cluster := newCluster(t, "nft", fmt.Sprintf(network4, `"EnableNFTables":true,`), 3)
	n1, n2, n3 := cluster.nodes[0], cluster.nodes[1], cluster.nodes[2]
	n1.flanneld(t)
	n2.flanneld(t)
	a, b := n1.add(t, "a"), n2.add(t, "b")
	daemons := []*accelerator{n1.accelerate(t, "flannel.1").running(t), n2.accelerate(t, "flannel.1").running(t)}
	c := talk(t, a, b, false)
	c.uses(t, daemons...)

	for _, n := range []*node{n1, n2} {
		for _, s := range []os.Signal{unix.SIGTERM, unix.SIGKILL} {
			n.daemon.end(s)
			c.uses(t, daemons...)
			n.flanneld(t)
			c.uses(t, daemons...)
		}
	}

	old := n2.mac(t, "flannel.1")
	n2.daemon.end(unix.SIGTERM)
	run(t, n2.ns, "ip link del flannel.1")
	n2.flanneld(t)
	mac := n2.mac(t, "flannel.1")
	if mac == old {
		t.Fatalf("flannel.1 has the same MAC %s", mac)
	}
	until(t, "neighbour with the new MAC", func() bool {
		return strings.Contains(run(t, n1.ns, "ip neigh show dev flannel.1"), mac)
	})
	time.Sleep(settled)
	macs := n2.arriving(t, func() { c.uses(t, daemons...) })
	if macs[mac] == 0 || len(macs) != 1 {
		t.Errorf("packets to the inner MACs %v, want only %s", macs, mac)
	}

	// The subnet of node 2 moves to node 3, with a container of the same address.
	moved := n2.subnet(t)
	n2.daemon.end(unix.SIGTERM)
	daemons[1].end(unix.SIGTERM)
	b.remove(t)
	c.close()
	_, err := cluster.etcd.Client.Delete(t.Context(), prefix+moved.key)
	must(t, err)
	until(t, "end of the route", func() bool { return !strings.Contains(run(t, n1.ns, "ip route"), "dev flannel.1") })
	cluster.put(t, moved.key, `{"PublicIP":"192.0.2.3","BackendType":"vxlan"}`)
	n3.flanneld(t)
	if got := n3.subnet(t).key; got != moved.key {
		t.Fatalf("node 3 has subnet %s, want %s", got, moved.key)
	}
	b3 := n3.add(t, "b")
	if b3.ip4 != b.ip4 {
		t.Fatalf("the container has address %v, want %v", b3.ip4, b.ip4)
	}
	daemons[1] = n3.accelerate(t, "flannel.1").running(t)
	until(t, "neighbour of node 3", func() bool {
		return strings.Contains(run(t, n1.ns, "ip neigh show dev flannel.1"), n3.mac(t, "flannel.1"))
	})
	time.Sleep(settled)
	macs = n2.arriving(t, func() { talk(t, a, b3, false).uses(t, daemons...) })
	if len(macs) != 0 {
		t.Errorf("node 2 has received packets to %v", macs)
	}
}
