package wire_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// needle is an encoding of a container's location.
type needle struct {
	name string
	text []byte // lower case if it is text
}

// needles returns encodings of the common prefix of all plaintext addresses, and of the fabric's prefix: raw, as short
// and as long text, as hex digits as in if_inet6, and as in tcp6, which swaps the bytes of each word.
func (b *bed) needles() []needle {
	var all []needle
	for _, prefix := range []netip.Prefix{b.judge.base, b.judge.underlay} {
		whole := prefix.Addr().As16()
		raw := whole[:prefix.Bits()/8]
		turned := binary.NativeEndian.AppendUint32(nil, binary.BigEndian.Uint32(raw))
		digits := hex.EncodeToString(raw)
		short, long := strings.TrimSuffix(prefix.Addr().String(), "::"), prefix.Addr().StringExpanded()
		const sure = len("fd70:696c:61") // the part of the text that is the same for all nodes
		all = append(all,
			needle{"raw " + prefix.String(), raw},
			needle{"text " + prefix.String(), []byte(short[:min(sure, len(short))])},
			needle{"long text " + prefix.String(), []byte(long[:sure])},
			needle{"hex " + prefix.String(), []byte(digits)},
			needle{"turned hex " + prefix.String(), []byte(hex.EncodeToString(turned))},
		)
	}
	return all
}

// evidence returns the names of the needles that occur in data that a container can read.
func (b *bed) evidence(seen []byte) []string {
	var found []string
	lower := bytes.ToLower(seen)
	for _, n := range b.needles() {
		in := lower
		if strings.HasPrefix(n.name, "raw") {
			in = seen
		}
		if bytes.Contains(in, n.text) {
			found = append(found, n.name)
		}
	}
	return found
}

// testContainers captures in every container while all of them send, and searches all captured bytes for needles. In
// containers of encrypted tenants it must find none. In a clear tenant's container it must find some, which shows that
// the search works.
func (b *bed) testContainers(t *testing.T) {
	captures := map[string]*packet.Capture{}
	for name, h := range b.hosts {
		c, err := packet.NewCapture(h.ns, lab.Interface)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		captures[name] = c
	}
	b.talkAll(t)
	last := map[string]packet.Sentinel{}
	for _, p := range pairs {
		sentinel := b.sendSentinel(t, b.hosts[p[0]], b.hosts[p[1]])
		last[p[0]], last[p[1]] = sentinel, sentinel
	}
	for name, sentinel := range last {
		frames, err := captures[name].Until(b.ctx, sentinel.In)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b.judgeFrames(t, name, frames)
	}
}

func (b *bed) judgeFrames(t *testing.T, name string, frames []packet.Captured) {
	t.Helper()
	c, err := b.Container(name)
	if err != nil {
		t.Fatal(err)
	}
	own := b.mac(t, name)
	found := map[string]int{}
	for _, f := range frames {
		for _, e := range b.evidence(f.Frame) {
			found[e]++
		}
		macs := []string{net.HardwareAddr(f.Frame[:6]).String(), net.HardwareAddr(f.Frame[6:12]).String()}
		slices.Sort(macs)
		if want := []string{gateway, own}; !slices.Equal(macs, want) {
			t.Fatalf("%s: got a frame with MACs %v, want %v", name, macs, want)
		}
	}
	if len(frames) < 50 {
		t.Errorf("%s: only %d frames captured", name, len(frames))
	}
	raw := fmt.Sprintf("raw %v", b.judge.base)
	switch {
	case b.Clear(c.Tenant) && found[raw] != len(frames):
		t.Errorf("%s is clear, but the search found plaintext in only %d of %d frames", name, found[raw],
			len(frames))
	case !b.Clear(c.Tenant) && len(found) > 0:
		t.Errorf("%s: %v in %d frames", name, found, len(frames))
	}
}

// gateway is the source MAC of all frames to containers. The MAC of a real device would identify the node.
const gateway = "02:70:69:6c:00:01"

// mac returns a container's own MAC, which does not identify the node: it is scrambled, or derived from a number.
func (b *bed) mac(t *testing.T, container string) (mac string) {
	t.Helper()
	prefix := "0a:"
	if labtest.Device() == endpoint.Macvlan {
		prefix = "06:70:"
	}
	var device *net.Interface
	err := b.hosts[container].ns.Do(func() (err error) {
		device, err = net.InterfaceByName(lab.Interface)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if mac = device.HardwareAddr.String(); !strings.HasPrefix(mac, prefix) {
		t.Errorf("%s has the MAC %s", container, mac)
	}
	return mac
}

// sendSentinel sends a datagram from a socket to another container, to a port without a listener.
func (b *bed) sendSentinel(t *testing.T, from, to host) packet.Sentinel {
	t.Helper()
	sentinel := packet.NewSentinel()
	c, err := dial(from, "udp6", to.address, sentinelPort)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(sentinel[:]); err != nil {
		t.Fatal(err)
	}
	return sentinel
}

// testListings reads the kernel's state in a container by commands, netlink, /proc/net and /proc/sys/net, while
// connections are open. The same listings in a clear tenant's container show that they would reveal plaintext
// addresses.
func (b *bed) testListings(t *testing.T) {
	for _, p := range pairs {
		from, to := b.hosts[p[0]], b.hosts[p[1]]
		listener, err := listenTCP(to, openPort)
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		for _, network := range []string{"tcp6", "udp6"} {
			c, err := dial(from, network, to.address, openPort)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
	}
	shown := map[string]bool{}
	for _, c := range b.Containers() {
		listings, err := b.listings(c.Name)
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		for what, text := range listings {
			found := b.evidence(text)
			switch {
			case b.Clear(c.Tenant) && len(found) > 0:
				shown[what] = true
			case !b.Clear(c.Tenant) && len(found) > 0:
				t.Errorf("%s: %s shows %v", c.Name, what, found)
			}
		}
		if !b.Clear(c.Tenant) {
			for _, what := range []string{"ip -d addr", "netlink addresses", "/proc/net/if_inet6"} {
				if !bytes.Contains(listings[what], c.Address.AsSlice()) &&
					!strings.Contains(string(listings[what]), c.Address.String()) &&
					!strings.Contains(string(listings[what]), colonless(c.Address)) {
					t.Errorf("%s: %s lacks %v: it is from another namespace", c.Name, what, c.Address)
				}
			}
		}
	}
	for _, what := range []string{
		"ip -d addr", "ip -6 route show table all", "ss -tuanpe", "netlink addresses", "netlink routes",
		"/proc/net/if_inet6", "/proc/net/ipv6_route", "/proc/net/tcp6", "/proc/net/udp6",
	} {
		if !shown[what] {
			t.Errorf("%s shows no plaintext in a clear container: the search does not work", what)
		}
	}
}

// listings returns all listings by name.
func (b *bed) listings(container string) (map[string][]byte, error) {
	all := map[string][]byte{}
	for _, command := range []string{
		"ip -d addr", "ip -d -s link", "ip -6 route show table all", "ip -6 route show cache", "ip -6 neigh",
		"ip -6 neigh show proxy",
		"ip -6 rule", "ip -6 maddr", "ip -6 netconf", "ip -6 addrlabel", "ip -6 tunnel", "ip nexthop", "ss -tuanpe",
		"ss -m -i -a", "tc -s qdisc",
	} {
		out, err := b.Output(b.ctx, container, strings.Fields(command)...)
		if err != nil {
			return nil, err
		}
		all[command] = []byte(out)
	}
	err := b.hosts[container].ns.Do(func() error {
		for what, kind := range map[string]int{
			"links": unix.RTM_GETLINK, "addresses": unix.RTM_GETADDR, "routes": unix.RTM_GETROUTE,
			"neighbours": unix.RTM_GETNEIGH,
			"rules":      unix.RTM_GETRULE, "multicast": unix.RTM_GETMULTICAST, "configuration": unix.RTM_GETNETCONF,
		} {
			request := nl.NewNetlinkRequest(kind, unix.NLM_F_DUMP)
			request.AddData(nl.NewIfInfomsg(map[bool]int{true: unix.AF_UNSPEC, false: unix.AF_INET6}[what == "links"]))
			messages, err := request.Execute(unix.NETLINK_ROUTE, 0)
			if err != nil {
				return fmt.Errorf("netlink %s: %w", what, err)
			}
			all["netlink "+what] = bytes.Join(messages, nil)
		}
		for _, root := range []string{"/proc/thread-self/net", "/proc/sys/net"} {
			if err := readTree(root, all); err != nil {
				return err
			}
		}
		return nil
	})
	return all, err
}

// readTree reads every file below a folder in the thread's namespace.
func readTree(root string, into map[string][]byte) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		for _, unreadable := range []error{fs.ErrPermission, fs.ErrNotExist, syscall.EIO, syscall.EINVAL} {
			if errors.Is(err, unreadable) {
				return nil // write-only, or without a value here
			}
		}
		into[strings.Replace(path, "/proc/thread-self/net", "/proc/net", 1)] = text
		return err
	})
}

func listenTCP(h host, port uint16) (l net.Listener, err error) {
	err = h.ns.Do(func() error {
		l, err = net.Listen("tcp6", netip.AddrPortFrom(h.address, port).String())
		return err
	})
	return l, err
}
