package tables

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bpftest"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The tenants' VNIDs, and the nodes of the tests; the first is the one whose programs run.
const green, gold = 7, 8

var (
	plan      = reserving(address.DefaultPlan())
	use, _    = plan.ILA()
	fabricMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}
	router    = netip.MustParseAddr("2001:db8::9")
)

func reserving(p address.Plan) address.Plan {
	p.Identifiers = true
	return p
}

// locator returns the locator of the n-th node.
func locator(n uint64) netip.Prefix {
	l, err := use.Locator(plan.Node(n))
	if err != nil {
		panic(err)
	}
	return l
}

// sir returns an address that containers see.
func sir(vnid address.TenantID, index uint32) netip.Addr {
	b := use.Range(vnid).Addr().As16()
	binary.BigEndian.PutUint32(b[12:], index)
	return netip.AddrFrom16(b)
}

// wire returns an address as it is on the fabric.
func wire(a netip.Addr, node uint64) netip.Addr { return use.ToWire(a, locator(node)) }

// sirOf is the inverse of wire.
func sirOf(wire netip.Addr) netip.Addr {
	a, ok := use.ToSIR(wire)
	if !ok {
		panic(wire)
	}
	return a
}

// withLast changes the last 16 bits of an address, withPrefix the first half.
func withLast(a netip.Addr, last uint16) netip.Addr {
	b := a.As16()
	binary.BigEndian.PutUint16(b[14:], last)
	return netip.AddrFrom16(b)
}

func withPrefix(a, prefix netip.Addr) netip.Addr {
	b, p := a.As16(), prefix.As16()
	copy(b[:8], p[:8])
	return netip.AddrFrom16(b)
}

// withoutC clears the C bit.
func withoutC(a netip.Addr) netip.Addr {
	b := a.As16()
	b[8] &^= 0x10
	return netip.AddrFrom16(b)
}

// The containers. own and beside are here, far and moved, which came from far's node, elsewhere. The others are gold's.
var (
	own, beside, other = sir(green, 1), sir(green, 0xfffff), sir(gold, 1)
	far, moved, alien  = sir(green, 0x20005), sir(green, 6), sir(gold, 9)
	absent             = sir(green, 0x7777)
	cold               = sir(green, 0x30003)                   // elsewhere; no packet to it leaves
	gone               = sir(green, 0x40004)                   // elsewhere, until just now here
	guest              = sir(green, 0x50005)                   // here, until just now elsewhere
	edge               = sirOf(withLast(wire(own, 1), 0xffff)) // 0xffff there is as good as 0 for checksums
)

const (
	appOwn = iota + 11
	appBeside
	appFar
)

// bed is a node whose programs run on packets as data.
type bed struct {
	*Tables
	ns        *netns.Namespace
	uplink    uint32
	uplinkMAC net.HardwareAddr
	device    map[netip.Addr]uint32 // of containers here
}

// newBed returns a node with these programs; nil means those of this build.
func newBed(t testing.TB, spec *ebpf.CollectionSpec) *bed {
	t.Helper()
	return newBedWith(t, spec, Config{ILA: use, Locator: locator(1), Endpoints: 100, Mappings: 1000})
}

func newBedWith(t testing.TB, spec *ebpf.CollectionSpec, c Config) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	b := &bed{ns: bpftest.Namespace(t, "node"), device: map[netip.Addr]uint32{}}
	beyond := bpftest.Namespace(t, "beyond")
	eth0 := bpftest.Pair(t, b.ns, beyond, "eth0", 100)
	b.uplink, b.uplinkMAC = uint32(eth0.Attrs().Index), eth0.Attrs().HardwareAddr
	pins := filepath.Join(t.TempDir(), "bpf")
	t.Cleanup(func() { unix.Unmount(pins, unix.MNT_DETACH) })
	var path *datapath.Datapath
	must(t, b.ns.Do(func() (err error) {
		path, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: plan.Node(1), Plan: plan, BPFFS: pins, MaxEndpoints: 100,
			Log: slog.New(slog.DiscardHandler),
		})
		return err
	}))
	t.Cleanup(func() { path.Close() })
	var err error
	if spec == nil {
		spec, err = loadObject()
		must(t, err)
	}
	b.Tables, err = open(path, spec, c)
	if v := new(ebpf.VerifierError); errors.As(err, &v) {
		t.Fatalf("%+v", v)
	}
	must(t, err)
	t.Cleanup(func() { b.Close() })
	must(t, path.AttachUplinkPrograms())
	bpftest.Route(t, b.ns, eth0, fabricMAC, unix.AF_INET6)
	for i, a := range []netip.Addr{own, beside, other, edge, guest} {
		l := bpftest.Pair(t, b.ns, beyond, "c"+string(rune('1'+i)), 200+i)
		b.device[a] = uint32(l.Attrs().Index)
		local := ila.Local{Device: b.device[a], Endpoint: uint32(i + 1), App: appOwn + address.AppID(i)}
		if a == guest {
			local.Former = locator(3)
		}
		must(t, b.SetLocal(a, &local))
	}
	must(t, b.SetPeers(map[netip.Addr]ila.Peer{
		far:   {Locator: locator(2), App: appFar},
		alien: {Locator: locator(2), App: appFar},
		cold:  {Locator: locator(2), App: appFar},
		moved: {Locator: locator(3), Former: locator(2), App: appFar},
		gone:  {Locator: locator(3), Former: locator(1), App: appFar},
	}, nil))
	b.extend(t)
	return b
}

// extend makes former locators valid for an hour, so that a slow machine does not end their time.
func (b *bed) extend(t testing.TB) {
	t.Helper()
	var now unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	until := uint64(now.Nano()) + uint64(time.Hour)
	b.peerUntil(t, moved, until)
	b.peerUntil(t, gone, until)
	b.localUntil(t, guest, until)
}

// peerUntil sets when the former locator of a container elsewhere ends, localUntil that of one here.
func (b *bed) peerUntil(t testing.TB, a netip.Addr, until uint64) {
	t.Helper()
	b.changePeer(t, a, func(p *objectIlaPeer) { p.Until = until })
}

// changePeer changes the entry of a container elsewhere.
func (b *bed) changePeer(t testing.TB, a netip.Addr, change func(*objectIlaPeer)) {
	t.Helper()
	var p objectIlaPeer
	must(t, b.peers().Lookup(identifier(a), &p))
	change(&p)
	must(t, b.peers().Put(identifier(a), p))
}

func (b *bed) localUntil(t testing.TB, a netip.Addr, until uint64) {
	t.Helper()
	var l objectIlaLocal
	must(t, b.locals().Lookup(identifier(a), &l))
	l.Until = until
	must(t, b.locals().Put(identifier(a), l))
}

// skbHead is the head of the kernel's struct __sk_buff, as BPF_PROG_TEST_RUN takes it.
type skbHead struct {
	_                       [9]uint32
	IngressIfindex, Ifindex uint32
}

// contextOf is that of a packet that comes in by a device.
func contextOf(device uint32) skbHead { return skbHead{IngressIfindex: device, Ifindex: device} }

const (
	verdictDrop     = 2
	verdictRedirect = 7
	errorRoom       = 64 // an ICMP error is that much longer than what it quotes
)

// fromContainer runs the program of a container here, fromFabric those of the uplink. They return the reasons of drops.
func (b *bed) fromContainer(t testing.TB, a netip.Addr, frame []byte) (uint32, []byte, map[string]uint64) {
	t.Helper()
	program, _ := b.Programs()
	return b.run(t, program, frame, contextOf(b.device[a]))
}

func (b *bed) fromFabric(t testing.TB, frame []byte) (uint32, []byte, map[string]uint64) {
	t.Helper()
	return b.run(t, b.path.Objects.PilUplinkIn, frame, contextOf(b.uplink))
}

func (b *bed) run(t testing.TB, p *ebpf.Program, frame []byte, in skbHead) (
	verdict uint32, out []byte, reasons map[string]uint64,
) {
	t.Helper()
	before := b.drops(t)
	o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+errorRoom), Context: in}
	must(t, b.ns.Do(func() (err error) {
		verdict, err = p.Run(o)
		return err
	}))
	reasons = map[string]uint64{}
	for r, n := range b.drops(t) {
		// The container's kernel sends router solicitations and listener reports at times of its own.
		if n > before[r] && r != dropreason.NdIgnored.String() && r != dropreason.MldIgnored.String() {
			reasons[r] = n - before[r]
		}
	}
	return verdict, o.DataOut, reasons
}

func (b *bed) drops(t testing.TB) map[string]uint64 {
	t.Helper()
	counts := map[string]uint64{}
	for _, r := range dropreason.All() {
		var states [][4]uint64 // by CPU; the first number counts packets
		must(t, b.objects.Maps["pil_drops_v1"].Lookup(uint32(r), &states))
		for _, s := range states {
			counts[r.String()] += s[0]
		}
	}
	return counts
}

// sent returns the frame of a container's packet, coming one from the fabric.
func sent(p packet.Packet) []byte { return p.Frame(host.GatewayMAC, host.ContainerMAC) }

func (b *bed) coming(p packet.Packet) []byte { return p.Frame(b.uplinkMAC, fabricMAC) }
