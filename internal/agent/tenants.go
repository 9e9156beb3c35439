package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Tenants is this node's state of its tenants, keys included. It is on disk, so that endpoints can be added without the
// orchestrator. Its methods are for the Core, which holds the tenant's lock around related calls.
type Tenants struct {
	disk     statefile.Disk
	dir      string
	changed  chan struct{}
	maxIDs   int
	node     netip.Prefix // of this node; zero before the core runs
	policies *policies.Manager
	damages  *statefile.Damages

	mu           sync.Mutex
	m            map[string]*hosted
	transit      map[string]bool          // transit tenants of the last update, known or not
	resolving    map[string]int           // running calls to Resolve, by tenant
	hasMappings  func(tenant.Tenant) bool // reports whether mappings of the tenant are listed; nil before the link runs
	appOverrides func() map[string][]*pilasterv1.Override
	usedApps     func(tenant string) map[address.AppID]bool // apps of containers here
	containers   func(tenant string) []*pilasterv1.OffloadedEndpoint
	claimed      map[appOf]int // apps of containers being created
	listed       func()        // called for a tenant that moves between networks
}

// TenantState is a tenant with the apps that a node has received.
type TenantState struct {
	Tenant tenant.Tenant
	Apps   []App
	Whole  bool // Apps was complete when it was received

	Retiring   Retiring
	Restricted bool // networks rejected it, and have it without services, publications and other regions
}

// App is the app of one set of identity labels.
type App struct {
	ID     address.AppID     `json:"id"`
	Labels map[string]string `json:"labels"`
}

func (k TenantState) app(identity map[string]string) (address.AppID, bool) {
	for _, a := range k.Apps {
		if maps.Equal(a.Labels, identity) {
			return a.ID, true
		}
	}
	return 0, false
}

// hosted is a tenant that has endpoints here, is about to, or is a transit tenant.
type hosted struct {
	TenantState
	deleted        bool                     // by an operator; endpoints of it remain
	hasPolicies    bool                     // it has policies
	endpoints      map[address.TenantID]int // by id, including endpoints being created
	installed      tenant.Tenant            // as installed on networks
	installedOn    []string                 // those networks
	migration      *pilasterv1.Moving       // progress of the migration to another network; nil if there is none
	policyProblem  string                   // why its last policy update is not in force
	subnets        []netip.Prefix           // this node's, one for each overlay; nil before they are allocated
	refused        error                    // why the last update was not applied
	lost           error                    // why its file could not be read; see tenant_lost.go
	unsaved        bool                     // merged, but not on disk yet
	synced         bool                     // this process received all its policies
	servicesSynced bool                     // likewise its services
	ackedRound     uint64                   // the last acknowledged round of retiring apps
	requested      bool                     // the whole state was requested on the stream
	applied        uint64                   // the tenant's changes that this process has applied
	policies       int64                    // revision of the policies that this process has applied; see setApplied
	lostFrontends  []string                 // of its offload by this node: they do not answer; sorted
	answering      []string                 // of these frontends: they have answered since they were last lost; sorted
	mappingsListed chan struct{}            // closed when its mappings were delivered; nil if no ADD has to wait
}

func newHosted(k TenantState) *hosted {
	return &hosted{TenantState: k, endpoints: map[address.TenantID]int{}}
}

// tenantFile is the file of one tenant, readable only by its owner.
type tenantFile struct {
	Version    int               `json:"version"`
	Name       string            `json:"name"`
	Network    string            `json:"network,omitempty"` // empty means the default
	Leaving    string            `json:"leaving,omitempty"`
	Overlays   []overlayFile     `json:"overlays,omitempty"`
	Subnets    []netip.Prefix    `json:"nodeSubnets,omitempty"`
	Addressing tenant.Addressing `json:"addressing"`
	Created    time.Time         `json:"created"`
	IDs        []idFile          `json:"ids"`
	Changes    uint64            `json:"changes,omitempty"` // of ids
	Apps       []App             `json:"apps"`
	Deleted    bool              `json:"deleted,omitempty"`
	Carried    bool              `json:"carried,omitempty"`
	Policed    bool              `json:"policed,omitempty"` // a build that enforces no policies then refuses to start
	Retiring   *Retiring         `json:"retiring,omitempty"`

	UnderlayServices []underlayServiceFile `json:"services,omitempty"`
	Publications     []publicationFile     `json:"publications,omitempty"`
	Regions          []tenant.Region       `json:"regions,omitempty"`
	Offloads         []offloadFile         `json:"offloads,omitempty"`

	Egress    []egressFile   `json:"egress,omitempty"`
	Nodes     []netip.Prefix `json:"nodes,omitempty"` // that containers reach and are reached by
	Protected []netip.Prefix `json:"protected,omitempty"`

	ServicesNumber uint32 `json:"servicesNumber,omitempty"`
	Exposed        bool   `json:"exposed,omitempty"`
}

type egressFile struct {
	To    netip.Prefix        `json:"to"`
	Allow bool                `json:"allow,omitempty"`
	Via   []egressGatewayFile `json:"via,omitempty"`
}

type egressGatewayFile struct {
	Node    string       `json:"node"`
	Prefix  netip.Prefix `json:"prefix"`
	Address netip.Addr   `json:"address"`
}

type underlayServiceFile struct {
	Name    string     `json:"name"`
	Virtual netip.Addr `json:"virtual"`
	Real    netip.Addr `json:"real"`
}

type publicationFile struct {
	Name      string       `json:"name"`
	Container netip.Addr   `json:"container"`
	Gateway   netip.Prefix `json:"gateway"`
	Underlay  netip.Addr   `json:"underlay"`
}

type idFile struct {
	ID  address.TenantID `json:"id"`
	Key string           `json:"key"` // 32 hexadecimal digits

	OnlyAccepted bool `json:"onlyAccepted,omitempty"`
}

type overlayFile struct {
	CIDR     netip.Prefix `json:"cidr"`
	NodeBits int          `json:"nodeBits,omitempty"`
}

// OpenTenants reads <dir>/tenants.
func OpenTenants(dir string) (*Tenants, error) { return OpenTenantsOn(statefile.Disk{}, dir) }

// OpenTenantsOn is OpenTenants on another disk.
func OpenTenantsOn(disk statefile.Disk, dir string) (*Tenants, error) {
	return OpenTenantsWith(disk, nil, dir)
}

// OpenTenantsWith is OpenTenantsOn, and sets damaged files aside.
func OpenTenantsWith(disk statefile.Disk, damages *statefile.Damages, dir string) (*Tenants, error) {
	t := &Tenants{
		damages:      damages,
		disk:         disk,
		dir:          filepath.Join(dir, state.TenantsFolder),
		changed:      make(chan struct{}, 1),
		maxIDs:       dpapi.DefaultMaxTenantIDs,
		m:            map[string]*hosted{},
		transit:      map[string]bool{},
		resolving:    map[string]int{},
		claimed:      map[appOf]int{},
		appOverrides: func() map[string][]*pilasterv1.Override { return nil },
		usedApps:     func(string) map[address.AppID]bool { return nil },
		containers:   func(string) []*pilasterv1.OffloadedEndpoint { return nil },
	}
	if err := disk.MakeFolder(t.dir); err != nil {
		return nil, err
	}
	var err error
	if t.policies, err = policies.Open(disk, damages, dir); err != nil {
		return nil, err
	}
	names, err := disk.Names(t.dir, ".json")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		h, carried, err := readTenant(disk, t.path(name))
		if err == nil && h.Tenant.Name != name {
			err = &statefile.CorruptError{Path: t.path(name), Err: fmt.Errorf("it contains tenant %s", h.Tenant.Name)}
		}
		if err != nil {
			if err := damages.Check(err); err != nil {
				return nil, err
			}
			h, carried = &hosted{lost: err}, false
			h.endpoints, h.Tenant.Name = map[address.TenantID]int{}, name
		}
		t.m[name] = h
		if carried {
			t.transit[name] = true
		}
	}
	return t, nil
}

func (t *Tenants) path(name string) string { return filepath.Join(t.dir, name+".json") }

func readTenant(disk statefile.Disk, path string) (h *hosted, carried bool, err error) {
	var f tenantFile
	if err := disk.Read(path, state.Version, &f); err != nil {
		return nil, false, err
	}
	if h, err = f.hosted(); err != nil {
		return nil, false, &statefile.CorruptError{Path: path, Err: err}
	}
	return h, f.Carried, nil
}

func (f tenantFile) hosted() (*hosted, error) {
	h := newHosted(
		TenantState{
			Tenant: tenant.Tenant{
				Name:       f.Name,
				Network:    cmp.Or(f.Network, tenant.DefaultNetwork),
				Leaving:    f.Leaving,
				Addressing: f.Addressing,
				Created:    f.Created,
				Changes:    f.Changes,
			},
			Apps: f.Apps,
		},
	)
	h.deleted, h.hasPolicies = f.Deleted, f.Policed
	if f.Retiring != nil {
		h.Retiring = *f.Retiring
	}
	for _, o := range f.Overlays {
		h.Tenant.Overlays = append(h.Tenant.Overlays, tenant.Overlay(o))
	}
	for _, s := range f.UnderlayServices {
		h.Tenant.UnderlayServices = append(h.Tenant.UnderlayServices, tenant.UnderlayService(s))
	}
	for _, p := range f.Publications {
		h.Tenant.Publications = append(h.Tenant.Publications, tenant.Publication(p))
	}
	for _, r := range f.Regions {
		if err := r.Check(); err != nil {
			return nil, err
		}
		h.Tenant.Regions = append(h.Tenant.Regions, r)
	}
	for _, o := range f.Offloads {
		offload, err := o.offload()
		if err != nil {
			return nil, err
		}
		h.Tenant.Offloads = append(h.Tenant.Offloads, offload)
	}
	for _, e := range f.Egress {
		h.Tenant.Egress = append(h.Tenant.Egress, e.rule())
	}
	h.Tenant.Nodes, h.Tenant.Protected = f.Nodes, f.Protected
	if h.Tenant.ServicesNumber = f.ServicesNumber; f.ServicesNumber > address.MaxServicesNumber {
		return nil, fmt.Errorf("number %d for services is beyond %d", f.ServicesNumber, address.MaxServicesNumber)
	}
	h.Tenant.Exposed = f.Exposed
	if !slices.Contains([]tenant.Addressing{tenant.Encrypted, tenant.Clear, tenant.Own}, f.Addressing) {
		return nil, fmt.Errorf("addressing %q is unknown", f.Addressing)
	}
	if err := h.Tenant.CheckNetwork(); err != nil {
		return nil, fmt.Errorf("it %w", err)
	}
	if len(f.Subnets) > 0 {
		h.subnets = f.Subnets
		if err := checkSubnets(h.Tenant, f.Subnets); err != nil {
			return nil, err
		}
	}
	for _, id := range f.IDs {
		k, err := address.ParseKey(id.Key)
		if err != nil {
			return nil, errors.New("a key is not 32 hexadecimal digits")
		}
		if id.ID < 1 || id.ID > address.MaxTenantID {
			return nil, fmt.Errorf("tenant id %d is not in 1..%d", id.ID, address.MaxTenantID)
		}
		if h.Tenant.Has(id.ID) {
			return nil, fmt.Errorf("tenant id %d occurs twice", id.ID)
		}
		h.Tenant.IDs = append(h.Tenant.IDs, tenant.ID{ID: id.ID, Key: k, OnlyAccepted: id.OnlyAccepted})
	}
	if h.Tenant.Current().ID == 0 {
		return nil, errors.New("it has no current tenant id")
	}
	for i, a := range f.Apps {
		if a.ID == 0 || a.ID >= address.FirstReservedApp {
			return nil, fmt.Errorf("app %#x is not in the range of containers' apps", a.ID)
		}
		same := func(other App) bool { return other.ID == a.ID || maps.Equal(other.Labels, a.Labels) }
		if slices.ContainsFunc(f.Apps[:i], same) {
			return nil, fmt.Errorf("app %#x or its labels occur twice", a.ID)
		}
	}
	return h, nil
}

func (t *Tenants) write(h *hosted) error {
	if h.lost != nil {
		return nil // its file must not get a tenant without keys
	}
	f := tenantFile{
		Version:    state.Version,
		Name:       h.Tenant.Name,
		Addressing: h.Tenant.Addressing,
		Created:    h.Tenant.Created,
		Changes:    h.Tenant.Changes,
		Apps:       h.Apps,
		Deleted:    h.deleted,
	}
	if h.Tenant.Network != tenant.DefaultNetwork {
		f.Network = h.Tenant.Network
	}
	f.Leaving, f.Policed = h.Tenant.Leaving, h.hasPolicies
	if h.Retiring.Round != 0 {
		f.Retiring = &h.Retiring
	}
	for _, o := range h.Tenant.Overlays {
		f.Overlays = append(f.Overlays, overlayFile(o))
	}
	for _, s := range h.Tenant.UnderlayServices {
		f.UnderlayServices = append(f.UnderlayServices, underlayServiceFile(s))
	}
	for _, p := range h.Tenant.Publications {
		f.Publications = append(f.Publications, publicationFile(p))
	}
	f.Regions = h.Tenant.Regions
	for _, o := range h.Tenant.Offloads {
		f.Offloads = append(f.Offloads, newOffloadFile(o))
	}
	for _, r := range h.Tenant.Egress {
		f.Egress = append(f.Egress, newEgressFile(r))
	}
	f.Nodes, f.Protected = h.Tenant.Nodes, h.Tenant.Protected
	f.ServicesNumber, f.Exposed = h.Tenant.ServicesNumber, h.Tenant.Exposed
	f.Carried = t.transit[f.Name]
	f.Subnets = h.subnets
	for _, id := range h.Tenant.IDs {
		f.IDs = append(f.IDs, idFile{id.ID, id.Key.String(), id.OnlyAccepted})
	}
	if err := t.disk.Write(t.path(f.Name), f, 0o600); err != nil {
		return fmt.Errorf("writing tenant %s: %w", f.Name, err)
	}
	t.damages.Replaced(t.path(f.Name))
	return nil
}

func (f egressFile) rule() tenant.EgressRule {
	r := tenant.EgressRule{To: f.To, Allow: f.Allow}
	for _, g := range f.Via {
		r.Via = append(r.Via, tenant.EgressGateway(g))
	}
	return r
}

func newEgressFile(r tenant.EgressRule) egressFile {
	f := egressFile{To: r.To, Allow: r.Allow}
	for _, g := range r.Via {
		f.Via = append(f.Via, egressGatewayFile(g))
	}
	return f
}

// checkSubnets refuses invalid subnets of a node: there must be one for each overlay, in their order.
func checkSubnets(t tenant.Tenant, subnets []netip.Prefix) error {
	if len(subnets) != len(t.Overlays) {
		return fmt.Errorf("%d subnets of a node for %d CIDRs; want one for each", len(subnets), len(t.Overlays))
	}
	for i, o := range t.Overlays {
		if _, ok := o.Contains(subnets[i]); !ok || o.NodeBits == 0 {
			return fmt.Errorf("%v is not a node's subnet in %v", subnets[i], o.CIDR)
		}
	}
	return nil
}

// Subnets returns this node's subnets of a tenant; none before they are allocated.
func (t *Tenants) Subnets(name string) []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return slices.Clone(h.subnets)
	}
	return nil
}

// SetSubnets stores the subnets for as long as the tenant is hosted.
func (t *Tenants) SetSubnets(name string, subnets []netip.Prefix) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m[name] == nil {
		return fmt.Errorf("tenant %s is not hosted here", name)
	}
	h := *t.m[name]
	if err := checkSubnets(h.Tenant, subnets); err != nil {
		return fmt.Errorf("the orchestrator's answer for tenant %s is invalid: %w", name, err)
	}
	h.subnets = subnets
	if err := t.write(&h); err != nil {
		return err
	}
	t.m[name] = &h
	return nil
}

// Names returns the known tenants, in order.
func (t *Tenants) Names() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.m))
}

// All returns the state of all known tenants, by name.
func (t *Tenants) All() []TenantState {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []TenantState
	for _, h := range t.m {
		all = append(all, h.TenantState)
	}
	slices.SortFunc(all, func(a, b TenantState) int { return cmp.Compare(a.Tenant.Name, b.Tenant.Name) })
	return all
}

// Changed receives a value after a change of the state that Report reports.
func (t *Tenants) Changed() <-chan struct{} { return t.changed }

func (t *Tenants) signal() {
	select {
	case t.changed <- struct{}{}:
	default: // a signal is pending
	}
}

// Get returns a known tenant, and whether an operator has deleted it.
func (t *Tenants) Get(name string) (k TenantState, deleted, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h, ok := t.m[name]
	if !ok {
		return TenantState{}, false, false
	}
	return h.TenantState, h.deleted, true
}

func (t *Tenants) markDeleted(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.m[name]
	if old == nil || old.deleted {
		return nil
	}
	h := *old
	h.deleted = true
	if err := t.write(&h); err != nil {
		return err
	}
	t.m[name] = &h
	return nil
}

func (t *Tenants) forget(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.disk.Remove(t.path(name)); err != nil {
		return err
	}
	t.damages.Replaced(t.path(name))
	delete(t.m, name)
	t.signal()
	return nil
}
