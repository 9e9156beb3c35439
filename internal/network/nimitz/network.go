package nimitz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// DefaultMaxMappings is the default limit of forwarding entries on a node: enough for all containers of its tenants, on
// whatever node, where nodes have no subnets.
const DefaultMaxMappings = 65536

// Config configures a Network.
type Config struct {
	Name        string // of the network; empty means Name
	Underlay    Underlay
	Plan        address.Plan
	Node        netip.Prefix // this node's /64
	Indexes     network.Indexes
	Cluster     network.Cluster
	Switch      Switch
	Kind        string  // of the switch, as in the agent's flag
	Gateway     Gateway // nil for none
	NoGateway   error   // why there is none
	Edge        bool    // this node is an Edge Switch
	MaxMappings int     // limit of forwarding entries
	SharesLoad  bool    // the switch can take part in offloads
	Relays      bool    // the switch can forward to a container that has moved to another node
}

// Network is NIMITZ on one node.
type Network struct {
	config Config

	mu        sync.Mutex // held while the switch is changed, so that changes come one after the other
	tenants   map[string]*hosted
	leaving   map[pipeline.VNI]*hosted // tenants without containers here, to which this node still forwards
	moves     *mobility.Moves
	sealed    map[string]bool           // tenants whose policies this node cannot enforce
	region    *hosted                   // entries that belong to no tenant
	published map[netip.Addr]netip.Addr // the last call of Gateway.Publish; nil before the first
	used      map[netip.Addr]bool       // virtual addresses in use
	forwards  int                       // forwarding entries that the switch has
	repaired  bool                      // Repair has run, so forwards is known
}

var (
	_ network.Network      = (*Network)(nil)
	_ network.MappingSink  = (*Network)(nil)
	_ network.DropCounter  = (*Network)(nil)
	_ network.SwitchInfo   = (*Network)(nil)
	_ network.PolicyGuard  = (*Network)(nil)
	_ network.MoveReporter = (*Network)(nil)
	_ network.Runner       = (*Network)(nil)
	_ io.Closer            = (*Network)(nil)
)

// New returns the network of a node. It changes nothing in the switch before Repair.
func New(c Config) *Network {
	c.MaxMappings, c.Name = cmp.Or(c.MaxMappings, DefaultMaxMappings), cmp.Or(c.Name, Name)
	if c.Underlay == nil {
		c.Underlay = region{c.Plan, c.Node}
	}
	return &Network{
		config: c, tenants: map[string]*hosted{}, leaving: map[pipeline.VNI]*hosted{}, moves: mobility.New(c.Cluster),
		sealed: map[string]bool{}, region: newHosted(),
	}
}

// Close closes gateway and switch; their devices, rules and entries stay.
func (n *Network) Close() error {
	var errs []error
	for _, held := range []any{n.config.Gateway, n.config.Switch} {
		if c, ok := held.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// gateways is each family's next hop inside a container, a static neighbour.
var gateways = map[bool]netip.Addr{true: netip.MustParseAddr("169.254.1.1"), false: netip.MustParseAddr("fe80::1")}

// Prepare allocates an address of each overlay. If the tenant has node CIDRs, the addresses come from this node's
// subnets, which takes no message once these are known. Otherwise they come from the cluster.
func (n *Network) Prepare(
	ctx context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) (all []endpoint.Attachment, err error) {
	if app >= address.FirstReservedApp {
		return nil, fmt.Errorf("app %#x is reserved and never belongs to a container", app)
	}
	if err := n.room(len(t.Overlays)); err != nil {
		return nil, err
	}
	if r.AddressKey != "" {
		return n.prepareKeyed(ctx, t, r)
	}
	if len(t.Overlays) > 0 && t.Overlays[0].NodeBits != 0 {
		all, err = n.allocateFromSubnets(ctx, t, r)
	} else {
		all, err = n.allocate(ctx, t, r)
	}
	if err == nil && len(all) != len(t.Overlays) {
		err = fmt.Errorf(
			"the cluster gave %d ranges or addresses for %d CIDRs of tenant %s",
			len(all),
			len(t.Overlays),
			t.Name,
		)
	}
	for i, a := range all {
		if err == nil && !t.Overlays[i].CIDR.Contains(a.Address) {
			err = fmt.Errorf(
				"the cluster gave tenant %s address %v, which is not in %v",
				t.Name,
				a.Address,
				t.Overlays[i].CIDR,
			)
		}
	}
	if err != nil {
		r.Attachments = all
		return nil, errors.Join(err, n.Release(ctx, r))
	}
	return all, nil
}

// allocateFromSubnets returns what it has allocated, also together with an error.
func (n *Network) allocateFromSubnets(ctx context.Context, t tenant.Tenant,
	r endpoint.Record) (all []endpoint.Attachment,
	err error) {
	subnets, err := n.config.Cluster.NodeCIDRs(ctx, t.Name)
	if err != nil {
		return nil, err
	}
	for _, subnet := range subnets {
		i, err := n.config.Indexes.AllocateIndex(
			endpoint.CursorKey{Tenant: r.TenantID, Subnet: subnet},
			func(from address.Index) (address.Index, error) {
				return usable(subnet, from)
			},
		)
		if err != nil {
			hint := ""
			if errors.Is(err, endpoint.ErrExhausted) {
				hint = "\n  nothing was changed; use another node, or remove containers"
			}
			return all, fmt.Errorf("tenant %s subnet %v: %w%s", t.Name, subnet, err, hint)
		}
		addr, _ := endpoint.AddressIn(subnet, i)
		all = append(all, n.attachment(addr, subnet))
	}
	return all, nil
}

func (n *Network) allocate(
	ctx context.Context,
	t tenant.Tenant,
	r endpoint.Record,
) (all []endpoint.Attachment, err error) {
	addrs, err := n.config.Cluster.Allocate(ctx, t.Name, mobility.KeyOf(r), 0)
	for _, addr := range addrs {
		all = append(all, n.attachment(addr, netip.Prefix{}))
	}
	return all, err
}

func (n *Network) attachment(addr netip.Addr, subnet netip.Prefix) endpoint.Attachment {
	all := netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	if addr.Is4() {
		all = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return endpoint.Attachment{
		Network: n.config.Name, Address: addr, Gateway: gateways[addr.Is4()], Routes: []netip.Prefix{all},
		Subnet: subnet, Overhead: pipeline.Overhead,
	}
}

// usable returns the first index from the given one on that a container may have: neither the subnet's own address nor,
// in IPv4, its last.
func usable(subnet netip.Prefix, from address.Index) (address.Index, error) {
	from = max(from, 1)
	addr, ok := endpoint.AddressIn(subnet, from)
	if !ok || from > address.MaxIndex || addr.Is4() && !subnet.Contains(addr.Next()) {
		return 0, address.ErrExhausted
	}
	return from, nil
}

// Release puts addresses of this node's subnets into quarantine, and frees addresses that the cluster allocated.
func (n *Network) Release(ctx context.Context, r endpoint.Record) error {
	var errs []error
	given := false
	for _, a := range r.Attachments {
		if key, i, drawn := r.AllocatedIndex(a); drawn {
			errs = append(errs, n.config.Indexes.ReleaseIndex(key, i))
		} else {
			given = true
		}
	}
	if given {
		errs = append(errs, n.config.Cluster.Free(ctx, r.Tenant, mobility.KeyOf(r)))
	}
	return errors.Join(errs...)
}

// Validate refuses attachments that Prepare cannot have made.
func (n *Network) Validate(r endpoint.Record) error {
	if vni := pipeline.VNI(r.TenantID); vni == pipeline.GatewayVNI {
		return fmt.Errorf("tenant id %d is the gateway's", vni)
	}
	for _, a := range r.Attachments {
		_, i, drawn := r.AllocatedIndex(a)
		if a.Plaintext.IsValid() || a.Gateway != gateways[a.Address.Is4()] || drawn && i == 0 {
			return fmt.Errorf("attachment %+v is none of network %s", a, n.config.Name)
		}
	}
	return nil
}

// Pipeline returns the entries of this node's switch, read from it.
func (n *Network) Pipeline(ctx context.Context) ([]pipeline.Entry, error) {
	return n.config.Switch.Entries(ctx)
}

// Activate makes the device a port and installs the endpoint's entries. Then the endpoint's address moves here, if it
// is on another node.
func (n *Network) Activate(ctx context.Context, r endpoint.Record) error {
	if err := n.install(ctx, r); err != nil {
		return err
	}
	return n.moveHere(ctx, r)
}

func (n *Network) install(ctx context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[r.Tenant]
	if !ok {
		return fmt.Errorf("endpoint %d: tenant %s is not known to network %s", r.ID, r.Tenant, n.config.Name)
	}
	if err := n.config.Switch.Plug(ctx, pipeline.Port(r.ID), deviceOf(r)); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	h.add(r)
	return n.update(ctx, h, h.matches(r))
}

func deviceOf(r endpoint.Record) pipeline.Device {
	return pipeline.Device{Name: r.Device.HostName, Netns: r.Netns, Inside: r.Interface}
}

// Deactivate removes the endpoint's entries, then the port.
func (n *Network) Deactivate(ctx context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if h, ok := n.tenants[r.Tenant]; ok {
		matches := h.matches(r)
		h.remove(r)
		n.noteLeft(h, r)
		if err := n.update(ctx, h, matches); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	if err := n.config.Switch.Unplug(ctx, pipeline.Port(r.ID)); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	return nil
}

// Check compares the endpoint's entries with the switch's.
func (n *Network) Check(ctx context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[r.Tenant]
	if !ok {
		return fmt.Errorf("endpoint %d: tenant %s is not known to network %s", r.ID, r.Tenant, n.config.Name)
	}
	var wanted []pipeline.Entry
	for _, match := range append(h.matches(r), h.translations(r)...) {
		want := h.wanted(match)
		if want == nil && h.sealed {
			continue
		}
		if want == nil {
			return fmt.Errorf("endpoint %d: network %s has no entry for %v", r.ID, n.config.Name, match)
		}
		wanted = append(wanted, want)
	}
	if err := n.config.Switch.Check(ctx, pipeline.Port(r.ID), deviceOf(r), wanted); err != nil {
		return fmt.Errorf("endpoint %d: %w", r.ID, err)
	}
	return nil
}

// Drops counts drops of the switch and the gateway that the driver does not count. Together with an error it returns
// the counters that it could read.
func (n *Network) Drops(ctx context.Context) (map[dropreason.Reason]uint64, error) {
	all := map[dropreason.Reason]uint64{}
	var errs []error
	for _, of := range []any{n.config.Switch, n.config.Gateway} {
		if d, ok := of.(network.DropCounter); ok {
			dropped, err := d.Drops(ctx)
			for why, packets := range dropped {
				all[why] += packets
			}
			errs = append(errs, err)
		}
	}
	return all, errors.Join(errs...)
}

// Switch returns the kind of the switch.
func (n *Network) Switch() string { return n.config.Kind }

// PolicyError returns the switch's PolicyError.
func (n *Network) PolicyError() error {
	if s, ok := n.config.Switch.(PolicyGuard); ok {
		return s.PolicyError()
	}
	return nil
}

// Seal removes the entries by which a tenant's containers here may send, and drops packets to them.
func (n *Network) Seal(ctx context.Context, name string, sealed bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sealed[name] = true; !sealed {
		delete(n.sealed, name)
	}
	h, ok := n.tenants[name]
	if !ok {
		return nil
	}
	h.sealed = sealed
	return n.change(ctx, h, h.allMatches())
}

// Lacks returns the switch's missing features.
func (n *Network) Lacks() []string {
	if s, ok := n.config.Switch.(Lacking); ok {
		return s.Lacks()
	}
	return nil
}

// Entries counts the entries of each stage of the switch.
func (n *Network) Entries(ctx context.Context) ([]network.Entries, error) {
	there, err := n.config.Switch.Entries(ctx)
	if err != nil {
		return nil, err
	}
	counts := pipeline.Count(there)
	var all []network.Entries
	for _, s := range pipeline.Stages {
		e := network.Entries{Table: n.config.Name + "-" + s.String(), Used: counts[s]}
		if s == pipeline.Forwarding {
			e.Capacity = n.config.MaxMappings
		}
		all = append(all, e)
	}
	return all, nil
}
