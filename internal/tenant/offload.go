package tenant

import (
	"fmt"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

// Limits of offloads.
const (
	MaxOffloads     = 64        // of a tenant
	MaxFrontends    = 16        // of an offload, with draining ones
	MaxActive       = 8         // of these, frontends that packets are sent to
	MaxOffloadID    = 1<<24 - 1 // NSH's service path identifier has 24 bits (RFC 8300 §2.3)
	MaxOffloaded    = 8192      // addresses of a node's offloaded containers, of all tenants
	OffloadOverhead = 96        // bytes that NSH with its context adds to a tunnel packet
)

// OffloadPhase is a step of an offload's activation or end (Nezha §4.2).
type OffloadPhase string

const (
	OffloadPreparing OffloadPhase = "preparing" // frontends load the rules; packets go to the backend
	OffloadDual      OffloadPhase = "dual"      // packets go to the frontends; the backend has its rules too
	OffloadActive    OffloadPhase = "active"    // packets go to the frontends; the backend has dropped its rules
	OffloadReturning OffloadPhase = "returning" // packets go to the frontends; the backend loads its rules again
	OffloadEnding    OffloadPhase = "ending"    // packets go to the backend; the frontends still have the rules
)

// OffloadPhases lists the phases in their order; the index is the number in the API.
var OffloadPhases = []OffloadPhase{
	"", OffloadPreparing, OffloadDual, OffloadActive, OffloadReturning, OffloadEnding,
}

// Fronted reports whether senders use the frontends.
func (p OffloadPhase) Fronted() bool {
	return p == OffloadDual || p == OffloadActive || p == OffloadReturning
}

// Offload has the rules for a tenant's containers of one node, the backend, looked up on others, the frontends.
type Offload struct {
	ID        uint32
	Node      string       // the backend
	Prefix    netip.Prefix // its /64
	Phase     OffloadPhase
	Epoch     uint32
	Frontends []Frontend
	Since     uint64              // the tenant's changes at which phase or frontends changed last
	Endpoints []OffloadedEndpoint // the backend's containers of the tenant, as it has reported them
}

// Frontend is a node that looks up rules for an offload.
type Frontend struct {
	Node     string
	Prefix   netip.Prefix // its /64
	Draining bool         // packets from it are still accepted, none are sent to it
}

// OffloadedEndpoint is a container of a backend.
type OffloadedEndpoint struct {
	Address netip.Addr
	App     address.AppID
}

// Active returns the frontends that packets are sent to.
func (o Offload) Active() (all []Frontend) {
	for _, f := range o.Frontends {
		if !f.Draining {
			all = append(all, f)
		}
	}
	return all
}

// HasFrontend reports whether a node is a frontend.
func (o Offload) HasFrontend(node netip.Prefix) bool {
	return slices.ContainsFunc(o.Frontends, func(f Frontend) bool { return f.Prefix == node })
}

// Equal compares all fields.
func (o Offload) Equal(other Offload) bool {
	return o.ID == other.ID && o.Node == other.Node && o.Prefix == other.Prefix && o.Phase == other.Phase &&
		o.Epoch == other.Epoch && o.Since == other.Since && slices.Equal(o.Frontends, other.Frontends) &&
		slices.Equal(o.Endpoints, other.Endpoints)
}

// Check refuses an offload that no orchestrator can have written.
func (o Offload) Check() error {
	active := len(o.Active())
	switch {
	case o.ID < 1 || o.ID > MaxOffloadID:
		return fmt.Errorf("offload %d: ids are 1 to %d", o.ID, MaxOffloadID)
	case o.Phase == "" || !slices.Contains(OffloadPhases, o.Phase):
		return fmt.Errorf("offload %d: phase %q is unknown", o.ID, o.Phase)
	case o.Epoch == 0:
		return fmt.Errorf("offload %d has no epoch", o.ID)
	case o.Prefix.Bits() != address.NodeBits || !o.Prefix.Addr().Is6() || o.Prefix != o.Prefix.Masked():
		return fmt.Errorf("offload %d: backend %v is not a /%d", o.ID, o.Prefix, address.NodeBits)
	case len(o.Frontends) > MaxFrontends || active > MaxActive || active&(active-1) != 0:
		return fmt.Errorf("offload %d: %d frontends, %d of them active; at most %d, and 1, 2, 4 or %d active",
			o.ID, len(o.Frontends), active, MaxFrontends, MaxActive)
	case active == 0 && o.Phase.Fronted():
		return fmt.Errorf("offload %d in phase %s has no active frontend", o.ID, o.Phase)
	}
	for i, f := range o.Frontends {
		if f.Prefix.Bits() != address.NodeBits || !f.Prefix.Addr().Is6() || f.Prefix != f.Prefix.Masked() ||
			f.Prefix == o.Prefix {
			return fmt.Errorf("offload %d: frontend %v is not the /%d of another node", o.ID, f.Prefix,
				address.NodeBits)
		}
		if slices.ContainsFunc(o.Frontends[:i], func(g Frontend) bool { return g.Prefix == f.Prefix }) {
			return fmt.Errorf("offload %d: frontend %v is listed twice", o.ID, f.Prefix)
		}
	}
	return nil
}

// ParseOffloads converts and checks the offloads of a tenant.
func ParseOffloads(all []*pilasterv1.Offload) ([]Offload, error) {
	if len(all) > MaxOffloads {
		return nil, fmt.Errorf("%d offloads, at most %d", len(all), MaxOffloads)
	}
	var parsed []Offload
	for _, p := range all {
		o := Offload{ID: p.GetId(), Node: p.GetNode(), Epoch: p.GetEpoch(), Since: p.GetSince()}
		if i := int(p.GetPhase()); i > 0 && i < len(OffloadPhases) {
			o.Phase = OffloadPhases[i]
		}
		var err error
		if o.Prefix, err = netip.ParsePrefix(p.GetPrefix()); err != nil {
			return nil, fmt.Errorf("offload %d: %w", o.ID, err)
		}
		for _, f := range p.GetFrontends() {
			prefix, err := netip.ParsePrefix(f.GetPrefix())
			if err != nil {
				return nil, fmt.Errorf("offload %d: %w", o.ID, err)
			}
			o.Frontends = append(o.Frontends, Frontend{f.GetNode(), prefix, f.GetDraining()})
		}
		if o.Endpoints, err = ParseOffloaded(p.GetEndpoints()); err != nil {
			return nil, fmt.Errorf("offload %d: %w", o.ID, err)
		}
		if err := o.Check(); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(parsed, func(q Offload) bool { return q.ID == o.ID || q.Prefix == o.Prefix }) {
			return nil, fmt.Errorf("offload %d of backend %v is listed twice", o.ID, o.Prefix)
		}
		parsed = append(parsed, o)
	}
	return parsed, nil
}

// ParseOffloaded converts a backend's report, sorted by address.
func ParseOffloaded(all []*pilasterv1.OffloadedEndpoint) (parsed []OffloadedEndpoint, err error) {
	for _, e := range all {
		if e.GetApp() == 0 || e.GetApp() >= uint32(address.FirstReservedApp) {
			return nil, fmt.Errorf("app %#x is not in the range of containers' apps", e.GetApp())
		}
		for _, raw := range e.GetAddresses() {
			a, ok := netip.AddrFromSlice(raw)
			if !ok || a.Is4In6() {
				return nil, fmt.Errorf("address %x has %d bytes", raw, len(raw))
			}
			parsed = append(parsed, OffloadedEndpoint{a, address.AppID(e.GetApp())})
		}
	}
	slices.SortFunc(parsed, func(a, b OffloadedEndpoint) int { return a.Address.Compare(b.Address) })
	return parsed, nil
}
