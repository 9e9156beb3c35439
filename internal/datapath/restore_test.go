package datapath

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// reopen closes the data path and opens it again, like a new agent.
func (n *testNode) reopen(t *testing.T, config Config) {
	t.Helper()
	must(t, n.datapath.Close())
	must(t, n.ns.Do(func() (err error) {
		n.datapath, err = Open(config)
		return err
	}))
}

// restore restores containers, and fails if one is lost.
func (n *testNode) restore(t *testing.T, containers ...*testContainer) {
	t.Helper()
	var keep []endpoint.Record
	for _, c := range containers {
		keep = append(keep, c.record)
	}
	lost, err := n.datapath.restoreAll(t.Context(), keep)
	must(t, err)
	if len(lost) > 0 {
		t.Fatalf("lost: %v", lost)
	}
}

// breakage is one difference between what is and what should be.
type breakage struct {
	name, said string // by Check
	do         func(b *broken) error
}

type broken struct {
	*testContainer
	inside *netlink.Handle
	eth0   netlink.Link
	host   netlink.Link
}

func (b *broken) datapath() *Datapath { return b.node.datapath }

func (b *broken) setInside(name, value string) error {
	return withSettings(b.ns, func(s host.Sysctls) error {
		return s.Set("eth0", []host.Sysctl{{Family: "ipv6", Name: name, Value: value}})
	})
}

func (b *broken) setHost(family, name, value string) error {
	return b.datapath().Sysctls.Set(b.record.Device.HostName, []host.Sysctl{{Family: family, Name: name, Value: value}})
}

func breakages() []breakage {
	id := uint32(blue.Current().ID)
	return []breakage{
		{"address", "address ", func(b *broken) error {
			return b.inside.AddrDel(b.eth0, device.ContainerAddress(b.record.Attachments[0]))
		}},
		{"route", "route ", func(b *broken) error {
			return b.inside.RouteDel(&device.ContainerRoutes(b.eth0, b.record.Attachments[0])[0])
		}},
		{"altered route", "route ", func(b *broken) error {
			route := device.ContainerRoutes(b.eth0, b.record.Attachments[0])[0]
			route.Gw = slices.Concat(route.Gw[:15], []byte{9})
			return b.inside.RouteReplace(&route)
		}},
		{"neighbour", "neighbour ", func(b *broken) error {
			return b.inside.NeighDel(device.GatewayNeighbour(b.eth0, b.record.Attachments[0]))
		}},
		{"altered neighbour", "neighbour ", func(b *broken) error {
			neighbour := device.GatewayNeighbour(b.eth0, b.record.Attachments[0])
			neighbour.HardwareAddr = host.ContainerMAC
			return b.inside.NeighSet(neighbour)
		}},
		{
			"container's MTU",
			"eth0 in the container has MTU 1300",
			func(b *broken) error { return b.inside.LinkSetMTU(b.eth0, 1300) },
		},
		{
			"container's IPv6",
			"disable_ipv6 is 1, not 0",
			func(b *broken) error { return b.setInside("disable_ipv6", "1") },
		},
		{
			"container's link-local address",
			"addr_gen_mode is 0, not 1",
			func(b *broken) error { return b.setInside("addr_gen_mode", "0") },
		},
		{
			"container's device that is down",
			"eth0 in the container is down",
			func(b *broken) error { return b.inside.LinkSetDown(b.eth0) },
		},
		{
			"container's MAC",
			"eth0 in the container has MAC",
			func(b *broken) error { return b.inside.LinkSetHardwareAddr(b.eth0, host.GatewayMAC) },
		},
		{"local entry", "map entry pil_locals", func(b *broken) error {
			return b.datapath().Objects.PilLocalsV1.Delete(bpfobj.ToAddr(b.plain()).Lo)
		}},
		{"altered local entry", "map entry pil_locals", func(b *broken) error {
			other := epDstEntry(b.record, b.record.Attachments[0])
			other.Checksum++
			return b.datapath().Objects.PilLocalsV1.Put(bpfobj.ToAddr(b.plain()).Lo, other)
		}},
		{"source entry", "map entry pil_sources", func(b *broken) error {
			return b.datapath().Objects.PilSourcesV2.Delete(bpfobj.ToAddr(b.seen()))
		}},
		{"altered source entry", "map entry pil_sources", func(b *broken) error {
			other := epSrcEntry(b.record, b.record.Attachments[0])
			other.TenantId++
			return b.datapath().Objects.PilSourcesV2.Put(bpfobj.ToAddr(b.seen()), other)
		}},
		{
			"node's route",
			"the node has no route",
			func(b *broken) error { return b.datapath().DeleteNodeRoute(host.HostNet(b.seen())) },
		},
		{
			"tenant entry",
			"map entry pil_tenants",
			func(b *broken) error { return b.datapath().Objects.PilTenantsV2.Delete(id) },
		},
		{"key", "map entry pil_keys", func(b *broken) error { return b.datapath().Objects.PilKeysV1.Delete(id) }},
	}
}

// ofPair returns breakages of the node's side of a device pair.
func ofPair() []breakage {
	return []breakage{
		{"node's MTU", "has MTU 1300", func(b *broken) error { return b.datapath().Netlink.LinkSetMTU(b.host, 1300) }},
		{
			"node's IPv6",
			"disable_ipv6 is 0, not 1",
			func(b *broken) error { return b.setHost("ipv6", "disable_ipv6", "0") },
		},
		{
			"node's forwarding",
			"forwarding is 0, not 1",
			func(b *broken) error { return b.setHost("ipv6", "forwarding", "0") },
		},
		{
			"node's reverse path filter",
			"rp_filter is 0, not 1",
			func(b *broken) error { return b.setHost("ipv4", "rp_filter", "0") },
		},
		{"node's ARP", "does ARP", func(b *broken) error { return b.datapath().Netlink.LinkSetARPOn(b.host) }},
		{
			"node's device that is down",
			" is down",
			func(b *broken) error { return b.datapath().Netlink.LinkSetDown(b.host) },
		},
		{
			"program",
			"program pil_container is not on",
			func(b *broken) error { return b.node.detachContainer(b.record) },
		},
		{
			"MAC entry",
			"map entry pil_macs",
			func(b *broken) error { return b.datapath().Objects.PilMacsV1.Delete(b.ifindex()) },
		},
		{"altered MAC entry", "map entry pil_macs", func(b *broken) error {
			return b.datapath().Objects.PilMacsV1.Put(b.ifindex(), bpfobj.PilasterDevMac{Mac: [6]uint8{2}})
		}},
	}
}

// TestCheckNamesAndRestoreRepairs breaks one thing at a time: CHECK names it, and a start of the agent repairs it.
func TestCheckNamesAndRestoreRepairs(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1].add(t, blue, 1)
	c := n.add(t, blue, 1)
	inside, err := c.ns.Netlink()
	must(t, err)
	defer inside.Close()
	all := breakages()
	if joined == paired {
		all = append(all, ofPair()...)
	}
	for _, br := range all {
		t.Run(br.name, func(t *testing.T) {
			b := &broken{testContainer: c, inside: inside}
			b.eth0, err = inside.LinkByName("eth0")
			must(t, err)
			if name := c.record.Device.HostName; name != "" {
				b.host, err = n.datapath.Netlink.LinkByName(name)
				must(t, err)
			}
			must(t, n.datapath.checkEndpoint(t.Context(), c.record))
			must(t, br.do(b))
			if err := n.datapath.checkEndpoint(t.Context(), c.record); err == nil ||
				!strings.Contains(err.Error(), br.said) {
				t.Errorf("check says %v, not %q", err, br.said)
			}
			must(t, n.datapath.putTenant(blue))
			n.restore(t, c)
			if err := n.datapath.checkEndpoint(t.Context(), c.record); err != nil {
				t.Errorf("not repaired: %v", err)
			}
		})
	}
	// The kernel notices a carrier, and makes an address local, some time after the request.
	in, err := device.OpenContainerNS(c.record.Netns)
	must(t, err)
	defer in.Close()
	must(t, errors.Join(in.WaitForCarrier(t.Context(), c.record), in.WaitForAddresses(t.Context(), c.record)))
	mustReach(t, c, peer, "repaired")
}

// TestRestoreFindsWhatIsHidden: at the path of a container's namespace, the agent may see none, or another one.
func TestRestoreFindsWhatIsHidden(t *testing.T) {
	for _, kind := range []string{joined, endpoint.Macvlan} {
		n := newWireOf(t, kind).nodes[0]
		other, hidden, moved := n.add(t, blue, 1), n.add(t, blue, 1), n.add(t, blue, 1)
		var keep []endpoint.Record
		for c, path := range map[*testContainer]string{hidden: hidden.ns.Path() + "-elsewhere",
			moved: other.ns.Path()} {
			in, err := c.ns.Netlink()
			must(t, err)
			defer in.Close()
			eth0, err := in.LinkByName("eth0")
			must(t, err)
			must(t, in.LinkSetMTU(eth0, 1400))
			there := c.record
			there.Netns = path
			keep = append(keep, there)
		}
		lost, err := n.datapath.restoreAll(t.Context(), append(keep, other.record))
		must(t, err)
		for _, c := range []*testContainer{other, hidden, moved} {
			if err := errors.Join(lost[c.record.ID], n.datapath.checkEndpoint(t.Context(), c.record)); err != nil {
				t.Errorf("%s: not repaired: %v", kind, err)
			}
		}
	}
}

// TestRestoreSaysWhatItDoesNotSee: a namespace that only an open file of another process refers to cannot be found. The
// container keeps running, and Restore reports it.
func TestRestoreSaysWhatItDoesNotSee(t *testing.T) {
	n := newWireOf(t, paired).nodes[0]
	c := n.add(t, blue, 1)
	must(t, netns.Remove(c.ns.Path())) // the test has it open
	var said bytes.Buffer
	config := n.datapath.config
	config.Log = slog.New(slog.NewTextHandler(&said, nil))
	n.reopen(t, config)
	must(t, n.datapath.putTenant(blue))
	n.restore(t, c)
	if text := said.String(); !strings.Contains(text, "container's side was not compared") ||
		!strings.Contains(text, device.ErrNetnsNotFound.Error()) {
		t.Errorf("the log has %q", text)
	}
}

// TestRestoreAttachesToTheUplink after a program was detached from it, by link or by pin.
func TestRestoreAttachesToTheUplink(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, b := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	for name, remove := range map[string]func(l link.Link) error{
		"detached": func(l link.Link) error { return l.Detach() },
		"unpinned": func(l link.Link) error { return l.Unpin() },
	} {
		for _, h := range n.datapath.UplinkHooks() {
			l, err := link.LoadPinnedLink(filepath.Join(n.datapath.LinksDir(), h.Name), nil)
			must(t, err)
			must(t, remove(l))
			must(t, l.Close())
			if s, err := n.datapath.Status(); err != nil || s.Healthy ||
				!strings.Contains(strings.Join(s.Problems, "\n"), h.Name) {
				t.Errorf("%s, %s: %+v, %v", h.Name, name, s, err)
			}
			n.restore(t, a)
			if s, err := n.datapath.Status(); err != nil || !s.Healthy || !s.FirstInChain {
				t.Errorf("%s, %s, restored: %+v, %v", h.Name, name, s, err)
			}
		}
	}
	mustReach(t, a, b, "restored")
}

// TestRestoreSweeps what belongs to no endpoint: devices, entries, tenants and pins.
func TestRestoreSweeps(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	kept, removed, gone := n.add(t, blue, 1), n.add(t, blue, 1), n.add(t, blue, 1)
	must(t, n.datapath.removeEndpoint(t.Context(), removed.record))
	must(t, n.datapath.removeEndpoint(t.Context(), removed.record))
	must(t, gone.ns.Close())
	must(t, netns.Remove(gone.ns.Path()))
	must(t, n.datapath.removeEndpoint(t.Context(), gone.record))

	must(t, n.datapath.putTenant(red))
	n.datapath.knownTenantIDs.Clear() // as if an earlier process had written the ids
	must(t, n.datapath.Netpila().Activate(t.Context(), removed.record))
	attrs := netlink.NewLinkAttrs()
	attrs.Name = host.DeviceName(77)
	must(t, n.datapath.Netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "stray"}))
	stale := []string{filepath.Join(n.datapath.MapsDir(), "pil_old_v0"), filepath.Join(n.datapath.LinksDir(), "old")}
	must(t, n.datapath.Objects.PilFlows.Pin(stale[0]))
	must(t, n.ns.Do(func() error {
		l, err := link.AttachTCX(
			link.TCXOptions{
				Interface: n.datapath.Uplinks[0].Attrs().Index,
				Program:   n.datapath.Objects.PilTryCipher,
				Attach:    ebpf.AttachTCXEgress,
			},
		)
		if err != nil {
			return err
		}
		defer l.Close()
		return l.Pin(stale[1])
	}))

	n.restore(t, kept)
	must(t, n.datapath.checkEndpoint(t.Context(), kept.record))
	entries, err := n.datapath.Netpila().Entries(t.Context())
	must(t, err)
	for _, e := range entries {
		if !e.Cache && e.Used != 1 {
			t.Errorf("%s holds %d entries, not 1", e.Table, e.Used)
		}
	}
	links, err := netns.List(n.datapath.Netlink.LinkList)
	must(t, err)
	for _, l := range links {
		if name := l.Attrs().Name; strings.HasPrefix(name, host.DevicePrefix) && name != kept.record.Device.HostName &&
			name != hook.NodeDevice &&
			name != hook.NodeFar {
			t.Errorf("device %s is left", name)
		}
	}
	for _, pin := range stale {
		if _, err := os.Stat(pin); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", pin, err)
		}
	}
	hooks := n.datapath.UplinkHooks()
	must(t, n.ns.Do(func() error {
		got, err := hook.QueryHook(hooks[1])
		if err == nil && len(got.Programs) != len(hooks)/2 {
			t.Errorf("on the uplink stand %+v", got.Programs)
		}
		return err
	}))
	// A tenant that is put stays, also while it has no endpoint on this network yet.
	must(t, n.datapath.putTenant(red))
	n.restore(t, kept)
	must(t, n.datapath.Objects.PilTenantsV2.Lookup(uint32(red.Current().ID), new(bpfobj.PilasterTenant)))
	must(t, n.datapath.deleteTenant(red))
	n.restore(t, kept)
	if err := n.datapath.Objects.PilTenantsV2.Lookup(uint32(red.Current().ID), new(bpfobj.PilasterTenant)); !errors.Is(
		err,
		ebpf.ErrKeyNotExist,
	) {
		t.Errorf("a deleted tenant: %v", err)
	}
	must(t, n.datapath.deleteTenant(blue))
	if err := n.datapath.Objects.PilKeysV1.Lookup(uint32(blue.Current().ID), new([8]byte)); !errors.Is(
		err,
		ebpf.ErrKeyNotExist,
	) {
		t.Errorf("the key of a deleted tenant: %v", err)
	}
}

// TestRestoreGuessesNothing: Restore distinguishes a container's device from a stray one, and an endpoint without a
// device from one whose namespace is gone, too.
func TestRestoreGuessesNothing(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, b := n.add(t, blue, 1), n.add(t, blue, 1)
	n.datapath.Netlink.LinkAdd(
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: host.DeviceName(77)}, PeerName: "stray"},
	)
	if ids, err := n.datapath.Attached(); err != nil ||
		!slices.Equal(slices.Sorted(slices.Values(ids)), []endpoint.ID{a.record.ID, b.record.ID}) {
		t.Errorf("packets are carried for %v, %v", ids, err)
	}

	a.unplug(t)
	b.unplug(t)
	must(t, b.ns.Close())
	must(t, netns.Remove(b.ns.Path()))
	lost, err := n.datapath.restoreAll(t.Context(), []endpoint.Record{a.record, b.record})
	must(t, err)
	if err := lost[a.record.ID]; err == nil || errors.Is(err, dpapi.ErrNoNamespace) {
		t.Errorf("device gone: %v", err)
	}
	if err := lost[b.record.ID]; !errors.Is(err, dpapi.ErrNoNamespace) {
		t.Errorf("namespace gone: %v", err)
	}
}

// TestAnotherSize: tables of another size, larger or smaller, take over the entries, and the counters continue.
func TestAnotherSize(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a, b := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	must(t, a.ns.Do(func() error { return sendUDP(netip.MustParseAddr("fc12::1"), []byte("noise")) }))
	before := n.drops(t)["dst-undecryptable"]
	if before == 0 {
		t.Fatal("nothing was counted")
	}
	for _, size := range []int{200, 1, 100} {
		config := n.datapath.config
		config.MaxEndpoints = size
		n.reopen(t, config)
		mustReach(t, a, b, "opened, and not yet taken over")
		must(t, n.datapath.putTenant(blue))
		n.restore(t, a)
		mustReach(t, a, b, "taken over")
		must(t, n.datapath.checkEndpoint(t.Context(), a.record))
		// An endpoint that a higher limit allowed may be alive, and DEL must work.
		const high = 3000
		must(t, n.datapath.deleteSessions(high))
		var sessions int64
		if err := n.datapath.Objects.PilSessionUsersV1.Lookup(uint32(high), &sessions); err != nil {
			t.Errorf("%d endpoints: sessions of endpoint %d are not counted: %v", size, high, err)
		}
		pins, err := filepath.Glob(filepath.Join(n.datapath.MapsDir(), "pil_locals*"))
		must(t, err)
		if m := n.datapath.Objects.PilLocalsV1.MaxEntries(); len(pins) != 1 || int(m) != size {
			t.Errorf("%d entries in %v, want %d", m, pins, size)
		}
		if got := n.drops(t)["dst-undecryptable"]; got != before {
			t.Errorf("%d drops before, %d after", before, got)
		}
	}
}

// TestCountersOfAnotherLayout are added to those of this one, by reason.
func TestCountersOfAnotherLayout(t *testing.T) {
	w := newWire(t)
	n := w.nodes[0]
	a := n.add(t, blue, 1)
	must(t, a.ns.Do(func() error { return sendUDP(netip.MustParseAddr("fc12::1"), []byte("noise")) }))
	want := n.drops(t)["dst-undecryptable"]
	// This build's counters, as if another build had made them: a wider value or fewer reasons would read the same.
	pin := filepath.Join(n.datapath.MapsDir(), bpfobj.PinDrops)
	must(t, os.Rename(pin, filepath.Join(n.datapath.MapsDir(), "pil_drops_v0")))
	for range 2 {
		n.reopen(t, n.datapath.config)
		must(t, n.datapath.putTenant(blue))
		n.restore(t, a)
		if got := n.drops(t)["dst-undecryptable"]; got != want || want == 0 {
			t.Errorf("%d drops, want %d", got, want)
		}
	}
	must(t, a.ns.Do(func() error { return sendUDP(netip.MustParseAddr("fc12::1"), []byte("noise")) }))
	if got := n.drops(t)["dst-undecryptable"]; got != want+1 {
		t.Errorf("%d drops after one more, want %d", got, want+1)
	}
}

// TestTryingTheCipherTouchesNoTenant: the check of the cipher changes no tenant's key, also not that of the last id.
func TestTryingTheCipherTouchesNoTenant(t *testing.T) {
	n := newWire(t).nodes[0]
	last := tenant.Tenant{
		Name:       "last",
		Addressing: tenant.Encrypted,
		IDs:        []tenant.ID{{ID: address.MaxTenantID, Key: address.Key{1}}},
	}
	must(t, n.datapath.putTenant(last))
	must(t, n.datapath.verifyCipher())
	for _, table := range []struct {
		name string
		key  uint32
		want bool
	}{{"the tenant", uint32(address.MaxTenantID), true}, {"the trial", 0, false}} {
		err := n.datapath.Objects.PilKeysV1.Lookup(table.key, new([8]byte))
		if got := err == nil; got != table.want {
			t.Errorf("%s has a key: %v (%v)", table.name, got, err)
		}
	}
}
