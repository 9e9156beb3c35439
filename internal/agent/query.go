package agent

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// Endpoints returns all records, by id.
func (c *Core) Endpoints() []endpoint.Record { return c.store.List() }

// TenantNames returns the tenants that this node knows, in order.
func (c *Core) TenantNames() []string { return c.tenants.Names() }

// Problems describes damaged state files, and what this node fails to apply of its tenants' updates, transit, policies,
// migrations, egress and services.
func (c *Core) Problems() []string {
	return slices.Concat(c.tenants.damages.Problems(), c.tenants.refusedProblems(), c.transitProblems(),
		c.policyProblems(), c.tenants.migrationProblems(), c.offloadProblems(),
		c.egressProblems(), c.services.Status(false).Problems)
}

// Find returns the endpoint with this id, container id, pod or address. It refuses a container with several interfaces:
// select one by id.
func (c *Core) Find(key string) (endpoint.Record, error) {
	id, _ := strconv.ParseUint(key, 10, 16)
	addr, _ := netip.ParseAddr(key)
	var found []endpoint.Record
	for _, r := range c.store.List() {
		if r.ID == endpoint.ID(id) && id != 0 {
			return r, nil
		}
		has := func(a endpoint.Attachment) bool { return a.Address == addr || a.Plaintext == addr || a.Egress == addr }
		if key != "" && (r.ContainerID == key || r.Pod == key) ||
			addr.IsValid() && slices.ContainsFunc(r.Attachments, has) {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return endpoint.Record{}, refusal.New(
			refusal.ErrNotFound,
			"no endpoint %q on this node; \"pilaster endpoint list\" shows them",
			key,
		)
	case 1:
		return found[0], nil
	}
	return endpoint.Record{}, refusal.New(
		refusal.ErrInvalid,
		"%q has %d endpoints; select one by its id",
		key,
		len(found),
	)
}

// NodeSeenBy returns the alias address of this node among an endpoint's peers.
func (c *Core) NodeSeenBy(r endpoint.Record) (netip.Addr, bool) {
	known, _, _ := c.tenants.Get(r.Tenant)
	i := slices.IndexFunc(known.Tenant.IDs, func(id tenant.ID) bool { return id.ID == r.TenantID })
	seen := slices.IndexFunc(r.Attachments, func(a endpoint.Attachment) bool { return a.Plaintext.IsValid() })
	if i < 0 || seen < 0 {
		return netip.Addr{}, false
	}
	alias, err := known.Tenant.Gateway(c.plan, address.Split(r.Attachments[seen].Plaintext).Node, known.Tenant.IDs[i])
	return alias.Address, err == nil
}

// Explanation is this node's knowledge of an address.
type Explanation struct {
	Plaintext        netip.Addr // zero if it is a ciphertext that no key on this node decrypts
	Tenant           string     // empty if the tenant is not known here
	App              *App
	Endpoint         *endpoint.Record
	Overlays         []OverlayMatch
	Published        *tenant.Publication
	Publisher        string // the tenant of Published
	UnderlayServices []TenantUnderlayService
	Outside          *endpoint.Record // the container on this node that hosts outside see at the address
	Gateway          string           // the tenant whose containers hosts outside see at it, by an egress gateway
	// of tenants on this node, with this address for containers or hosts outside
	Services []service.Service
	// containers with host ports at the address, which is this node's; they have these ports only
	Publishers []endpoint.Record
}

// OverlayMatch is a tenant with an overlay CIDR that contains the address.
type OverlayMatch struct {
	Tenant   string
	CIDR     netip.Prefix
	Region   string           // empty for this node's region
	Endpoint *endpoint.Record // if it is on this node
}

// TenantUnderlayService is an underlay service and its tenant; the virtual address is valid only within that tenant.
type TenantUnderlayService struct {
	Tenant string
	tenant.UnderlayService
}

// Explain analyses an address. It decrypts ciphertexts with the keys of the known tenants.
func (c *Core) Explain(addr netip.Addr) Explanation {
	e := Explanation{Overlays: c.overlayMatches(addr), UnderlayServices: explainUnderlayServices(c.tenants.All(), addr)}
	e.Outside, e.Gateway = c.outside(addr)
	e.Services, e.Publishers = c.services.At(addr), c.services.Publishers(addr)
	if all, err := c.plan.ServicePrefix(); err == nil && all.Contains(addr) {
		e.Tenant = c.tenantOfServices(addr)
		return e
	}
	if c.plan.Base.Contains(addr) {
		e.Plaintext = addr
	} else if e.Plaintext = c.decrypt(addr); !e.Plaintext.IsValid() {
		return e
	}
	p := address.Split(e.Plaintext)
	for _, k := range c.tenants.All() {
		if i := slices.IndexFunc(k.Tenant.Publications,
			func(p tenant.Publication) bool { return p.Underlay == addr }); i >= 0 {
			e.Published, e.Publisher = &k.Tenant.Publications[i], k.Tenant.Name
		}
		if !slices.ContainsFunc(k.Tenant.IDs, func(id tenant.ID) bool { return id.ID == p.Tenant }) {
			continue
		}
		e.Tenant = k.Tenant.Name
		if i := slices.IndexFunc(k.Apps, func(a App) bool { return a.ID == p.App }); i >= 0 {
			e.App = &k.Apps[i]
		}
	}
	if r, err := c.Find(e.Plaintext.String()); err == nil {
		e.Endpoint = &r
	}
	return e
}

// tenantOfServices returns the tenant with a service address in its prefix; empty if this node does not know it.
func (c *Core) tenantOfServices(addr netip.Addr) string {
	for _, k := range c.tenants.All() {
		if own, err := c.plan.TenantServices(k.Tenant.ServicesNumber); err == nil && own.Contains(addr) {
			return k.Tenant.Name
		}
	}
	return ""
}

// outside returns whose address it is for hosts outside: that of a container here, or of a tenant's egress gateway.
func (c *Core) outside(addr netip.Addr) (of *endpoint.Record, gateway string) {
	for _, k := range c.tenants.All() {
		for _, r := range k.Tenant.Egress {
			if slices.ContainsFunc(r.Via, func(g tenant.EgressGateway) bool { return g.Address == addr }) {
				gateway = k.Tenant.Name
			}
		}
	}
	if !tenant.IsEgressAddress(addr) {
		return nil, gateway
	}
	for _, r := range c.store.List() {
		if slices.Contains(egressOf(r), addr) {
			return &r, gateway
		}
	}
	return nil, gateway
}

// explainUnderlayServices returns the underlay services with this virtual address.
func explainUnderlayServices(tenants []TenantState, addr netip.Addr) (all []TenantUnderlayService) {
	for _, k := range tenants {
		for _, s := range k.Tenant.UnderlayServices {
			if s.Virtual == addr {
				all = append(all, TenantUnderlayService{k.Tenant.Name, s})
			}
		}
	}
	return all
}

// overlayMatches returns the known tenants with the address in their CIDRs. Overlays of different tenants are
// independent.
func (c *Core) overlayMatches(addr netip.Addr) (all []OverlayMatch) {
	for _, k := range c.tenants.All() {
		for _, o := range k.Tenant.Overlays {
			if !o.CIDR.Contains(addr) {
				continue
			}
			here := OverlayMatch{Tenant: k.Tenant.Name, CIDR: o.CIDR}
			for _, r := range c.store.List() {
				if r.Tenant == here.Tenant &&
					slices.ContainsFunc(r.Attachments, func(a endpoint.Attachment) bool { return a.Address == addr }) {
					here.Endpoint = &r
				}
			}
			all = append(all, here)
		}
		for _, r := range k.Tenant.Regions {
			for _, cidr := range r.CIDRs {
				if cidr.Contains(addr) {
					all = append(all, OverlayMatch{Tenant: k.Tenant.Name, CIDR: cidr, Region: r.Name})
				}
			}
		}
	}
	return all
}

// decrypt tries each key. The base prefix and the tenant id identify the right one: a wrong key would have to match
// both (NP3, §6.2).
func (c *Core) decrypt(addr netip.Addr) netip.Addr {
	if !addr.Is6() {
		return netip.Addr{}
	}
	for _, k := range c.tenants.All() {
		for _, id := range k.Tenant.IDs {
			plain := address.NewCipher(id.Key).Decrypt(addr)
			if c.plan.Base.Contains(plain) && address.Split(plain).Tenant == id.ID {
				return plain
			}
		}
	}
	return netip.Addr{}
}

// TenantOf returns the tenant with an id.
func (c *Core) TenantOf(id address.TenantID) (tenant.Tenant, bool) {
	for _, k := range c.tenants.All() {
		if k.Tenant.Has(id) {
			return k.Tenant, true
		}
	}
	return tenant.Tenant{}, false
}

// TenantNetworkHas reports whether the network of a tenant that this node knows has a capability.
func (c *Core) TenantNetworkHas(name string, capability tenant.Capability) bool {
	k, _, known := c.tenants.Get(name)
	return known && tenant.NetworkHas(k.Tenant.Network, capability)
}

// IfUnused calls do while no endpoint has the key, and none is being created with it.
func (c *Core) IfUnused(ctx context.Context, key string, do func() error) error {
	unlock, err := c.byKey.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if i := strings.LastIndexByte(key, '/'); i >= 0 { // other keys belong to no endpoint
		if _, used := c.store.Find(key[:i], key[i+1:]); used {
			return nil
		}
	}
	return do()
}

// NameOf returns an endpoint's pod, or else its container, and its tenant. Both are empty if it is not here.
func (c *Core) NameOf(id endpoint.ID) (name, tenant string) {
	r, _ := c.store.Get(id)
	return cmp.Or(r.Pod, r.ContainerID), r.Tenant
}

// End is this node's knowledge of an address of a packet.
type End struct {
	Name      string     // pod, or else container, of its endpoint on this node; empty if it has none
	Address   netip.Addr // as containers of the tenant see it; zero if that is not known here
	Plaintext netip.Addr // on the fabric; zero if it has none, or that is not known here
}

// EndOf returns what this node knows of an address of a packet. of is the tenant of the packet's endpoint: several
// tenants may have the same overlay address. If it is empty, EndOf looks only for addresses on the fabric and
// ciphertexts.
func (c *Core) EndOf(addr netip.Addr, of string) (end End) {
	known := c.Explain(addr)
	here := known.Endpoint
	for _, o := range known.Overlays {
		if o.Tenant == of && o.Endpoint != nil {
			here, end.Address = o.Endpoint, addr
		}
	}
	if here != nil {
		end.Name = cmp.Or(here.Pod, here.ContainerID)
	}
	if end.Plaintext = known.Plaintext; end.Plaintext.IsValid() {
		end.Address = c.seen(end.Plaintext)
	}
	return end
}

// seen returns the address at which containers of the tenant see one on the fabric, or zero if this node lacks the key
// or the address was never allocated.
func (c *Core) seen(plaintext netip.Addr) netip.Addr {
	id := address.Split(plaintext).Tenant
	owner, known := c.TenantOf(id)
	switch {
	case !known:
		return netip.Addr{}
	case owner.Addressing == tenant.Clear:
		return plaintext
	}
	seen := address.NewCipher(owner.Of(id).Key).Encrypt(plaintext)
	if !c.plan.Private.Contains(seen) {
		return netip.Addr{}
	}
	return seen
}

// LinkStatus is the current state of the link to the orchestrator.
type LinkStatus struct {
	Connected bool
	Since     time.Time
	Revision  int64
	LastError string
	Refused   bool // the orchestrator knows this node and rejects it: LastError has the reason

	NotTaken []string // parts of this node's reports that the orchestrator rejected, with the reason
}

// DatapathStatus is the driver's status plus drops and capabilities of the networks' switches.
func (c *Core) DatapathStatus(ctx context.Context) (dpapi.Status, error) {
	s, err := c.driver.Status()
	if err != nil {
		return s, err
	}
	err = c.networks.AddStatus(ctx, &s)
	return s, err
}
