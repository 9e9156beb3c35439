package nimitz

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

var plan = address.DefaultPlan()

// tableSwitch is a switch that runs the pipeline itself. It rejects requests that a network with a correct view of the
// switch would not send.
type tableSwitch struct {
	has     map[any]pipeline.Entry // by match
	ports   map[pipeline.Port]string
	fail    error
	applied int
	region  netip.Prefix
	mtu     int
}

func (s *tableSwitch) Plug(_ context.Context, p pipeline.Port, device pipeline.Device) error {
	s.ports[p] = device.Name
	return s.fail
}

func (s *tableSwitch) Unplug(_ context.Context, p pipeline.Port) error {
	if s.forwards(p) > 0 {
		return fmt.Errorf("entries still lead to %v", p)
	}
	delete(s.ports, p)
	return s.fail
}

func (s *tableSwitch) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	if s.fail != nil {
		return s.fail
	}
	for _, e := range remove {
		if s.has[e.Match()] != e {
			return fmt.Errorf("entry %v does not exist", e)
		}
		delete(s.has, e.Match())
	}
	for _, e := range add {
		if s.has[e.Match()] != nil {
			return fmt.Errorf("entry %v exists", s.has[e.Match()])
		}
		if f, ok := e.(pipeline.Forward); ok && f.Port != 0 && f.Port != pipeline.VXLAN && s.ports[f.Port] == "" {
			return fmt.Errorf("%v leads to a port without a device", e)
		}
		s.has[e.Match()] = e
	}
	s.applied += len(remove) + len(add)
	return nil
}

func (s *tableSwitch) Check(
	_ context.Context,
	p pipeline.Port,
	device pipeline.Device,
	entries []pipeline.Entry,
) error {
	if name, plugged := s.ports[p]; !plugged || name != device.Name {
		return fmt.Errorf("%s is not %v", device.Name, p)
	}
	for _, e := range entries {
		if s.has[e.Match()] != e {
			return fmt.Errorf("port %v does not exist", e)
		}
	}
	return s.fail
}

func (s *tableSwitch) SetMTU(mtu int) error {
	s.mtu = mtu
	return s.fail
}

func (s *tableSwitch) Entries(context.Context) ([]pipeline.Entry, error) {
	return s.table().Entries, s.fail
}

func (s *tableSwitch) table() pipeline.Table {
	return pipeline.Table{Region: s.region, Entries: slices.Collect(maps.Values(s.has))}
}

func (s *tableSwitch) put(entries ...pipeline.Entry) {
	for _, e := range entries {
		s.has[e.Match()] = e
	}
}

// forwards counts the entries that output to a port.
func (s *tableSwitch) forwards(to pipeline.Port) int {
	n := 0
	for _, e := range s.has {
		if f, ok := e.(pipeline.Forward); ok && f.Port == to {
			n++
		}
	}
	return n
}

// memory allocates without a disk.
type memory map[endpoint.CursorKey]*struct {
	next    address.Index
	resting []address.Index
}

func (m memory) AllocateIndex(
	key endpoint.CursorKey,
	find func(address.Index) (address.Index, error),
) (address.Index, error) {
	c := m[key]
	if c == nil {
		c = &struct {
			next    address.Index
			resting []address.Index
		}{}
		m[key] = c
	}
	i, err := find(c.next)
	if err == nil {
		c.next = i + 1
		return i, nil
	}
	if !errors.Is(err, address.ErrExhausted) || len(c.resting) == 0 {
		return 0, endpoint.ErrExhausted
	}
	i, c.resting = c.resting[0], c.resting[1:]
	return i, nil
}

func (m memory) ReleaseIndex(key endpoint.CursorKey, i address.Index) error {
	m[key].resting = append(m[key].resting, i)
	return nil
}

// cluster is an orchestrator and its nodes. Every node receives each update at once.
type cluster struct {
	t       testing.TB
	plan    address.Plan
	tenants []tenant.Tenant
	nodes   []*node
	given   map[string][]netip.Prefix    // by tenant, node and key
	where   map[string][]network.Mapping // by tenant
	next    map[netip.Prefix]uint64
	away    error
}

// node is a node with its network and its containers.
type node struct {
	*Network
	c      *cluster
	prefix netip.Prefix
	sw     *tableSwitch
	record map[endpoint.ID]endpoint.Record
	last   endpoint.ID
	max    int
	mtu    int // of its gateway

	carries   map[string]bool           // tenants without a container here
	publishes map[netip.Addr]netip.Addr // what its gateway publishes; nil if the node has no gateway
	kept      map[netip.Addr]bool       // the argument of the last call of Keep
	alone     bool
	edge      bool
	stays     bool // its switch cannot relay
	late      bool // mappings have not arrived yet
}

func (n *node) Device() pipeline.Device { return pipeline.Device{Name: "gateway"} }
func (n *node) Addresses() (own, virtual netip.Addr) {
	return tenant.UnderlayAddress(n.prefix, 1), n.client(n.prefix).Addr()
}
func (n *node) SetMTU(mtu int) error { n.mtu = mtu; return nil }

func (n *node) Publish(_ context.Context, virtual map[netip.Addr]netip.Addr) error {
	n.publishes = virtual
	return nil
}

func (n *node) Keep(_ context.Context, _ map[netip.Addr]netip.Addr, used map[netip.Addr]bool) error {
	n.kept = used
	return nil
}

// tenantOf returns a tenant with VNI id. Its addresses overlap those of other tenants.
func tenantOf(id address.TenantID, overlays ...tenant.Overlay) tenant.Tenant {
	return tenant.Tenant{
		Name:       fmt.Sprint("t", id),
		Network:    tenant.Nimitz,
		Overlays:   overlays,
		Addressing: tenant.Own,
		IDs:        []tenant.ID{{ID: id}},
	}
}

func overlay(cidr string, nodeBits int) tenant.Overlay {
	return tenant.Overlay{CIDR: netip.MustParsePrefix(cidr), NodeBits: nodeBits}
}

func newCluster(t testing.TB, nodes int, tenants ...tenant.Tenant) *cluster {
	return newRegion(t, plan, nodes, tenants...)
}

func newRegion(t testing.TB, plan address.Plan, nodes int, tenants ...tenant.Tenant) *cluster {
	c := &cluster{
		t:       t,
		plan:    plan,
		tenants: tenants,
		given:   map[string][]netip.Prefix{},
		where:   map[string][]network.Mapping{},
		next:    map[netip.Prefix]uint64{},
	}
	for i := range nodes {
		n := &node{
			c:       c,
			prefix:  plan.Node(uint64(i + 1)),
			sw:      &tableSwitch{has: map[any]pipeline.Entry{}, ports: map[pipeline.Port]string{}, region: plan.Base},
			record:  map[endpoint.ID]endpoint.Record{},
			carries: map[string]bool{},
		}
		c.nodes = append(c.nodes, n)
		n.start(memory{})
	}
	return c
}

// start acts as a new agent process: it has the records, and finds the switch in its current state.
func (n *node) start(indexes network.Indexes) {
	n.c.t.Helper()
	config := Config{
		Plan:        n.c.plan,
		Node:        n.prefix,
		Edge:        n.edge,
		Indexes:     indexes,
		Cluster:     n,
		Switch:      n.sw,
		Gateway:     n,
		MaxMappings: n.max,
		Relays:      !n.stays,
	}
	if n.alone {
		config.Gateway, config.NoGateway = nil, errors.New("the kernel has no NAT")
	}
	n.Network = New(config)
	var found []endpoint.Record
	for _, t := range n.c.tenants {
		if n.hosts(t) {
			n.must(n.PutTenant(n.c.t.Context(), t))
		}
	}
	for _, r := range n.record {
		found = append(found, r)
	}
	n.must(n.Repair(n.c.t.Context(), found, found))
}

func (n *node) must(err error) {
	n.c.t.Helper()
	if err != nil {
		n.c.t.Fatal(err)
	}
}

func (n *node) hosts(t tenant.Tenant) bool {
	for _, r := range n.record {
		if r.Tenant == t.Name {
			return true
		}
	}
	return n.carries[t.Name]
}

// receive passes the full list of a tenant to the node.
func (n *node) receive(t tenant.Tenant) {
	n.must(n.Replace(n.c.t.Context(), t.Name, n.c.where[t.Name]))
}

func (n *node) add(t tenant.Tenant, app address.AppID) endpoint.Record {
	n.c.t.Helper()
	r, err := n.tryAdd(t, app)
	n.must(err)
	return r
}

func (n *node) tryAdd(t tenant.Tenant, app address.AppID) (endpoint.Record, error) {
	return n.tryAddKeyed(t, app, "")
}

func (n *node) tryAddKeyed(t tenant.Tenant, app address.AppID, key string) (endpoint.Record, error) {
	ctx := n.c.t.Context()
	n.last++
	r := endpoint.Record{
		ID:          n.last,
		ContainerID: fmt.Sprint("c", n.last),
		Interface:   "eth0",
		Tenant:      t.Name,
		TenantID:    t.IDs[0].ID,
		App:         app,
		State:       endpoint.Active,
		AddressKey:  key,
	}
	first := !n.hosts(t)
	n.must(n.PutTenant(ctx, t))
	var err error
	if r.Attachments, err = n.Prepare(ctx, t, app, r); err != nil {
		if first {
			n.must(n.DeleteTenant(ctx, t))
		}
		return r, err
	}
	n.must(n.Validate(r))
	r.Device.HostName = fmt.Sprint("pil", r.ID)
	n.record[r.ID] = r
	if first {
		n.receive(t)
	}
	return r, n.Activate(ctx, r)
}

func (n *node) remove(r endpoint.Record) {
	ctx := n.c.t.Context()
	n.must(n.Deactivate(ctx, r))
	n.must(n.Release(ctx, r))
	delete(n.record, r.ID)
	for _, t := range n.c.tenants {
		if t.Name == r.Tenant && !n.hosts(t) {
			n.must(n.DeleteTenant(ctx, t))
			n.c.take(t.Name, n, "")
		}
	}
}

// give allocates the next subnet or address of each overlay, and updates the nodes that host the tenant.
func (c *cluster) give(name string, n *node, key string) ([]netip.Prefix, error) {
	of := fmt.Sprint(name, " ", n.prefix, " ", key)
	if c.given[of] != nil || c.away != nil {
		return c.given[of], c.away
	}
	for _, t := range c.tenants {
		if t.Name != name {
			continue
		}
		for _, o := range t.Overlays {
			at := netip.PrefixFrom(o.CIDR.Addr(), int(t.IDs[0].ID)) // each tenant has its own counter
			first, _ := o.Given()
			c.given[of] = append(c.given[of], o.At(first+c.next[at]))
			c.next[at]++
		}
	}
	var news []network.Mapping
	for _, p := range c.given[of] {
		news = append(news, network.Mapping{Tenant: name, To: p, Node: n.prefix})
	}
	c.where[name] = append(c.where[name], news...)
	return c.given[of], c.tell(name, news, nil)
}

func (c *cluster) take(name string, n *node, key string) {
	of := fmt.Sprint(name, " ", n.prefix, " ", key)
	var gone []network.Mapping
	for _, p := range c.given[of] {
		gone = append(gone, network.Mapping{Tenant: name, To: p, Node: n.prefix})
	}
	delete(c.given, of)
	c.where[name] = slices.DeleteFunc(c.where[name], func(m network.Mapping) bool {
		return slices.ContainsFunc(gone, func(g network.Mapping) bool { return g.To == m.To && g.Node == m.Node })
	})
	if err := c.tell(name, nil, gone); err != nil {
		c.t.Error(err)
	}
}

func (c *cluster) tell(name string, add, remove []network.Mapping) error {
	for _, n := range c.nodes {
		if h := n.tenants[name]; n.late || h == nil || !h.synced {
			continue
		}
		if err := n.Apply(c.t.Context(), name, add, remove); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) NodeCIDRs(_ context.Context, name string) ([]netip.Prefix, error) {
	return n.c.give(name, n, "")
}

func (n *node) Allocate(_ context.Context, name, key string, _ address.AppID) ([]netip.Addr, error) {
	given, err := n.c.give(name, n, key)
	var addrs []netip.Addr
	for _, p := range given {
		addrs = append(addrs, p.Addr())
	}
	return addrs, err
}

func (n *node) Free(_ context.Context, name, key string) error {
	n.c.take(name, n, key)
	return n.c.away
}
