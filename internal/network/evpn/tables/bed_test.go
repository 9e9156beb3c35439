package tables

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bpftest"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const (
	vni      = pipeline.VNI(7)
	identity = 70
	patience = 10 * time.Second
)

var (
	plan      = address.DefaultPlan()
	pool      = netip.MustParsePrefix("10.71.0.0/16")
	segment   = pipeline.VNI(evpn.SegmentVNI(uint32(vni)))
	fabricMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}

	ownVTEP, nodeVTEP      = vtep(1), vtep(2)
	otherVTEP, strangeVTEP = netip.MustParseAddr("10.2.0.7"), netip.MustParseAddr("10.2.0.8")
	silentVTEP             = netip.MustParseAddr("10.2.0.9") // of the segment, without other routes

	own, far   = netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	own6, far6 = netip.MustParseAddr("fd12::2"), netip.MustParseAddr("fd12::3")
	switched   = netip.MustParseAddr("10.0.200.22") // another speaker's host in the segment
	switched6  = netip.MustParseAddr("fd12::200")   // the same host
	beyond     = netip.MustParseAddr("172.20.1.9")  // behind another speaker's router
	beside     = netip.MustParseAddr("10.0.0.6")    // in a second container of this node

	besideMAC = address.SegmentMAC(beside)
	hostMAC   = net.HardwareAddr{2, 0, 0, 0, 2, 0x22}
	routerMAC = net.HardwareAddr{2, 0, 0, 0, 0x0f, 7}
	ownMAC    = address.SegmentMAC(own)
)

func vtep(node uint64) netip.Addr {
	a, _ := address.VTEP4(pool, node)
	return a
}

func routerOf(vtep netip.Addr) net.HardwareAddr {
	m := evpn.RouterMAC(vtep)
	return m[:]
}

// bed is a node with one container and a fabric; frames enter and leave by the far ends of their devices.
type bed struct {
	*Switch
	ns               *netns.Namespace
	path             *datapath.Datapath
	pins             string
	beyond           *netns.Namespace // where the last device's far end is
	container        *netns.Namespace
	uplinkMAC        net.HardwareAddr
	fromFabric, from *packet.Injector
	toFabric, to     *packet.Capture
}

// pair makes a device of the node, and returns it and what sends and receives at its far end.
func (b *bed) pair(t testing.TB, name string) (netlink.Link, *packet.Injector, *packet.Capture) {
	t.Helper()
	beyond := bpftest.Namespace(t, "beyond-"+name)
	b.beyond = beyond
	l := bpftest.Pair(t, b.ns, beyond, name, 0)
	must(t, beyond.WaitUp(t.Context(), name))
	must(t, b.ns.WaitUp(t.Context(), name))
	in, err := packet.NewInjector(beyond, name)
	must(t, err)
	t.Cleanup(func() { in.Close() })
	out, err := packet.NewCapture(beyond, name)
	must(t, err)
	t.Cleanup(func() { out.Close() })
	return l, in, out
}

// newBed returns a node with these programs; nil means those of this build.
func newBed(t testing.TB, spec *ebpf.CollectionSpec) *bed {
	t.Helper()
	b := &bed{ns: bpftest.Namespace(t, "node")}
	eth0, in, out := b.pair(t, "eth0")
	b.fromFabric, b.toFabric, b.uplinkMAC = in, out, eth0.Attrs().HardwareAddr
	container, in, out := b.pair(t, "c1")
	b.from, b.to, b.container = in, out, b.beyond
	bpftest.Route(t, b.ns, eth0, fabricMAC, unix.AF_INET)
	pins := filepath.Join(t.TempDir(), "bpf")
	b.pins = pins
	t.Cleanup(func() { unix.Unmount(pins, unix.MNT_DETACH) })
	must(t, b.ns.Do(func() (err error) {
		b.path, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: plan.Node(1), Plan: plan, BPFFS: pins, MaxEndpoints: 100,
			VTEP4: pool,
			Log:   slog.New(slog.DiscardHandler),
		})
		return err
	}))
	t.Cleanup(func() { b.path.Close() })
	var err error
	if spec == nil {
		spec, err = loadObject()
		must(t, err)
	}
	b.Switch, err = open(b.path, spec, Config{Endpoints: 100, Mappings: 1000})
	if v := new(ebpf.VerifierError); errors.As(err, &v) {
		t.Fatalf("%+v", v)
	}
	must(t, err)
	t.Cleanup(func() { b.Close() })
	_, err = b.path.Restore(t.Context(), nil, func([]endpoint.Record) error { return nil })
	must(t, err)
	h, err := b.ns.Netlink()
	must(t, err)
	defer h.Close()
	program, _ := b.Programs()
	must(t, host.AttachFilter(h, container.Attrs().Index, "c1", netlink.HANDLE_MIN_INGRESS, program, entry))
	must(t, b.path.Objects.PilMacsV1.Put(uint32(container.Attrs().Index), bpfobj.PilasterDevMac{Mac: [6]uint8(ownMAC)}))
	must(t, b.Plug(t.Context(), 2, pipeline.Device{Name: "c1"}))
	b.pair(t, "c2")
	must(t, b.Plug(t.Context(), 3, pipeline.Device{Name: "c2"}))
	must(t, b.Apply(t.Context(), nil, entries()))
	return b
}

// entries are those of the container, of one on another node, and of another speaker's hosts.
func entries() []pipeline.Entry {
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	routed := netip.MustParsePrefix("172.20.0.0/16")
	return []pipeline.Entry{
		pipeline.Sender{Port: 2, Address: own, VNI: vni, Identity: identity},
		pipeline.Sender{Port: 2, Address: own6, VNI: vni, Identity: identity},
		pipeline.Forward{VNI: vni, To: netip.MustParsePrefix("10.0.0.0/16")},
		pipeline.Forward{VNI: vni, To: netip.MustParsePrefix("fd12::/48")},
		pipeline.Replication{VNI: vni, VTEPs: [pipeline.MaxReplicas]netip.Addr{otherVTEP, silentVTEP}},
		pipeline.Forward{VNI: vni, To: host(beside), Port: 3, MAC: pipeline.NewMAC(besideMAC)},
		pipeline.Forward{VNI: vni, To: host(switched6), Port: pipeline.VXLAN, VTEP: otherVTEP,
			MAC: pipeline.NewMAC(hostMAC), Wire: segment, Outside: true},
		pipeline.Forward{VNI: vni, To: host(own), Port: 2, MAC: pipeline.NewMAC(ownMAC)},
		pipeline.Forward{VNI: vni, To: host(own6), Port: 2, MAC: pipeline.NewMAC(ownMAC)},
		pipeline.Forward{VNI: vni, To: host(far), Port: pipeline.VXLAN, VTEP: nodeVTEP,
			MAC: pipeline.NewMAC(routerOf(nodeVTEP))},
		pipeline.Forward{VNI: vni, To: host(far6), Port: pipeline.VXLAN, VTEP: nodeVTEP,
			MAC: pipeline.NewMAC(routerOf(nodeVTEP))},
		pipeline.Forward{VNI: vni, To: host(switched), Port: pipeline.VXLAN, VTEP: otherVTEP,
			MAC: pipeline.NewMAC(hostMAC), Wire: segment, Outside: true},
		pipeline.Forward{VNI: vni, To: routed, Port: pipeline.VXLAN, VTEP: otherVTEP,
			MAC: pipeline.NewMAC(routerMAC), Outside: true},
		pipeline.Foreign{Edge: host(otherVTEP), Theirs: vni, Source: routed, VNI: vni},
		pipeline.Foreign{Edge: host(otherVTEP), Theirs: vni, Source: host(switched), VNI: vni},
		pipeline.Foreign{Edge: host(otherVTEP), Theirs: segment, Source: host(switched), VNI: vni},
	}
}

// outer are the headers around a frame.
type outer struct {
	from, to netip.Addr
	vni      pipeline.VNI
	identity uint16
}

func (o outer) frame(to, from net.HardwareAddr, inner []byte) []byte {
	payload := packet.VXLAN(uint32(o.vni), o.identity, inner)
	body := packet.UDP{SourcePort: 55555, DestinationPort: pipeline.UDPPort, Payload: payload}
	return packet.Packet{Source: o.from, Destination: o.to, Body: body}.Frame(to, from)
}

// untunnel reads a frame with headers of the sizes that the tunnel device writes.
func untunnel(frame []byte) (o outer, inner []byte, ok bool) {
	const udp, vxlan, end = 14 + 20, 14 + 20 + 8, 14 + 20 + 8 + 8
	if len(frame) < end || frame[12] != 8 || frame[14] != 0x45 || frame[23] != packet.ProtocolUDP ||
		binary.BigEndian.Uint16(frame[udp+2:]) != pipeline.UDPPort {
		return o, nil, false
	}
	o.from, o.to = netip.AddrFrom4([4]byte(frame[26:30])), netip.AddrFrom4([4]byte(frame[30:34]))
	o.identity = binary.BigEndian.Uint16(frame[vxlan+2:])
	o.vni = pipeline.VNI(binary.BigEndian.Uint32(frame[vxlan+4:]) >> 8)
	return o, frame[end:], true
}

func (b *bed) drops(t testing.TB) map[string]uint64 {
	t.Helper()
	counts := map[string]uint64{}
	for _, r := range dropreason.All() {
		var states [][4]uint64 // by CPU; the first number counts packets
		must(t, b.path.Objects.PilDropsV1.Lookup(uint32(r), &states))
		for _, s := range states {
			counts[r.String()] += s[0]
		}
	}
	return counts
}

// reasons are those of the drops since a count, but for what the kernel sends by itself.
func (b *bed) reasons(t testing.TB, before map[string]uint64) (all []string) {
	t.Helper()
	for reason, n := range b.drops(t) {
		if n > before[reason] && reason != "nd-ignored" && reason != "mld-ignored" {
			all = append(all, reason)
		}
	}
	return all
}

// next returns the next frame at a capture that is wanted, or none once a drop is counted.
func (b *bed) next(t testing.TB, at *packet.Capture, before map[string]uint64, wanted func([]byte) bool) []byte {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		got, err := at.Next(ctx)
		cancel()
		if err == nil && wanted(got.Frame) {
			return got.Frame
		}
		if err != nil && len(b.reasons(t, before)) > 0 {
			return nil
		}
	}
	return nil
}
