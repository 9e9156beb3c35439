package sharing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// The nodes of a bed. The clients are on the sender, the server is on the backend.
const (
	sender = iota
	backend
	frontend
	nodes
)

var nodeNames = [nodes]string{"sender", "backend", "frontend"}

const (
	tenantName = "bench"
	vni        = 7
	offloadID  = 77
	epoch      = 1
	mtu        = 9000
	serverPort = 80
)

// bed is three nodes on a bridge, each with a data path of its own, whose entries are as agents make them.
type bed struct {
	wire    *scenario.Wire
	nodes   [nodes]*node
	clients []netip.Addr // addresses of the client's container
	server  netip.Addr
	ends    [nodes]*netns.Namespace // containers; the frontend has none
}

type node struct {
	ns       *netns.Namespace
	prefix   netip.Prefix
	underlay netip.Addr
	path     *datapath.Datapath
	sw       *datapath.Nimitz
}

// subnetOf returns the tenant's subnet of a node.
func subnetOf(node int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fd10:0:0:%d::/64", node+1))
}

// newBed creates a bed with a number of clients, and room for a number of rules.
func newBed(ctx context.Context, dir string, clients, rules int, random *rand.Rand) (_ *bed, err error) {
	b := &bed{wire: &scenario.Wire{Dir: dir}}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	hub, err := b.wire.Namespace("hub")
	if err != nil {
		return nil, err
	}
	if err := b.connect(hub); err != nil {
		return nil, fmt.Errorf("connect three nodes: %w", err)
	}
	for i, n := range b.nodes {
		if err := n.open(ctx, b.wire, nodeNames[i], clients+1, rules); err != nil {
			return nil, fmt.Errorf("node %s: %w", nodeNames[i], err)
		}
		entries := []pipeline.Entry{pipeline.Peer{Nodes: address.DefaultPlan().Base}}
		for j, peer := range b.nodes {
			if i != j {
				entries = append(entries, pipeline.Forward{
					VNI: vni, To: subnetOf(j), Port: pipeline.VXLAN, VTEP: pipeline.VTEP(peer.prefix),
				})
			}
		}
		if err := n.sw.Apply(ctx, nil, entries); err != nil {
			return nil, err
		}
	}
	for range clients {
		b.clients = append(b.clients, randomIn(subnetOf(sender), random))
	}
	b.server = randomIn(subnetOf(backend), random)
	if err := b.add(ctx, sender, clientApp, b.clients); err != nil {
		return nil, fmt.Errorf("add the client: %w", err)
	}
	if err := b.add(ctx, backend, serverApp, []netip.Addr{b.server}); err != nil {
		return nil, fmt.Errorf("add the server: %w", err)
	}
	return b, nil
}

func (b *bed) Close() error { return b.wire.Close() }

// connect creates the nodes' namespaces, and a bridge between them.
func (b *bed) connect(hub *netns.Namespace) error {
	h, err := hub.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "hub", mtu
	if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return err
	}
	bridge, err := h.LinkByName("hub")
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(bridge); err != nil {
		return err
	}
	for i := range b.nodes {
		n := &node{
			prefix:   address.DefaultPlan().Node(uint64(i + 1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
		}
		b.nodes[i] = n
		if n.ns, err = b.wire.Namespace(nodeNames[i]); err != nil {
			return err
		}
		name := fmt.Sprint("port", i)
		if err := b.wire.Link(hub, name, n.ns, "eth0"); err != nil {
			return err
		}
		port, err := h.LinkByName(name)
		if err != nil {
			return err
		}
		if err := errors.Join(h.LinkSetMTU(port, mtu), h.LinkSetMaster(port, bridge), h.LinkSetUp(port)); err != nil {
			return err
		}
	}
	for _, n := range b.nodes {
		err := scenario.OnDevice(n.ns, "eth0", func(h *netlink.Handle, eth0 netlink.Link) error {
			own := &netlink.Addr{IPNet: scenario.IPNet(netip.PrefixFrom(n.underlay, 64)), Flags: unix.IFA_F_NODAD}
			err := errors.Join(h.LinkSetMTU(eth0, mtu), h.AddrAdd(eth0, own), h.LinkSetUp(eth0))
			for _, peer := range b.nodes {
				if peer != n {
					err = errors.Join(err, h.RouteAdd(&netlink.Route{
						Dst: scenario.IPNet(peer.prefix), Gw: peer.underlay.AsSlice(),
					}))
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// open loads the node's data path.
func (n *node) open(ctx context.Context, w *scenario.Wire, name string, endpoints, rules int) error {
	if err := n.ns.WaitUp(ctx, "eth0"); err != nil {
		return err
	}
	pins := filepath.Join(w.Dir, name+"-bpf")
	err := n.ns.Do(func() (err error) {
		n.path, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: n.prefix, Plan: address.DefaultPlan(), BPFFS: pins,
			MaxEndpoints: endpoints, MaxRules: rules, MTUReserve: tenant.OffloadOverhead, Device: endpoint.Veth,
			Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	w.OnClose(func() error { return scenario.Unmount(pins) })
	if err != nil {
		return err
	}
	w.OnClose(n.path.Close)
	if err := scenario.StartDatapath(n.path); err != nil {
		return err
	}
	n.sw, err = n.path.Nimitz()
	return err
}

// add adds a container with addresses to a node. Its stack accepts all addresses of the subnet.
func (b *bed) add(ctx context.Context, on int, app uint16, addresses []netip.Addr) error {
	const port = pipeline.Port(1)
	n := b.nodes[on]
	c, err := b.wire.Namespace(nodeNames[on] + "-container")
	if err != nil {
		return err
	}
	b.ends[on] = c
	r := endpoint.Record{
		ID: endpoint.ID(port), State: endpoint.Active, Interface: "eth0", Netns: c.Path(), Tenant: tenantName,
		TenantID: vni, App: address.AppID(app),
		Attachments: []endpoint.Attachment{{
			Network: tenant.Nimitz, Address: addresses[0], Gateway: netip.MustParseAddr("fe80::1"),
			Routes: []netip.Prefix{netip.MustParsePrefix("::/0")}, Overhead: pipeline.Overhead,
		}},
	}
	if r.Device, err = n.path.CreateDevice(ctx, r); err != nil {
		return err
	}
	entries := []pipeline.Entry{pipeline.Forward{
		VNI: vni, To: subnetOf(on), Port: port, MAC: pipeline.NewMAC(r.Device.ContainerMAC),
	}}
	for _, a := range addresses {
		entries = append(entries, pipeline.Sender{Port: port, Address: a, VNI: vni, Identity: app})
	}
	return errors.Join(
		n.path.Attach(r),
		n.sw.Plug(ctx, port, pipeline.Device{Name: r.Device.HostName}),
		n.sw.Apply(ctx, nil, entries),
		scenario.OnDevice(c, "lo", func(h *netlink.Handle, lo netlink.Link) error {
			return errors.Join(h.LinkSetUp(lo), h.RouteAdd(&netlink.Route{
				Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, LinkIndex: lo.Attrs().Index,
				Dst: scenario.IPNet(subnetOf(on)),
			}))
		}),
	)
}

// setRules gives the tables to all nodes.
func (b *bed) setRules(t policy.Tables) error {
	for i, n := range b.nodes {
		err := n.path.SetPolicies(dpapi.TenantPolicies{
			Tenant: tenantName, IDs: []address.TenantID{vni}, Tables: t,
		})
		if err != nil {
			return fmt.Errorf("node %s: %w", nodeNames[i], err)
		}
	}
	return nil
}

// split makes all nodes use the frontend for the server, or no longer. The backend keeps its rules, which it does not
// look up meanwhile, so that both ways can be measured in turn.
func (b *bed) split(ctx context.Context, on bool) error {
	offload := pipeline.Offload{ID: offloadID, VNI: vni, Backend: b.nodes[backend].prefix, Epoch: epoch}
	offload.To[0] = b.nodes[frontend].prefix
	offload.From[0] = offload.To[0]
	for i, n := range b.nodes {
		forward := pipeline.Forward{
			VNI: vni, To: subnetOf(backend), Port: pipeline.VXLAN, VTEP: pipeline.VTEP(offload.Backend),
		}
		e := offload
		e.Fronts = i == frontend
		entries := []pipeline.Entry{e}
		switch i {
		case backend:
			entries = append(entries, pipeline.Backend{VNI: vni, Offload: offloadID, Asks: true})
		case frontend:
			entries = append(entries, pipeline.Fronted{
				VNI: vni, Address: b.server, Offload: offloadID, App: serverApp,
			})
		}
		var err error
		if on {
			if i != backend {
				forward.Offload = offloadID
				entries = append(entries, forward)
			}
			err = n.sw.Apply(ctx, nil, entries)
		} else {
			var plain []pipeline.Entry
			if i != backend {
				plain = append(plain, forward)
			}
			err = n.sw.Apply(ctx, entries, plain)
		}
		if err != nil {
			return fmt.Errorf("node %s: %w", nodeNames[i], err)
		}
	}
	return nil
}

// sent returns how many messages of a kind the node has sent.
func (n *node) sent(kind uint32) (sum uint64, err error) {
	each, err := n.path.Messages()
	for _, of := range each {
		sum += of[kind]
	}
	return sum, err
}

// uplink returns index and MAC of a node's device to the others.
func (b *bed) uplink(node int) (ifindex uint32, mac []byte, err error) {
	err = scenario.OnDevice(b.nodes[node].ns, "eth0", func(_ *netlink.Handle, eth0 netlink.Link) error {
		ifindex, mac = uint32(eth0.Attrs().Index), eth0.Attrs().HardwareAddr
		return nil
	})
	return ifindex, mac, err
}
