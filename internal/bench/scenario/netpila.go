package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// Variant describes how a scenario differs from the usual one on our datapath.
type Variant struct {
	identifiers bool   // nodes reserve the prefix of identifiers
	device      string // device kind; "" means veth
	clear       bool   // the tenant has clear addresses
	noCache     bool
	local       bool         // both containers on one node
	direct      bool         // the tunnel of network nimitz
	pool        netip.Prefix // of the nodes' IPv4 tunnel addresses
	cgroup      string       // whose sockets get a backend when they connect to a service
	rules       int          // rules of a policy whose last one admits the client; 0: the tenant has no policies
	// Endpoints and Mappings are table sizes; 0 means enough for a pair.
	Endpoints, Mappings int
}

// netpila attaches containers to their nodes with the driver that an agent uses. No agent runs, because it is not on
// the packet path and would use time of the measured CPU.
func netpila(v Variant) func(*Wire) (Pair, error) {
	return func(w *Wire) (Pair, error) {
		blue := blue()
		if v.clear {
			blue.Addressing = tenant.Clear
		}
		pair, paths, last, err := w.pairOf(blue, v)
		if err != nil {
			return Pair{}, err
		}
		if v.rules > 0 {
			client, server := last[0].Plaintext, last[1].Plaintext
			p := RulePolicy(RuleBlocks(v.rules, netip.PrefixFrom(client, 64).Masked()))
			apps := map[address.AppID]map[string]string{1: {}}
			for _, d := range paths { // also on the client's node, which has the sessions of the client's connections
				if err := ApplyPolicy(d, blue.Current().ID, p, apps, server, client); err != nil {
					return Pair{}, err
				}
			}
		}
		return pair, nil
	}
}

// pairOf starts the datapath on the nodes, adds a container of a tenant to each, and pairs them.
func (w *Wire) pairOf(t tenant.Tenant, v Variant) (p Pair, paths []*datapath.Datapath, last [2]endpoint.Attachment,
	err error) {
	nodes := w.Nodes[:]
	if v.local {
		nodes = []*Node{w.Nodes[0], w.Nodes[0]}
	}
	var ends [2]*netns.Namespace
	for i, n := range nodes {
		if len(paths) == 0 || !v.local {
			d, err := n.startFor(t, v)
			if err != nil {
				return p, nil, last, err
			}
			paths = append(paths, d)
		}
		if ends[i], last[i], err = n.addContainer(paths[len(paths)-1], t, endpoint.ID(i+1)); err != nil {
			return p, nil, last, err
		}
	}
	return Pair{Client: ends[0], Server: ends[1], Target: last[1].Address}.on(paths), paths, last, nil
}

// blue is the tenant of the containers on our datapath.
func blue() tenant.Tenant {
	return tenant.Tenant{
		Name: "blue", Network: tenant.Netpila, Addressing: tenant.Encrypted,
		IDs: []tenant.ID{{ID: 1, Key: address.Key{'b', 'l', 'u', 'e'}}},
	}
}

// startFor starts the datapath of a node without endpoints, which knows a tenant.
func (n *Node) startFor(t tenant.Tenant, v Variant) (*datapath.Datapath, error) {
	d, err := n.OpenDatapath(v)
	if err == nil {
		err = StartDatapath(d)
	}
	if err != nil {
		return nil, err
	}
	return d, d.Netpila().PutTenant(context.Background(), t)
}

// on adds cache and programs of the nodes' datapaths.
func (p Pair) on(paths []*datapath.Datapath) Pair {
	p.Fresh = func() (err error) { // invalidates the cache, as any change of a table does
		for _, d := range paths {
			err = errors.Join(err, d.InvalidateFlows())
		}
		return err
	}
	p.Runs = func() (datapath.ProgStats, error) { return sumProgramStats(paths) }
	return p
}

// addContainer adds a container with this endpoint number.
func (n *Node) addContainer(
	d *datapath.Datapath,
	t tenant.Tenant,
	id endpoint.ID,
) (_ *netns.Namespace, a endpoint.Attachment, err error) {
	plan := address.DefaultPlan()
	plain := address.Plain{Node: n.Prefix, Tenant: t.Current().ID, App: 1, Index: address.Index(id) << 16}
	routed := plan.Base
	if t.Addressing == tenant.Encrypted {
		routed = plan.Private
		plain, a.Address, err = address.NewCipher(t.Current().Key).Draw(plan.Private, plain)
	} else {
		a.Address = plain.Addr()
	}
	if err != nil {
		return nil, a, err
	}
	c, err := n.Wire.Namespace(fmt.Sprint(n.name, "-container", id))
	if err != nil {
		return nil, a, err
	}
	a.Network, a.Plaintext, a.Gateway, a.Routes = t.Network, plain.Addr(), netip.MustParseAddr(
		"fe80::1",
	), []netip.Prefix{
		routed,
	}
	if t.ServicesNumber != 0 {
		services, err := plan.TenantServices(t.ServicesNumber)
		if err != nil {
			return nil, a, err
		}
		a.Routes = append(a.Routes, services)
	}
	if t.NeedsEgressAddress() {
		a.Egress = tenant.EgressAddress(n.Prefix, tenant.FirstEgressIndex+address.Index(id))
	}
	if t.NeedsDefaultRoute() {
		a.Routes = append(a.Routes, endpoint.DefaultRoute)
	}
	record := endpoint.Record{
		ID: id, Interface: "eth0", Netns: c.Path(), Tenant: t.Name, TenantID: plain.Tenant, App: plain.App,
		Attachments: []endpoint.Attachment{a},
	}
	if record.Device, err = d.CreateDevice(context.Background(), record); err != nil {
		return nil, a, err
	}
	return c, a, Activate(d, record)
}

func (n *Node) OpenDatapath(v Variant) (d *datapath.Datapath, err error) {
	pins := filepath.Join(n.Wire.Dir, n.name+"-bpf")
	plan := address.DefaultPlan()
	plan.Identifiers = v.identifiers
	err = n.NS.Do(func() error {
		d, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: n.Prefix, Plan: plan, BPFFS: pins,
			MaxEndpoints: cmp.Or(v.Endpoints, 16),
			Device:       v.device, NoCache: v.noCache, DirectTunnel: v.direct, MaxMappings: v.Mappings, VTEP4: v.pool,
			CgroupRoot: v.cgroup,
			Log:        slog.New(slog.DiscardHandler),
		})
		return err
	})
	n.Wire.OnClose(func() error { return Unmount(pins) })
	if err != nil {
		return nil, err
	}
	n.Wire.OnClose(d.Close)
	return d, nil
}

// StartDatapath attaches programs to the hooks of a node without endpoints. others are networks besides netpila.
func StartDatapath(d *datapath.Datapath, others ...network.Dataplane) error {
	_, err := d.Restore(context.Background(), nil, func(found []endpoint.Record) error {
		err := d.Netpila().Repair(context.Background(), nil, found)
		for _, other := range others {
			err = errors.Join(err, other.Repair(context.Background(), nil, found))
		}
		return err
	})
	return err
}

func Activate(d *datapath.Datapath, r endpoint.Record) error {
	if err := d.Attach(r); err != nil {
		return err
	}
	return d.Netpila().Activate(context.Background(), r)
}

// Unmount unmounts a bpffs, which removes the last references to the pinned objects.
func Unmount(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
