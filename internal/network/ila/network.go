package ila

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/tenant"
)

// Config configures a Network.
type Config struct {
	ILA         address.ILA
	Locator     netip.Prefix // of this node
	Cluster     network.Cluster
	Tables      Tables
	MaxMappings int
	SourceStays bool // the source of a packet on the fabric is the address that containers see
	Pull        bool // subscribe to single mappings; Tables are then PullTables
}

// Network is network ila on one node.
type Network struct {
	config Config

	mu       sync.Mutex // held while tables are changed, so that changes come one after the other
	tenants  map[string]*hosted
	moves    *mobility.Moves
	leaving  map[string]*hosted // tenants without containers here, for which this node still forwards
	peers    int                // entries of the peers' table
	repaired bool               // Repair has run

	byVNID     map[address.TenantID]*hosted // the tenants
	keyed      map[netip.Addr]bool          // addresses of containers here with an address key
	pulls      PullTables                   // nil unless the node pulls
	subscribed *subscriptions
}

var (
	_ network.Network         = (*Network)(nil)
	_ network.MappingPuller   = (*Network)(nil)
	_ network.LocatorProvider = (*Network)(nil)
	_ network.AppProvider     = (*Network)(nil)
	_ network.FormProvider    = (*Network)(nil)
	_ network.Located         = (*Network)(nil)
	_ network.MoveReporter    = (*Network)(nil)
	_ network.Runner          = (*Network)(nil)
	_ io.Closer               = (*Network)(nil)
)

// New returns the network of a node. It changes nothing in the tables before Repair.
func New(c Config) *Network {
	c.MaxMappings = cmp.Or(c.MaxMappings, DefaultMaxMappings)
	n := &Network{
		config: c, tenants: map[string]*hosted{}, leaving: map[string]*hosted{},
		moves:  mobility.New(c.Cluster),
		byVNID: map[address.TenantID]*hosted{}, keyed: map[netip.Addr]bool{}, subscribed: newSubscriptions(),
	}
	if c.Pull {
		n.pulls, _ = c.Tables.(PullTables)
	}
	return n
}

// Close releases the tables' handles. Packets keep flowing.
func (n *Network) Close() error {
	if c, ok := n.config.Tables.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// gateway is the next hop inside a container, a static neighbour.
var gateway = netip.MustParseAddr("fe80::1")

// Prepare has the cluster allocate an address.
func (n *Network) Prepare(
	ctx context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	if app >= address.FirstReservedApp {
		return nil, fmt.Errorf("app %#x is reserved and never belongs to a container", app)
	}
	if r.AddressKey != "" {
		return n.prepareKeyed(ctx, app, r)
	}
	all, err := n.config.Cluster.Allocate(ctx, t.Name, mobility.KeyOf(r), app)
	if err != nil {
		return nil, err
	}
	r.Attachments = nil
	for _, a := range all {
		r.Attachments = append(r.Attachments, n.attachment(a))
	}
	if err := n.Validate(r); err != nil || len(all) != 1 {
		err = fmt.Errorf("the cluster gave tenant %s the addresses %v, of which none can be used: %w", t.Name, all, err)
		return nil, errors.Join(err, n.Release(ctx, r))
	}
	return r.Attachments, nil
}

func (n *Network) attachment(a netip.Addr) endpoint.Attachment {
	return endpoint.Attachment{
		Network: Name, Address: a, Gateway: gateway, Routes: []netip.Prefix{n.config.ILA.SIR},
		Locator: n.config.Locator,
	}
}

// Release returns the address to the cluster.
func (n *Network) Release(ctx context.Context, r endpoint.Record) error {
	return n.config.Cluster.Free(ctx, r.Tenant, mobility.KeyOf(r))
}

// Validate refuses attachments that Prepare cannot have made.
func (n *Network) Validate(r endpoint.Record) error {
	for _, a := range r.Attachments {
		id, ok := n.config.ILA.Split(a.Address)
		if !ok || id.Locator.IsValid() || id.VNID != r.TenantID || a.Plaintext.IsValid() || a.Subnet.IsValid() ||
			a.Gateway != gateway || a.Locator != n.config.Locator {
			return fmt.Errorf("attachment %+v is none of network %s for tenant id %d", a, Name, r.TenantID)
		}
	}
	return nil
}

// PutTenant adds a tenant.
func (n *Network) PutTenant(_ context.Context, t tenant.Tenant) error {
	if len(t.Overlays) != 1 {
		return fmt.Errorf("%w: tenant %s has %d ranges of addresses, not one", network.ErrConflict, t.Name,
			len(t.Overlays))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.tenants[t.Name]
	if h != nil && h.vnid == t.IDs[0].ID {
		return nil
	}
	if is := n.leaving[t.Name]; is != nil && is.vnid == t.IDs[0].ID {
		is.synced = false
		n.host(is)
		n.adoptPulled(is)
		delete(n.leaving, t.Name)
		return nil
	}
	if h != nil { // a tenant that was deleted had the name
		n.leave(h)
		if err := n.setPeers(h, nil, slices.Collect(maps.Keys(h.remote))); err != nil {
			return err
		}
	}
	n.host(newHosted(t))
	return nil
}

func (n *Network) host(h *hosted) { n.tenants[h.name], n.byVNID[h.vnid] = h, h }

// leave ends the tenant's subscriptions.
func (n *Network) leave(h *hosted) {
	n.forgetPulled(h)
	if n.byVNID[h.vnid] == h {
		delete(n.byVNID, h.vnid)
	}
}

// DeleteTenant removes the tenant and its mappings, if t has the id that is its VNID.
func (n *Network) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[t.Name]
	if !ok || !slices.ContainsFunc(t.IDs, func(id tenant.ID) bool { return id.ID == h.vnid }) {
		return nil
	}
	if time.Now().Before(h.until) && n.leaving[t.Name] == nil {
		n.leaving[t.Name] = h
	} else if err := n.setPeers(h, nil, slices.Collect(maps.Keys(h.remote))); err != nil {
		return err
	}
	n.leave(h)
	delete(n.tenants, t.Name)
	return nil
}

func (n *Network) hosted(r endpoint.Record) (*hosted, error) {
	if h, ok := n.tenants[r.Tenant]; ok {
		return h, nil
	}
	return nil, fmt.Errorf("endpoint %d: tenant %s is not known to network %s", r.ID, r.Tenant, Name)
}

// Activate writes the endpoint's entry. If its app is no longer the one in the cluster's mapping, it changes that too.
func (n *Network) Activate(ctx context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		if err := n.publish(ctx, r, a); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
		if err := n.setLocal(r, a.Address, localOf(r)); err != nil {
			return err
		}
		if err := n.moveHere(ctx, r, a); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	return nil
}

// publish changes the app in the cluster's mapping. Prepare and the registration of the node have published the first
// one.
func (n *Network) publish(ctx context.Context, r endpoint.Record, at endpoint.Attachment) error {
	a := at.Address
	n.mu.Lock()
	h, err := n.hosted(r)
	var known address.AppID
	if err == nil {
		known = cmp.Or(h.apps[a], r.App)
	}
	n.mu.Unlock()
	if err != nil || known == appOf(r) {
		return err
	}
	if r.AddressKey != "" {
		_, err = n.moves.Allocate(ctx, r, appOf(r), at.Sequence)
	} else {
		_, err = n.config.Cluster.Allocate(ctx, r.Tenant, mobility.KeyOf(r), appOf(r))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	h.apps[a] = appOf(r)
	if err != nil {
		h.apps[a] = unknownApp
	}
	return err
}

// unknownApp stands for the app in the cluster's mapping after a request that failed: the cluster can have applied it,
// so the next Activate sends one again, whatever the endpoint's app is.
const unknownApp = address.FirstReservedApp

// setLocal writes the entry of an endpoint, or removes it with a zero entry.
func (n *Network) setLocal(r endpoint.Record, a netip.Addr, is Local) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, err := n.hosted(r)
	if err != nil {
		return err
	}
	delete(h.here, a)
	var entry *Local
	if is != (Local{}) {
		h.here[a], entry = is, &is
		n.subscribeOwn(h, r, a)
	} else {
		delete(h.apps, a)
		n.moves.Leave(r, a)
		n.leaveOwn(h, a)
	}
	if !n.repaired {
		return nil
	}
	if err := n.config.Tables.SetLocal(a, entry); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	return nil
}

// Deactivate removes the endpoint's entry, unless another endpoint has its address by now.
func (n *Network) Deactivate(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		n.mu.Lock()
		h, known := n.tenants[r.Tenant]
		own := known && h.here[a.Address].Endpoint == uint32(r.ID)
		n.mu.Unlock()
		if !own {
			continue
		}
		if err := n.setLocal(r, a.Address, Local{}); err != nil {
			return err
		}
	}
	return nil
}

// Check compares the endpoint's entry with the table.
func (n *Network) Check(_ context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.hosted(r); err != nil {
		return err
	}
	all, err := n.config.Tables.Locals()
	if err != nil {
		return err
	}
	for _, a := range r.Attachments {
		is, there := all[a.Address]
		if is.Former = (netip.Prefix{}); !there || is != localOf(r) {
			return fmt.Errorf("endpoint %d: the entry of %v is %+v (there: %v)", r.ID, a.Address, is, there)
		}
	}
	return nil
}

// Repair makes the tables hold exactly the endpoints in found, and the mappings of the tenants that were put. Until the
// cluster has sent the mappings of a tenant, it keeps those in the table.
func (n *Network) Repair(_ context.Context, _, found []endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.repairLocals(found); err != nil {
		return err
	}
	if err := n.repairPeers(); err != nil {
		return err
	}
	for _, h := range n.tenants {
		n.adoptPulled(h)
	}
	n.repaired = true
	return nil
}

func (n *Network) repairLocals(found []endpoint.Record) error {
	there, err := n.config.Tables.Locals()
	if err != nil {
		return err
	}
	for _, r := range found {
		h, err := n.hosted(r)
		if err != nil {
			return err
		}
		for _, a := range r.Attachments {
			h.here[a.Address], h.apps[a.Address] = localOf(r), appOf(r)
			n.subscribeOwn(h, r, a.Address)
		}
	}
	for _, h := range n.tenants {
		for a, l := range h.here {
			is, known := there[a]
			delete(there, a)
			if is.Former = l.Former; known && is == l {
				continue
			}
			if err := n.config.Tables.SetLocal(a, &l); err != nil {
				return err
			}
		}
	}
	for a := range there {
		if err := n.config.Tables.SetLocal(a, nil); err != nil {
			return err
		}
	}
	return nil
}

// Locator returns this node's locator.
func (n *Network) Locator() netip.Prefix { return n.config.Locator }

// OnFabric returns the address to which other nodes send.
func (n *Network) OnFabric(a endpoint.Attachment) netip.Addr {
	return n.config.ILA.ToWire(a.Address, a.Locator)
}

// Form names the flags that all nodes must have alike.
func (n *Network) Form() string {
	source, cbit := "locator", "on"
	if n.config.SourceStays {
		source = "sir"
	}
	if n.config.ILA.NoCBit {
		cbit = "off"
	}
	return "--ila-source " + source + " --ila-cbit " + cbit
}

// Entries counts the entries of the tables in the kernel.
func (n *Network) Entries(context.Context) ([]network.Entries, error) {
	locals, err := n.config.Tables.Locals()
	if err != nil {
		return nil, err
	}
	peers, err := n.config.Tables.Peers()
	if err != nil {
		return nil, err
	}
	roomHere, _ := n.config.Tables.Capacity()
	return []network.Entries{
		{Table: Name + "-locals", Used: len(locals), Capacity: roomHere},
		{Table: Name + "-mappings", Used: len(peers), Capacity: n.config.MaxMappings},
	}, nil
}
