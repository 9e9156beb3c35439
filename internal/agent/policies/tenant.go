package policies

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// documentName identifies a policy within a tenant.
type documentName struct{ Kind, Namespace, Name string }

// Document is a policy as its author wrote it.
type Document struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Text      string `json:"document"`
}

func (d Document) name() documentName { return documentName{d.Kind, d.Namespace, d.Name} }

// tenantPolicy is the policy state of one tenant; it may be empty.
type tenantPolicy struct {
	mu      sync.Mutex // held during compilation and installation, so that the last update wins
	removed bool       // from Manager.tenants, while another caller waited for the lock

	documents   map[documentName]Document
	parsed      map[documentName]policy.Policy
	parseErrors map[documentName]error // of the documents that could not be parsed
	overrides   map[netip.Addr]address.AppID
	synced      chan struct{} // closed once all policies of the tenant were received
	awaited     bool          // the tenant has policies: ADDs wait until they are received
	// the disk lacks the last update: only enforceable policies are stored, so that every start succeeds
	unsaved bool
	// why the policies from before this process are unknown; nil after a complete update. The kernel's stay in force.
	unread error

	enforced dpapi.TenantPolicies
	inputs   compileInputs // of the last successful compilation
	// enforced has policies that are not in audit mode; their rules may be on frontends
	restricts bool
	lastErr   error // why the last update is not in force; nil if it is
	rules     int   // entries of the fullest table that the policies needed when they were last compiled; 0: unknown

	index   *policy.Index // built for the apps in indexed
	indexed map[address.AppID]map[string]string
}

func newTenantPolicy() *tenantPolicy {
	return &tenantPolicy{
		documents:   map[documentName]Document{},
		parsed:      map[documentName]policy.Policy{},
		parseErrors: map[documentName]error{},
		overrides:   map[netip.Addr]address.AppID{},
		synced:      make(chan struct{}),
	}
}

// unreadPolicy returns the state of a tenant whose policies are unknown.
func unreadPolicy(why error) *tenantPolicy {
	p := newTenantPolicy()
	p.unread, p.unsaved, p.awaited = why, true, true
	return p
}

// isBlank reports that there is nothing to enforce.
func (p *tenantPolicy) isBlank() bool { return len(p.documents)+len(p.overrides) == 0 }

// isSettled reports that the last update is in force and on disk.
func (p *tenantPolicy) isSettled() bool { return p.lastErr == nil && !p.unsaved }

func (p *tenantPolicy) isSynced() bool {
	select {
	case <-p.synced:
		return true
	default:
		return false
	}
}

// Update is an update of a tenant's policies and app overrides.
type Update struct {
	Tenant         string
	Revision       int64 // of the store, up to which the policies are known with this update
	Received       time.Time
	Whole          bool // the update is complete: all other policies and overrides are removed
	Documents      []Document
	Removed        []Document // only the names are set
	Overrides      map[netip.Addr]address.AppID
	EndedOverrides []netip.Addr // containers whose app is again the one in their address
}

// apply applies an update and reports whether it changes anything. It keeps documents that this build cannot parse:
// dropping them would allow what they deny.
func (p *tenantPolicy) apply(n Update) (changed bool) {
	if n.Whole {
		p.unread = nil
		n.Removed, n.EndedOverrides = p.missingFrom(n)
	}
	for _, d := range n.Removed {
		if _, had := p.documents[d.name()]; had {
			p.forget(d.name())
			changed = true
		}
	}
	for _, d := range n.Documents {
		if p.documents[d.name()] == d {
			continue
		}
		p.forget(d.name())
		p.documents[d.name()] = d
		if parsed, err := d.parse(); err == nil {
			p.parsed[d.name()] = parsed
		} else {
			p.parseErrors[d.name()] = err
		}
		changed = true
	}
	for _, a := range n.EndedOverrides {
		if _, had := p.overrides[a]; had {
			delete(p.overrides, a)
			changed = true
		}
	}
	for a, app := range n.Overrides {
		if p.overrides[a] != app {
			p.overrides[a] = app
			changed = true
		}
	}
	if p.unsaved = p.unsaved || changed; changed {
		p.rules = 0
	}
	return changed
}

// missingFrom returns the known documents and overrides that a complete update does not contain.
func (p *tenantPolicy) missingFrom(n Update) (documents []Document, overrides []netip.Addr) {
	listed := make(map[documentName]bool, len(n.Documents))
	for _, d := range n.Documents {
		listed[d.name()] = true
	}
	for name, d := range p.documents {
		if !listed[name] {
			documents = append(documents, d)
		}
	}
	for a := range p.overrides {
		if _, stays := n.Overrides[a]; !stays {
			overrides = append(overrides, a)
		}
	}
	return documents, overrides
}

func (p *tenantPolicy) forget(name documentName) {
	delete(p.documents, name)
	delete(p.parsed, name)
	delete(p.parseErrors, name)
}

func (d Document) parse() (policy.Policy, error) {
	parsed, err := policy.ParseKept(d.Kind, []byte(d.Text))
	if err != nil {
		return policy.Policy{}, fmt.Errorf("%s %s/%s: %w", d.Kind, d.Namespace, d.Name, err)
	}
	return parsed, nil
}

// restrictsWith reports whether policies restrict the tenant's containers. Those that frontends look up do so there:
// the tables here deny in any case.
func (p *tenantPolicy) restrictsWith(next dpapi.TenantPolicies, around compileInputs) bool {
	if around.offloaded {
		return p.couldRestrict()
	}
	return next.Restricts()
}

// couldRestrict reports whether a policy that is not in audit mode was received, or may be in the kernel.
func (p *tenantPolicy) couldRestrict() bool {
	if p.unread != nil {
		return true
	}
	for _, read := range p.parsed {
		if !read.Audit {
			return true
		}
	}
	return false
}
