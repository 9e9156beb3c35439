package agent

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// Reason is the verdict of this node's policies for one direction of a connection.
type Reason struct {
	Direction   policy.Direction
	Tenant      string
	Endpoint    *endpoint.Record // nil if it is not on this node
	Peer        netip.Addr       // canonical, or as in the tenant's overlay
	HasPolicies bool             // the tenant has policies
	Own, Far    address.AppID
	Allowed     bool
	CrossTenant bool             // the endpoints belong to two tenants, which cannot connect
	By, Audit   *policy.RuleName // the deciding rule, and the audit rule that would have denied; nil if none
}

// Connection is the connection to explain; it need not exist.
type Connection struct {
	Source, Destination netip.Addr
	Protocol            uint8
	Port                uint16        // of the destination
	Tenant              string        // for own CIDRs only: needed if several tenants here use the addresses
	PeerApp             address.AppID // for own CIDRs only: app of the peer that is not on this node
}

// Why returns the verdicts for a connection at each of its endpoints that is on this node: none, one or two.
func (c *Core) Why(of Connection) ([]Reason, error) {
	from, to := c.Explain(of.Source), c.Explain(of.Destination)
	if !from.Plaintext.IsValid() || !to.Plaintext.IsValid() {
		if end := [2]netip.Addr{of.Source, of.Destination}; from.Endpoint != nil || to.Endpoint != nil {
			unknown := end[0]
			if from.Plaintext.IsValid() {
				unknown = end[1]
			}
			return nil, refusal.New(
				refusal.ErrNever,
				"this node cannot resolve %v to a container, and containers of network %s connect only within "+
					"their tenant",
				unknown,
				tenant.NetworksWithout(tenant.OwnCIDRs),
			)
		}
		return c.whyOverlay(of, from.Overlays, to.Overlays)
	}
	sameTenant := func(a, b Explanation) bool {
		return a.Tenant != "" && a.Tenant == b.Tenant ||
			address.Split(a.Plaintext).Tenant == address.Split(b.Plaintext).Tenant
	}
	var all []Reason
	for _, direction := range [2]policy.Direction{policy.Egress, policy.Ingress} {
		own, far := from, to
		if direction == policy.Ingress {
			own, far = to, from
		}
		if own.Endpoint == nil {
			continue
		}
		here, there := address.Split(own.Plaintext), address.Split(far.Plaintext)
		if !sameTenant(own, far) {
			all = append(
				all,
				Reason{
					Direction:   direction,
					Tenant:      own.Endpoint.Tenant,
					Endpoint:    own.Endpoint,
					Peer:        far.Plaintext,
					Own:         here.App,
					Far:         there.App,
					CrossTenant: true,
				},
			)
			continue
		}
		r, err := c.why(
			of,
			direction,
			own.Endpoint.Tenant,
			dpapi.PolicyQuery{
				Tenant:    here.Tenant,
				Local:     own.Plaintext,
				Remote:    far.Plaintext,
				LocalApp:  here.App,
				RemoteApp: there.App,
			},
		)
		if err != nil {
			return nil, err
		}
		r.Endpoint = own.Endpoint
		all = append(all, r)
	}
	return all, nil
}

// whyOverlay is Why for networks whose addresses do not contain the app. Their nodes have the rules of all apps of a
// hosted tenant, so the result has both directions.
func (c *Core) whyOverlay(of Connection, from, to []OverlayMatch) ([]Reason, error) {
	ends := [2]netip.Addr{of.Source, of.Destination}
	here := map[string]address.TenantID{} // by tenant of which one of the two endpoints is here, or has its rules here
	for i, those := range [2][]OverlayMatch{from, to} {
		for _, o := range those {
			if of.Tenant != "" && of.Tenant != o.Tenant {
				continue
			}
			if o.Endpoint != nil {
				here[o.Tenant] = o.Endpoint.TenantID
			} else if _, id, is := c.frontedApp(o.Tenant, ends[i]); is && here[o.Tenant] == 0 {
				here[o.Tenant] = id
			}
		}
	}
	names := slices.Sorted(maps.Keys(here))
	if len(names) > 1 {
		return nil, refusal.New(
			refusal.ErrNever,
			"containers of tenants %s on this node use %v or %v; select one, for example --tenant %s",
			strings.Join(names, ", "),
			of.Source,
			of.Destination,
			names[0],
		)
	}
	if len(names) == 0 {
		return nil, nil
	}
	name := names[0]
	apps, records := [2]address.AppID{}, [2]*endpoint.Record{}
	for i, those := range [2][]OverlayMatch{from, to} {
		at := slices.IndexFunc(those, func(o OverlayMatch) bool { return o.Tenant == name && o.Region == "" })
		fronted, _, isFronted := c.frontedApp(name, ends[i])
		switch {
		case at < 0:
			apps[i] = policy.Outside
		case those[at].Endpoint != nil:
			records[i] = those[at].Endpoint
			apps[i] = cmp.Or(records[i].AppNow, records[i].App)
		case isFronted:
			apps[i] = fronted
		case of.PeerApp == 0 && c.appElsewhere(name, ends[i], &apps[i]):
		case of.PeerApp == 0:
			return nil, refusal.New(
				refusal.ErrInvalid,
				"%v is not on this node, and addresses of network %s do not contain the app; set --peer-app to "+
					"the app that `pilaster endpoint list` shows on its node",
				ends[i],
				tenant.NetworksWith(tenant.PolicyAtReceiver),
			)
		default:
			apps[i] = of.PeerApp
		}
	}
	known, _, _ := c.tenants.Get(name)
	if !slices.ContainsFunc(known.Apps, func(a App) bool { return a.ID == of.PeerApp }) && of.PeerApp != 0 {
		return nil, refusal.New(refusal.ErrNever, "tenant %s has no app %d known to this node", name, of.PeerApp)
	}
	for i := range apps {
		if records[i] == nil && apps[i] != policy.Outside {
			of.PeerApp = apps[i]
		}
	}
	var all []Reason
	for i, direction := range [2]policy.Direction{policy.Egress, policy.Ingress} {
		if apps[i] == policy.Outside {
			continue // no rules apply outside the tenant
		}
		if records[i] == nil && known.Tenant.HasIdentifiers() {
			continue // the other node has the rules of its container
		}
		r, err := c.why(
			of,
			direction,
			name,
			dpapi.PolicyQuery{
				Tenant:    here[name],
				Local:     ends[i],
				Remote:    ends[1-i],
				LocalApp:  apps[i],
				RemoteApp: apps[1-i],
			},
		)
		if err != nil {
			return nil, err
		}
		r.Endpoint = records[i]
		all = append(all, r)
	}
	return all, nil
}

// appElsewhere sets the app of a container on another node, if a network knows it.
func (c *Core) appElsewhere(tenant string, a netip.Addr, app *address.AppID) (known bool) {
	_ = c.networks.Each(func(_ string, n Network) error {
		if by, ok := n.(network.AppProvider); ok && !known {
			*app, known = by.AppOf(tenant, a)
		}
		return nil
	})
	return known
}

func (c *Core) why(of Connection, direction policy.Direction, tenant string, q dpapi.PolicyQuery) (Reason, error) {
	if q.Protocol = of.Protocol; direction == policy.Egress {
		q.RemotePort = of.Port
	} else {
		q.LocalPort = of.Port
	}
	if c.policies.View()[tenant].Offloaded {
		return Reason{}, c.errOffloaded(tenant, of)
	}
	answer, err := c.driver.LookupPolicy(q)
	if err != nil {
		return Reason{}, err
	}
	return Reason{
		Direction: direction, Tenant: tenant, Peer: q.Remote, Own: answer.LocalApp, Far: answer.RemoteApp,
		Allowed:     answer.Allowed[direction],
		HasPolicies: c.policies.View()[tenant].Selects(), By: c.ruleName(tenant, answer.Rules[direction]),
		Audit: c.ruleName(tenant, answer.Audits[direction]),
	}, nil
}
