package agent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// An offload has a tenant's rules for the containers of one node, its backend, looked up on other nodes, its frontends
// (Nezha §3). A frontend hosts the tenant without containers: it has its apps, policies and mappings. A backend reports
// its containers, from which the frontends know their apps. Both report which changes of the tenant are in force, and
// the orchestrator advances the offload's phase by these reports. Package policies has what a backend enforces.

// Role is the part of this node in an offload.
type Role struct {
	Tenant   string
	TenantID address.TenantID // of the messages
	Backend  bool             // or else a frontend
	tenant.Offload
	Draining bool     // of a frontend
	Lost     []string // of a backend: frontends that do not answer its probes
}

// Roles returns the parts of this node in offloads, by tenant and id.
func (c *Core) Roles() (all []Role) {
	for _, k := range c.tenants.All() {
		for _, o := range k.Tenant.Offloads {
			r := Role{
				Tenant: k.Tenant.Name, TenantID: k.Tenant.IDs[0].ID, Backend: o.Prefix == c.tenants.node, Offload: o,
			}
			if r.Backend {
				r.Lost = c.tenants.lostFrontends(k.Tenant.Name)
			}
			i := slices.IndexFunc(o.Frontends, func(f tenant.Frontend) bool { return f.Prefix == c.tenants.node })
			if i >= 0 {
				r.Draining = o.Frontends[i].Draining
			}
			if r.Backend || i >= 0 {
				all = append(all, r)
			}
		}
	}
	return all
}

// OffloadsChanged receives a value after a change of Roles.
func (c *Core) OffloadsChanged() <-chan struct{} { return c.offloadsChanged }

// LoadDue receives a value after a change of Roles: the orchestrator then wants the node's load.
func (c *Core) LoadDue() <-chan struct{} { return c.loadDue }

// SetFrontends reports to the orchestrator which frontends of a tenant's offload do not answer this node's probes, and
// which have answered since they were last lost.
func (c *Core) SetFrontends(name string, lost, answering []string) {
	c.tenants.setFrontends(name, lost, answering)
}

// RuleTable returns how full the fullest table of rules is.
func (c *Core) RuleTable() (fullest dpapi.Entries) {
	for _, e := range c.driver.PolicyEntries() {
		if fullest.Table == "" || e.Used > fullest.Used {
			fullest = e
		}
	}
	return fullest
}

// RulesOf returns how many entries of the fullest table a tenant's policies need on a node that looks them up.
func (c *Core) RulesOf(name string) int { return c.policies.View()[name].Rules }

// frontedApp returns the app of a container whose rules this node looks up as a frontend, and the tenant's id.
func (c *Core) frontedApp(name string, a netip.Addr) (address.AppID, address.TenantID, bool) {
	known, _, _ := c.tenants.Get(name)
	for _, o := range known.Tenant.Offloads {
		for _, e := range o.Endpoints {
			if e.Address == a && o.HasFrontend(c.tenants.node) {
				return e.App, known.Tenant.Current().ID, true
			}
		}
	}
	return 0, 0, false
}

// Fronted returns the offload for which this node looks up the rules of a connection, and its tenant.
func (c *Core) Fronted(of Connection) (tenant.Tenant, tenant.Offload, bool) {
	for _, end := range []netip.Addr{of.Destination, of.Source} {
		for _, k := range c.tenants.All() {
			for _, o := range k.Tenant.Offloads {
				is := func(e tenant.OffloadedEndpoint) bool { return e.Address == end }
				has := slices.ContainsFunc(o.Endpoints, is)
				if has && o.HasFrontend(c.tenants.node) && (of.Tenant == "" || of.Tenant == k.Tenant.Name) {
					return k.Tenant, o, true
				}
			}
		}
	}
	return tenant.Tenant{}, tenant.Offload{}, false
}

// OffloadOf returns an offload of a tenant by its id.
func (c *Core) OffloadOf(name string, id uint32) (tenant.Offload, bool) {
	known, _, _ := c.tenants.Get(name)
	i := slices.IndexFunc(known.Tenant.Offloads, func(o tenant.Offload) bool { return o.ID == id })
	if i < 0 {
		return tenant.Offload{}, false
	}
	return known.Tenant.Offloads[i], true
}

// errOffloaded says who looks up the rules of a tenant for this node's containers, and the command for a connection.
func (c *Core) errOffloaded(name string, of Connection) error {
	known, _, _ := c.tenants.Get(name)
	i := slices.IndexFunc(known.Tenant.Offloads, func(o tenant.Offload) bool { return o.Prefix == c.tenants.node })
	if i < 0 {
		return refusal.New(refusal.ErrUnavailable, "the offload of tenant %s has just ended; try again", name)
	}
	o := known.Tenant.Offloads[i]
	var names []string
	for _, f := range o.Active() {
		names = append(names, f.Node)
	}
	what := cmp.Or(map[uint8]string{policy.TCP: "tcp", policy.UDP: "udp", policy.SCTP: "sctp"}[of.Protocol],
		fmt.Sprint(of.Protocol))
	if of.Port != 0 {
		what += fmt.Sprint("/", of.Port)
	}
	if of.PeerApp != 0 {
		what += fmt.Sprint(" --peer-app ", of.PeerApp)
	}
	return refusal.New(
		refusal.ErrNever,
		"the rules of tenant %s for containers of this node are looked up by frontends: %s\n  run on one of these "+
			"nodes: pilaster why %v %v %s --tenant %s",
		name,
		strings.Join(names, ", "),
		of.Source,
		of.Destination,
		what,
		name,
	)
}

// isFrontend reports whether a node is a frontend of an offload of the tenant.
func isFrontend(t tenant.Tenant, node netip.Prefix) bool {
	return slices.ContainsFunc(t.Offloads, func(o tenant.Offload) bool { return o.HasFrontend(node) })
}

// isBackend reports whether a node is the backend of an offload of the tenant.
func isBackend(t tenant.Tenant, node netip.Prefix) bool {
	return slices.ContainsFunc(t.Offloads, func(o tenant.Offload) bool { return o.Prefix == node })
}

// isMember reports whether a node is a backend or a frontend of an offload of the tenant.
func isMember(t tenant.Tenant, node netip.Prefix) bool {
	return isBackend(t, node) || isFrontend(t, node)
}

// fronts reports whether this node is a frontend of a tenant. The node's record lists tenants that it is a frontend of
// as transit tenants; once it does not, the tenant is removed, whether or not its last update has arrived. The caller
// holds the lock.
func (t *Tenants) fronts(name string) bool {
	return t.transit[name] && t.m[name] != nil && isFrontend(t.m[name].Tenant, t.node)
}

// IsFrontend reports whether this node is a frontend of a tenant.
func (t *Tenants) IsFrontend(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fronts(name)
}

// needsNoRequest reports whether a container of a tenant whose app is known can be added without a request to the
// orchestrator. A frontend's first container needs one until the policies have arrived.
func (t *Tenants) needsNoRequest(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	return t.hosts(name) && (h.count() > 0 || h.synced || !t.fronts(name))
}

func (t *Tenants) hasPolicyProblem(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[name] != nil && t.m[name].policyProblem != ""
}

// setApplied records the tenant's changes whose entries are in the packet path. Its policies are too, unless the report
// says why not.
func (t *Tenants) setApplied(name string, changes uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.applied != changes {
		h.applied = changes
		t.signalOffloads(h)
	}
}

// signalOffloads triggers a report if it contains anything about offloads of the tenant. The caller holds the lock.
func (t *Tenants) signalOffloads(h *hosted) {
	if len(h.Tenant.Offloads) > 0 {
		t.signal()
	}
}

// signalContainers triggers a report after a change of the containers here, if they belong to an offload.
func (t *Tenants) signalContainers(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && isBackend(h.Tenant, t.node) {
		t.signal()
	}
}

func (t *Tenants) setFrontends(name string, lost, answering []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	if h == nil || slices.Equal(h.lostFrontends, lost) && slices.Equal(h.answering, answering) {
		return
	}
	h.lostFrontends, h.answering = lost, answering
	t.signal()
}

func (t *Tenants) lostFrontends(name string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.lostFrontends
	}
	return nil
}

// reportOffloads adds to a report what the orchestrator needs for the tenant's offloads, with containers that have at
// most so many addresses, and returns how many are left. Rules that are not in force are no reason not to acknowledge:
// the report has this reason, and a backend without room for its rules gets an offload. The caller holds the lock.
func (t *Tenants) reportOffloads(h *hosted, to *pilasterv1.Hosting, room int) int {
	if len(h.Tenant.Offloads) == 0 {
		return room
	}
	if h.synced && h.mappingsListed == nil {
		to.AppliedChanges, to.PoliciesRevision = h.applied, h.policies
	}
	if !isBackend(h.Tenant, t.node) {
		return room
	}
	to.LostFrontends, to.AnsweringFrontends = h.lostFrontends, h.answering
	for _, e := range t.containers(h.Tenant.Name) {
		if len(e.Addresses) > room {
			return 0 // none after it either, so that containers keep their frontends when a smaller one comes
		}
		room -= len(e.Addresses)
		to.Offloaded = append(to.Offloaded, e)
	}
	return room
}

// offloadProblems names what this node lacks for offloads of its tenants.
func (c *Core) offloadProblems() (problems []string) {
	addresses := 0
	for _, k := range c.tenants.All() {
		if len(k.Tenant.Offloads) == 0 {
			continue
		}
		if err := c.checkReserve(k.Tenant); err != nil && c.tenants.endpoints(k.Tenant.Name) > 0 {
			problems = append(problems, err.Error()+"\n  long packets of its containers here are dropped, and no "+
				"container of it is added")
		}
		if isBackend(k.Tenant, c.tenants.node) {
			for _, e := range c.tenants.containers(k.Tenant.Name) {
				addresses += len(e.Addresses)
			}
		}
	}
	if addresses > tenant.MaxOffloaded {
		problems = append(problems, fmt.Sprintf(
			"the offloaded containers of this node have %d addresses, and frontends know %d at most: packets to the "+
				"others take a detour by this node, which asks a frontend about each\n  stop an offload of this node, "+
				"or move containers to other nodes",
			addresses, tenant.MaxOffloaded))
	}
	return problems
}

// checkReserve returns why this node's containers of a tenant cannot reach offloaded ones with long packets, or nil.
func (c *Core) checkReserve(t tenant.Tenant) error {
	if len(t.Offloads) == 0 || c.mtuReserve >= tenant.OffloadOverhead {
		return nil
	}
	return refusal.New(
		refusal.ErrUnavailable,
		"tenant %s has offloads, whose packets are %d bytes longer, and this node reserves %d: start its agent with "+
			"--mtu-reserve %d, or stop the offloads",
		t.Name,
		tenant.OffloadOverhead,
		c.mtuReserve,
		tenant.OffloadOverhead,
	)
}

// offloadedContainers returns a tenant's containers on this node with their apps, in the order of their ids.
func (c *Core) offloadedContainers(name string) (all []*pilasterv1.OffloadedEndpoint) {
	for _, r := range c.store.List() {
		if r.Tenant != name || !r.Lives() {
			continue
		}
		if e := offloadedEndpoint(r); len(e.Addresses) > 0 {
			all = append(all, e)
		}
	}
	return all
}

func offloadedEndpoint(r endpoint.Record) *pilasterv1.OffloadedEndpoint {
	e := &pilasterv1.OffloadedEndpoint{App: uint32(cmp.Or(r.AppNow, r.App))}
	for _, a := range r.Attachments {
		if tenant.NetworkHas(a.Network, tenant.PolicyAtReceiver) {
			e.Addresses = append(e.Addresses, a.Address.AsSlice())
		}
	}
	return e
}

// keepEndpoints returns the offloads of an answer with the endpoints that this node knows: a tenant's changes do not
// count them, so the answer may have older ones than the stream.
func keepEndpoints(answered, known []tenant.Offload) []tenant.Offload {
	all := slices.Clone(answered)
	for i, o := range all {
		at := slices.IndexFunc(known, func(k tenant.Offload) bool { return k.ID == o.ID })
		if at >= 0 {
			all[i].Endpoints = known[at].Endpoints
		}
	}
	return all
}

// offloadFile is an offload in a tenant's file.
type offloadFile struct {
	ID        uint32              `json:"id"`
	Node      string              `json:"node"`
	Prefix    netip.Prefix        `json:"prefix"`
	Phase     tenant.OffloadPhase `json:"phase"`
	Epoch     uint32              `json:"epoch"`
	Since     uint64              `json:"since"`
	Frontends []frontendFile      `json:"frontends"`
	Endpoints []offloadedFile     `json:"endpoints,omitempty"`
}

type frontendFile struct {
	Node     string       `json:"node"`
	Prefix   netip.Prefix `json:"prefix"`
	Draining bool         `json:"draining,omitempty"`
}

type offloadedFile struct {
	Address netip.Addr    `json:"address"`
	App     address.AppID `json:"app"`
}

func newOffloadFile(o tenant.Offload) offloadFile {
	f := offloadFile{ID: o.ID, Node: o.Node, Prefix: o.Prefix, Phase: o.Phase, Epoch: o.Epoch, Since: o.Since}
	for _, frontend := range o.Frontends {
		f.Frontends = append(f.Frontends, frontendFile(frontend))
	}
	for _, e := range o.Endpoints {
		f.Endpoints = append(f.Endpoints, offloadedFile(e))
	}
	return f
}

func (f offloadFile) offload() (tenant.Offload, error) {
	o := tenant.Offload{ID: f.ID, Node: f.Node, Prefix: f.Prefix, Phase: f.Phase, Epoch: f.Epoch, Since: f.Since}
	for _, frontend := range f.Frontends {
		o.Frontends = append(o.Frontends, tenant.Frontend(frontend))
	}
	for _, e := range f.Endpoints {
		o.Endpoints = append(o.Endpoints, tenant.OffloadedEndpoint(e))
	}
	return o, o.Check()
}
