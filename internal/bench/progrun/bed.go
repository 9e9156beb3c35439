package progrun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// scalePlan returns an address plan with a wide private prefix, so that finding valid addresses for a million peers
// takes only seconds. The programs' cost does not depend on the prefix length.
func scalePlan() address.Plan {
	p := address.DefaultPlan()
	p.Private = netip.MustParsePrefix("e000::/4")
	return p
}

// Bed is a node whose tables are filled as by an agent. All endpoints share one device: a program runs for one device
// at a time, and the tables do not depend on the number of devices.
type Bed struct {
	wire                       *scenario.Wire
	Node                       *scenario.Node
	Datapath                   *datapath.Datapath
	ciphers                    []*address.Cipher // by tenant
	Endpoints                  []scaleEndpoint
	Hooks                      []Hook
	Generation, RuleGeneration *ebpf.Map // epochs of tables and of rules; a change invalidates the cache
	idle                       *ebpf.Map // program array with an empty program
}

type scaleEndpoint struct {
	tenant int
	Plain  address.Plain
	seen   netip.Addr
}

// Hook is a hook of the packet path and the device that its program runs for.
type Hook struct {
	Name    string
	target  *ebpf.Map // program array with its program
	idle    *ebpf.Map // program array with an empty program
	ifindex uint32
	mac     []byte // MAC of the device: destination address of frames
	inward  bool   // receives packets from peers, with plaintext addresses
}

// NewBed creates a bed. With 0 sessions the session table has its default size.
func NewBed(dir string, endpoints, tenants, sessions int) (_ *Bed, err error) {
	w, err := scenario.NewWire(dir)
	if err != nil {
		return nil, err
	}
	b := &Bed{wire: w, Node: w.Nodes[0]}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	if err := b.routePeers(); err != nil {
		return nil, err
	}
	pins := filepath.Join(w.Dir, "bpf")
	err = b.Node.NS.Do(func() (err error) {
		b.Datapath, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: b.Node.Prefix, Plan: scalePlan(), BPFFS: pins,
			MaxEndpoints: endpoints, MaxTenantIDs: tenants, MaxSessions: sessions, Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	w.OnClose(func() error { return scenario.Unmount(pins) })
	if err != nil {
		return nil, err
	}
	w.OnClose(b.Datapath.Close)
	if err := scenario.StartDatapath(b.Datapath); err != nil {
		return nil, err
	}
	device, err := b.fill(endpoints, tenants)
	if err != nil {
		return nil, err
	}
	if b.Generation, err = ebpf.LoadPinnedMap(filepath.Join(pins, "maps", "pil_generation_v1"), nil); err != nil {
		return nil, fmt.Errorf("open the generation map: %w", err)
	}
	w.OnClose(b.Generation.Close)
	if b.RuleGeneration, err = ebpf.LoadPinnedMap(filepath.Join(pins, "maps", "pol_generation_v1"), nil); err != nil {
		return nil, fmt.Errorf("open the rule generation map: %w", err)
	}
	w.OnClose(b.RuleGeneration.Close)
	if err := b.makeIdle(); err != nil {
		return nil, err
	}
	return b, b.findPrograms(device)
}

func (b *Bed) Close() error { return b.wire.Close() }

// routePeers adds a route for the whole base prefix via the other node, which has a permanent neighbour entry.
func (b *Bed) routePeers() error {
	far := b.wire.Nodes[1]
	var mac []byte
	err := scenario.OnDevice(far.NS, "eth0", func(_ *netlink.Handle, eth0 netlink.Link) error {
		mac = eth0.Attrs().HardwareAddr
		return nil
	})
	if err != nil {
		return err
	}
	return scenario.OnDevice(b.Node.NS, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
		return errors.Join(
			h.NeighSet(
				&netlink.Neigh{
					LinkIndex:    eth0.Attrs().Index,
					IP:           far.Underlay.AsSlice(),
					HardwareAddr: mac,
					State:        netlink.NUD_PERMANENT,
				},
			),
			h.RouteAdd(&netlink.Route{Dst: scenario.IPNet(scalePlan().Base), Gw: far.Underlay.AsSlice()}),
		)
	})
}

// fill adds tenants and endpoints to the node. Only the first address is assigned in the container, because no packet
// is delivered.
func (b *Bed) fill(endpoints, tenants int) (device endpoint.Device, err error) {
	c, err := b.wire.Namespace("container")
	if err != nil {
		return device, err
	}
	records := make([]endpoint.Record, tenants)
	for t := range records {
		key := address.Key{'s', 'c', 'a', 'l', 'e', byte(t), byte(t >> 8)}
		id := address.TenantID(t + 1)
		b.ciphers = append(b.ciphers, address.NewCipher(key))
		records[t] = endpoint.Record{
			ID:        1,
			Interface: "eth0",
			Netns:     c.Path(),
			Tenant:    fmt.Sprint("tenant", t),
			TenantID:  id,
			App:       1,
		}
		err := b.Datapath.Netpila().
			PutTenant(context.Background(), tenant.Tenant{Name: records[t].Tenant, Addressing: tenant.Encrypted,
				IDs: []tenant.ID{{ID: id, Key: key}}})
		if err != nil {
			return device, err
		}
	}
	next := make([]address.Index, tenants)
	for i := range endpoints {
		t := i % tenants
		plain, seen, err := b.nextAddress(t, b.Node.Prefix, next[t])
		if err != nil {
			return device, err
		}
		next[t] = plain.Index + 1
		b.Endpoints = append(b.Endpoints, scaleEndpoint{t, plain, seen})
		records[t].Attachments = append(records[t].Attachments, endpoint.Attachment{
			Network: "netpila", Plaintext: plain.Addr(), Address: seen, Gateway: netip.MustParseAddr("fe80::1"),
		})
	}
	first := records[0]
	first.Attachments = first.Attachments[:1]
	if device, err = b.Datapath.CreateDevice(context.Background(), first); err != nil {
		return device, err
	}
	for _, r := range records {
		r.Device = device
		if err := scenario.Activate(b.Datapath, r); err != nil {
			return device, err
		}
	}
	return device, nil
}

// nextAddress returns the tenant's first valid address whose index is at least index, as plaintext and ciphertext.
func (b *Bed) nextAddress(t int, node netip.Prefix, index address.Index) (address.Plain, netip.Addr, error) {
	return b.ciphers[t].Draw(
		scalePlan().Private,
		address.Plain{Node: node, Tenant: address.TenantID(t + 1), App: 1, Index: index},
	)
}

// findPrograms opens the programs attached to the devices.
func (b *Bed) findPrograms(device endpoint.Device) error {
	return scenario.OnDevice(b.Node.NS, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
		container, err := h.LinkByIndex(device.HostIfindex)
		if err != nil {
			return err
		}
		filters, err := netns.List(
			func() ([]netlink.Filter, error) { return h.FilterList(container, netlink.HANDLE_MIN_INGRESS) },
		)
		if err != nil {
			return err
		}
		var id ebpf.ProgramID
		for _, f := range filters {
			if f, ok := f.(*netlink.BpfFilter); ok {
				id = ebpf.ProgramID(f.Id)
			}
		}
		if err := b.addHook("container", id, container, false); err != nil {
			return err
		}
		var on *link.QueryResult
		err = b.Node.NS.Do(func() (err error) {
			on, err = link.QueryPrograms(link.QueryOptions{Target: eth0.Attrs().Index, Attach: ebpf.AttachTCXIngress})
			return err
		})
		if err != nil {
			return err
		}
		if len(on.Programs) != 1 {
			return fmt.Errorf("got %d programs on the uplink, want 1", len(on.Programs))
		}
		return b.addHook("uplink-in", on.Programs[0].ID, eth0, true)
	})
}

func (b *Bed) addHook(name string, id ebpf.ProgramID, device netlink.Link, inward bool) error {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return fmt.Errorf("the program of %s: %w", name, err)
	}
	b.wire.OnClose(program.Close)
	target, err := callable(program)
	if err != nil {
		return err
	}
	b.wire.OnClose(target.Close)
	b.Hooks = append(
		b.Hooks,
		Hook{name, target, b.idle, uint32(device.Attrs().Index), device.Attrs().HardwareAddr, inward},
	)
	return nil
}

func (b *Bed) makeIdle() error {
	program, err := newIdle()
	if err != nil {
		return err
	}
	b.wire.OnClose(program.Close)
	if b.idle, err = callable(program); err != nil {
		return err
	}
	b.wire.OnClose(b.idle.Close)
	return nil
}

// Peer is a container on another node, and the endpoint of this node with which it exchanges packets.
type Peer struct {
	endpoint    scaleEndpoint
	Plain, seen netip.Addr
}

// peerNodes is the number of nodes that peers are spread over.
const peerNodes = 1 << 16

// Peers returns n containers on other nodes, each with one of the given endpoints.
func (b *Bed) Peers(n int, with []scaleEndpoint, random *rand.Rand) ([]Peer, error) {
	all := make([]Peer, n)
	for i := range all {
		e := with[random.IntN(len(with))]
		// Spread the indexes of peers on one node.
		node := scalePlan().Node(uint64(2 + i%peerNodes))
		plain, seen, err := b.nextAddress(e.tenant, node, address.Index(i/peerNodes)<<16)
		if err != nil {
			return nil, err
		}
		all[i] = Peer{e, plain.Addr(), seen}
	}
	return all, nil
}

// frameBytes is the number of bytes that are stored of a frame, as one entry of the map of packets.
const frameBytes = 64

type Frame [frameBytes]byte

// Frame returns a packet between the peer and its endpoint as this hook sees it, on the given path.
func (h *Hook) Frame(p Peer, path uint32) (f Frame) {
	body := packet.Packet{
		Source:      p.endpoint.seen,
		Destination: p.seen,
		FlowLabel:   path,
		Body:        packet.UDP{SourcePort: 1000, DestinationPort: 2000},
	}
	if h.inward {
		body.Source, body.Destination = p.Plain, p.endpoint.Plain.Addr()
	}
	copy(f[:], body.Frame(h.mac, h.mac))
	return f
}

// Datagram returns a frame of size bytes from a port of the peer.
func (h *Hook) Datagram(p Peer, port uint16, size int) (f Frame) {
	body := packet.Packet{
		Source:      p.Plain,
		Destination: p.endpoint.Plain.Addr(),
		Body:        packet.UDP{SourcePort: port, DestinationPort: 2000, Payload: make([]byte, size-62)},
	}
	copy(f[:], body.Frame(h.mac, h.mac))
	return f
}

// HookNamed returns the hook with this name.
func (b *Bed) HookNamed(name string) *Hook {
	i := slices.IndexFunc(b.Hooks, func(h Hook) bool { return h.Name == name })
	return &b.Hooks[i]
}

// Noise returns a packet to an address that no container has.
func (h *Hook) Noise(from scaleEndpoint, random *rand.Rand) Frame {
	var to [16]byte
	binary.BigEndian.PutUint64(to[:], random.Uint64())
	binary.BigEndian.PutUint64(to[8:], random.Uint64())
	to[0] = scalePlan().Private.Addr().As16()[0] | to[0]&0x0f
	return h.Frame(Peer{endpoint: from, seen: netip.AddrFrom16(to)}, random.Uint32())
}
