package attack_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// fresh is how long flows and verdicts in a cache are valid at least: 100 jiffies. Then a packet asks again, so it is
// no loss if the cache does not have them.
const fresh = 90 * time.Millisecond

// mostMisses is how many packets of 1,000 of a neighbour may miss a cache during a scan.
const mostMisses = 2

// scanSize is the number of addresses of a scan: PILASTER_ATTACK_SCAN. Scans of ports have a tenth of it.
func scanSize(t *testing.T) int {
	t.Helper()
	text, set := os.LookupEnv("PILASTER_ATTACK_SCAN")
	if !set {
		return 20_000
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1000 {
		t.Fatalf("PILASTER_ATTACK_SCAN=%q is not a number of at least 1,000", text)
	}
	return n
}

// Hosts outside that a scan finds: each port of them refuses connections.
var scannedHosts = netip.MustParsePrefix("2001:db8:5ca::/48")

var scanSpec = lab.Spec{
	Nodes:   []string{"n1", "n2"},
	Outside: []lab.OutsideHost{{Name: "internet"}},
	Tenants: []lab.Tenant{
		{Name: "blue", Egress: []lab.EgressRule{{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress}}},
		{Name: "red", Egress: []lab.EgressRule{{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress}}},
		{Name: "violet", Egress: []lab.EgressRule{
			{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress, Via: []string{"n2"}}}},
		{Name: "green", Egress: []lab.EgressRule{
			{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress, Via: []string{"n2"}}}},
	},
	Containers: []lab.Container{
		{Name: "mallory", Node: "n1", Tenant: "blue"}, {Name: "eve", Node: "n1", Tenant: "violet"},
		{Name: "r1", Node: "n1", Tenant: "red"}, {Name: "r2", Node: "n2", Tenant: "red"},
		{Name: "g1", Node: "n1", Tenant: "green"},
	},
}

// scan is a scan of many addresses or ports.
type scan struct {
	name    string
	from    string // key of bed.inject
	packets int
	frame   func(k int) []byte
	at, why string // where all packets are dropped and for which reason; empty: they are delivered
}

// TestScans: containers and hosts outside scan addresses and ports. What has no session is not delivered, and the flows
// of neighbours of other tenants go on: they stay in the caches, and keep their sessions and their connections at the
// gateway.
func TestScans(t *testing.T) {
	t.Parallel()
	b := &bed{Lab: labtest.New(t, scanSpec), spec: scanSpec, ctx: labtest.Context(t),
		inject: map[string]*packet.Injector{}, captures: map[string]*packet.Capture{}}
	b.letAnswer(t)
	n := newNeighbours(t, b)
	for _, s := range b.scans(t, scanSize(t)) {
		t.Run(s.name, func(t *testing.T) { n.during(t, s) })
	}
}

// letAnswer routes the scanned hosts to the host outside, which refuses connections in their place.
func (b *bed) letAnswer(t *testing.T) {
	t.Helper()
	at, err := b.Address("internet")
	if err != nil {
		t.Fatal(err)
	}
	for place, route := range map[string]netlink.Route{
		lab.Router: {Gw: at.AsSlice()},
		"internet": {Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, LinkIndex: 1},
	} {
		h := b.netlink(t, place)
		route.Dst = &net.IPNet{IP: scannedHosts.Addr().AsSlice(), Mask: net.CIDRMask(scannedHosts.Bits(), 128)}
		if err := h.RouteReplace(&route); err != nil {
			t.Fatalf("route to the scanned hosts in %s: %v", place, err)
		}
	}
}

// scans returns all scans.
func (b *bed) scans(t *testing.T, size int) []scan {
	t.Helper()
	internet, err := b.Address("internet")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{"mallory", "eve"} {
		b.open(t, c, c, lab.Interface, false)
	}
	b.open(t, "internet", "internet", lab.Uplink, false)
	b.open(t, onRouter+"internet", lab.Router, "internet", false)
	var victims = map[string]netip.Addr{}
	for _, c := range []string{"mallory", "r1", "g1"} {
		victims[c] = b.seenOutside(t, c)
	}
	n1 := b.prefix(t, "n1")
	syn := func(from, to netip.Addr, at uint16) packet.Packet {
		return packet.Packet{Source: from, Destination: to,
			Body: packet.TCP{SourcePort: 40000, DestinationPort: at, Flags: packet.SYN}}
	}
	inside := func(c string, to func(k int) (netip.Addr, uint16)) func(k int) []byte {
		from := b.container(t, c).Address
		return func(k int) []byte {
			addr, port := to(k)
			return syn(from, addr, port).Frame(gateway, container)
		}
	}
	outside := func(to func(k int) (netip.Addr, uint16)) func(k int) []byte {
		return func(k int) []byte {
			addr, port := to(k)
			return packet.Frame(b.inject[onRouter+"internet"].MAC(), b.inject["internet"].MAC(),
				packet.EtherTypeIPv6, syn(internet, addr, port).Marshal())
		}
	}
	many := func(of netip.Prefix) func(k int) (netip.Addr, uint16) {
		return func(k int) (netip.Addr, uint16) {
			a := of.Addr().As16()
			binary.BigEndian.PutUint32(a[12:], uint32(k)*0x9e3779b1)
			return netip.AddrFrom16(a), 443
		}
	}
	ports := func(of netip.Addr) func(k int) (netip.Addr, uint16) {
		return func(k int) (netip.Addr, uint16) { return of, uint16(k + 1) }
	}
	// Indexes that no container of the lab has.
	indexes := func(id address.TenantID, app address.AppID) func(k int) (netip.Addr, uint16) {
		return func(k int) (netip.Addr, uint16) {
			return address.Plain{Node: n1, Tenant: id, App: app, Index: address.Index(0xf00000 - k%0xe00000)}.Addr(), 80
		}
	}
	return []scan{
		{name: "addresses outside, by a container", from: "mallory", packets: size,
			frame: inside("mallory", many(scannedHosts))},
		{name: "addresses of an egress range, from outside", from: "internet", packets: size,
			frame: outside(indexes(0, address.EgressApp)), at: "n1", why: "no-endpoint"},
		{name: "addresses of containers, from outside", from: "internet", packets: size,
			frame: outside(indexes(1, 1)), at: "n1", why: "no-endpoint"},
		{name: "ports of an egress address, from outside", from: "internet", packets: size / 10,
			frame: outside(ports(victims["r1"])), at: "n1", why: "no-session"},
		{name: "ports of a gateway's address, from outside", from: "internet", packets: size / 10,
			frame: outside(ports(victims["g1"])), at: "n2", why: "no-session"},
		{name: "addresses by a gateway", from: "eve", packets: size, frame: inside("eve", many(scannedHosts))},
		{name: "ports by a gateway", from: "eve", packets: size / 10,
			frame: inside("eve", ports(scannedHosts.Addr().Next()))},
	}
}

// talk is a flow whose both ends are in this process.
type talk struct {
	client net.Conn
	server net.Conn       // of a connection
	packet net.PacketConn // of datagrams
	peer   net.Addr       // the client, as the server of datagrams sees it
}

// exchange sends a message in both directions. It repeats datagrams, because full queues lose them.
func (f *talk) exchange() error {
	var err error
	for range 5 {
		if err = f.once(); err == nil || f.packet == nil {
			return err
		}
	}
	return err
}

func (f *talk) once() error {
	const within = 2 * time.Second
	limit := time.Now().Add(within)
	got := make([]byte, 4)
	if err := errors.Join(f.client.SetDeadline(limit), f.write(f.client)); err != nil {
		return err
	}
	if f.packet == nil {
		if err := f.server.SetDeadline(limit); err != nil {
			return err
		}
		if _, err := io.ReadFull(f.server, got); err != nil {
			return fmt.Errorf("the server: %w", err)
		}
		if err := f.write(f.server); err != nil {
			return err
		}
	} else {
		if err := f.packet.SetDeadline(time.Now().Add(within / 10)); err != nil {
			return err
		}
		_, from, err := f.packet.ReadFrom(got)
		if err != nil {
			return fmt.Errorf("the server: %w", err)
		}
		if f.peer != nil && from.String() != f.peer.String() {
			return fmt.Errorf("the server sees %v, and before that %v", from, f.peer)
		}
		f.peer = from
		if err := f.push(); err != nil {
			return err
		}
	}
	return f.read()
}

func (f *talk) write(to net.Conn) error { _, err := to.Write([]byte("ping")); return err }

// push sends a datagram to the client without a question, so it needs the session.
func (f *talk) push() error {
	if err := f.packet.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err := f.packet.WriteTo([]byte("pong"), f.peer)
	return err
}

func (f *talk) read() error {
	if _, err := io.ReadFull(f.client, make([]byte, 4)); err != nil {
		return fmt.Errorf("the client: %w", err)
	}
	return nil
}

// neighbours have flows with a host outside, with a container of another node, and by a gateway.
type neighbours struct {
	bed    *bed
	busy   []*talk // used during the scans
	idle   []*talk // datagrams whose server sends first after a scan
	caches map[string]*ebpf.Memory
	warm   []entry
}

// entry is what the caches have of the neighbours' flows.
type entry struct {
	cache string
	key   []byte // begin of a slot
	until uint64 // jiffies
	since time.Time
}

func newNeighbours(t *testing.T, b *bed) *neighbours {
	t.Helper()
	n := &neighbours{bed: b, caches: map[string]*ebpf.Memory{}}
	internet, err := b.Address("internet")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(5000)
	for range 4 {
		for _, pair := range []struct {
			client, server string
			at             netip.Addr
		}{{"r1", "internet", internet}, {"r1", "r2", b.container(t, "r2").Address}, {"g1", "internet", internet}} {
			n.busy = append(n.busy, n.connect(t, pair.client, pair.server, netip.AddrPortFrom(pair.at, port)),
				n.datagrams(t, pair.client, pair.server, netip.AddrPortFrom(pair.at, port)))
			n.idle = append(n.idle, n.datagrams(t, pair.client, pair.server, netip.AddrPortFrom(pair.at, port+1)))
			port += 2
		}
	}
	n.openCaches(t)
	return n
}

func (n *neighbours) connect(t *testing.T, client, server string, at netip.AddrPort) *talk {
	t.Helper()
	f := &talk{}
	var l net.Listener
	n.bed.in(t, server, func() (err error) { l, err = net.Listen("tcp6", at.String()); return err })
	defer l.Close()
	dial := func() (err error) {
		f.client, err = (&net.Dialer{Timeout: time.Second}).Dial("tcp6", at.String())
		return err
	}
	labtest.Until(t, labtest.Patience, client+" reaches "+server, func() bool {
		return <-labtest.RunIn(t, n.bed.Lab, client, dial) == nil
	})
	var err error
	if f.server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.client.Close(); f.server.Close() })
	return f
}

func (n *neighbours) datagrams(t *testing.T, client, server string, at netip.AddrPort) *talk {
	t.Helper()
	f := &talk{}
	n.bed.in(t, server, func() (err error) { f.packet, err = net.ListenPacket("udp6", at.String()); return err })
	n.bed.in(t, client, func() (err error) { f.client, err = net.Dial("udp6", at.String()); return err })
	t.Cleanup(func() { f.client.Close(); f.packet.Close() })
	if err := f.exchange(); err != nil {
		t.Fatalf("%s to %s: %v", client, server, err)
	}
	return f
}

// openCaches opens the caches of n1. No pin has them; the program of the uplink uses them.
func (n *neighbours) openCaches(t *testing.T) {
	t.Helper()
	attached, err := link.LoadPinnedLink(filepath.Join(n.bed.BPF("n1"), "links", "uplink_in"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer attached.Close()
	about, err := attached.Info()
	if err != nil {
		t.Fatal(err)
	}
	n.open(t, about.Program, map[ebpf.ProgramID]bool{})
	for _, name := range []string{"pil_flows", "pil_oflows", "pil_overdicts"} {
		if n.caches[name] == nil {
			t.Fatalf("no program of the uplink uses %s", name)
		}
	}
}

// open opens the caches of a program, and of those that it calls.
func (n *neighbours) open(t *testing.T, id ebpf.ProgramID, seen map[ebpf.ProgramID]bool) {
	t.Helper()
	if seen[id] {
		return
	}
	seen[id] = true
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case slices.Contains([]string{"pil_flows", "pil_oflows", "pil_overdicts"}, info.Name):
			if n.caches[info.Name], err = m.Memory(); err != nil {
				t.Fatal(err)
			}
		case m.Type() == ebpf.ProgramArray && info.Name == "pil_uplinks_v1":
			var key, program uint32
			for all := m.Iterate(); all.Next(&key, &program); {
				n.open(t, ebpf.ProgramID(program), seen)
			}
		}
	}
}

// noteEntries notes the entries of the neighbours' flows in the caches.
func (n *neighbours) noteEntries(t *testing.T) {
	t.Helper()
	r1, r2 := n.bed.container(t, "r1"), n.bed.container(t, "r2")
	n.warm = nil
	for name, of := range map[string][]netip.Addr{
		"pil_flows": {r1.Address, r2.Address, r1.Plaintext, r2.Plaintext}, "pil_oflows": {r1.Address},
		"pil_overdicts": {r1.Plaintext, n.bed.container(t, "g1").Plaintext},
	} {
		all := contentOf(t, n.caches[name])
		for slot := range slices.Chunk(all, slotSize) {
			for _, a := range of {
				if first := a.As16(); bytes.Equal(slot[:16], first[:]) {
					key := slot[:36] // addresses and device, or ports
					if name != "pil_overdicts" {
						key = slot[:48]
					}
					n.warm = append(n.warm, entry{cache: name, key: bytes.Clone(key)})
				}
			}
		}
	}
	if len(n.warm) < 3*4 {
		t.Fatalf("the caches have only %d entries of the neighbours", len(n.warm))
	}
}

const slotSize = 128

func contentOf(t *testing.T, m *ebpf.Memory) []byte {
	t.Helper()
	all := make([]byte, m.Size())
	if _, err := m.ReadAt(all, 0); err != nil {
		t.Fatal(err)
	}
	return all
}

// look looks the entries up before packets of their flows. It counts those that must be in the caches, and those that
// are not.
func (n *neighbours) look(t *testing.T) (checked, missed int) {
	t.Helper()
	n.find(t, func(e *entry, slot []byte) {
		if e.cache != "pil_flows" && time.Since(e.since) >= fresh {
			return
		}
		checked++
		if slot == nil {
			missed++
		}
	})
	return checked, missed
}

// note notes since when the entries are valid, after packets of their flows.
func (n *neighbours) note(t *testing.T) {
	t.Helper()
	n.find(t, func(e *entry, slot []byte) {
		at := unsafe.Offsetof(bpfobj.PilasterFlow{}.Expires)
		if e.cache == "pil_overdicts" {
			at = unsafe.Offsetof(bpfobj.PilasterVerdict{}.Until)
		}
		if slot == nil {
			return
		}
		if until := binary.NativeEndian.Uint64(slot[at:]); until != e.until {
			e.until, e.since = until, time.Now()
		}
	})
}

// find calls a function for each entry, with its slot, which is nil if the cache does not have the entry.
func (n *neighbours) find(t *testing.T, do func(e *entry, slot []byte)) {
	t.Helper()
	all := map[string][]byte{}
	for name, m := range n.caches {
		all[name] = contentOf(t, m)
	}
	for i := range n.warm {
		e := &n.warm[i]
		var has []byte
		for slot := range slices.Chunk(all[e.cache], slotSize) {
			if bytes.Equal(slot[:len(e.key)], e.key) {
				has = slot
				break
			}
		}
		do(e, has)
	}
}

// onCPU runs a function on a thread of the first CPU. Flows are cached where they are sent from.
func onCPU(run func() error) error {
	return netns.OnThread(func() error {
		var cpu unix.CPUSet
		cpu.Set(0)
		if err := unix.SchedSetaffinity(0, &cpu); err != nil {
			return err
		}
		return run()
	})
}

// during runs a scan, and uses the flows of the neighbours meanwhile.
func (n *neighbours) during(t *testing.T, s scan) {
	round := func() error {
		for i, f := range n.busy {
			if err := f.exchange(); err != nil {
				return fmt.Errorf("flow %d of a neighbour: %w", i, err)
			}
		}
		return nil
	}
	for range 3 {
		if err := onCPU(round); err != nil {
			t.Fatalf("before the scan: %v", err)
		}
	}
	n.noteEntries(t)
	before := n.dropped(t, s)
	ended := make(chan error, 1)
	began := time.Now()
	go func() { ended <- onCPU(func() error { return n.bed.inject[s.from].Burst(s.packets, s.frame) }) }()
	looked, missed := 0, 0
	for scanning := true; scanning; {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			scanning = false
		default:
		}
		checked, absent := n.look(t)
		looked, missed = looked+checked, missed+absent
		if err := onCPU(round); err != nil {
			t.Fatalf("during the scan: %v", err)
		}
		n.note(t)
	}
	took := time.Since(began)
	if missed*1000 > looked*mostMisses {
		t.Errorf("%d of %d entries of neighbours were not in the caches; want %d in 1,000 at most", missed, looked,
			mostMisses)
	}
	for i, f := range n.idle {
		if err := f.pushed(); err != nil {
			t.Errorf("idle flow %d of a neighbour: %v", i, err)
		}
	}
	if s.why != "" {
		if got := n.dropped(t, s) - before; got != uint64(s.packets) {
			t.Errorf("%s dropped %d packets for %s, want %d", s.at, got, s.why, s.packets)
		}
	}
	t.Logf("%d packets in %v; %d of %d entries missed", s.packets, took.Round(time.Millisecond), missed, looked)
}

// pushed has the server of an idle flow send first.
func (f *talk) pushed() error {
	var err error
	for range 5 {
		err = errors.Join(f.client.SetReadDeadline(time.Now().Add(time.Second/2)), f.push())
		if err == nil {
			err = f.read()
		}
		if err == nil {
			return nil
		}
	}
	return err
}

func (n *neighbours) dropped(t *testing.T, s scan) uint64 {
	t.Helper()
	if s.why == "" {
		return 0
	}
	drops, err := n.bed.Drops(n.bed.ctx, s.at)
	if err != nil {
		t.Fatal(err)
	}
	return drops[s.why]
}
