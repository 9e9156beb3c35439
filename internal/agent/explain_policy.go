package agent

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
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
	// Access is the egress rule, the service or the setting for nodes that decides, if the peer is no container; empty
	// in the Reason of the policies, which decide too
	Access  string
	Backend netip.AddrPort // of the service that is the destination, as containers see it; invalid for others
}

// Connection is the connection to explain; it need not exist.
type Connection struct {
	Source, Destination netip.Addr
	Protocol            uint8
	Port                uint16        // of the destination
	SourcePort          uint16        // by which an exposed port chooses an endpoint; 0: not known
	Tenant              string        // for own CIDRs only: needed if several tenants here use the addresses
	PeerApp             address.AppID // for own CIDRs only: app of the peer that is not on this node
}

// Why returns the verdicts for a connection at each of its endpoints that is on this node: none, one or two, and more
// if the destination is a service.
func (c *Core) Why(of Connection) ([]Reason, error) {
	from, to := c.Explain(of.Source), c.Explain(of.Destination)
	if reasons, is, err := c.whyService(of, from); is {
		return reasons, err
	}
	if reasons, is, err := c.whyExposed(of, from); is {
		return reasons, err
	}
	if reasons, is, err := c.whyBeyond(of, from, to); is {
		return reasons, err
	}
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

// whyBeyond is Why for a container here and a peer that is no container: a host outside of the cluster, or a node. It
// returns false for other ends.
func (c *Core) whyBeyond(of Connection, from, to Explanation) (all []Reason, is bool, err error) {
	direction, own, given, far := policy.Egress, from, of.Destination, to
	if from.Endpoint == nil {
		direction, own, given, far = policy.Ingress, to, of.Source, from
	}
	if own.Outside != nil && direction == policy.Ingress {
		own.Endpoint, own.Plaintext = own.Outside, own.Outside.Attachments[0].Plaintext
	}
	if own.Endpoint == nil || !own.Plaintext.IsValid() {
		return nil, false, nil
	}
	peer, node := c.beyond(own.Plaintext, given, far)
	if !peer.IsValid() {
		return nil, false, nil
	}
	here := address.Split(own.Plaintext)
	r := Reason{
		Direction: direction, Tenant: own.Endpoint.Tenant, Endpoint: own.Endpoint, Peer: peer, Own: here.App,
	}
	isOwn := node && address.Split(peer).Node == here.Node
	switch {
	case direction == policy.Ingress && isOwn:
		r.Allowed, r.Access = true, "a node always reaches its own containers"
		return []Reason{r}, true, nil
	case direction == policy.Ingress && !node:
		if r.Allowed, err = c.IsExposed(own.Plaintext, of); err != nil {
			return nil, true, err
		}
		if r.Access = "hosts outside reach this port by an exposed port of a service, or by a host port"; !r.Allowed {
			r.Access = "hosts outside only answer: they open no connections to this port, which no service and " +
				"no host port exposes"
			return []Reason{r}, true, nil
		}
	default:
		access, err := c.Access(here.Tenant, peer)
		if err != nil {
			return nil, true, err
		}
		r.Allowed, r.Access = access.Allowed, access.Because
	}
	if isOwn { // no policy applies between a node and its own containers
		return []Reason{r}, true, nil
	}
	q := dpapi.PolicyQuery{Tenant: here.Tenant, Local: own.Plaintext, Remote: peer, LocalApp: here.App}
	by, err := c.why(of, direction, own.Endpoint.Tenant, q)
	by.Endpoint = own.Endpoint
	return []Reason{r, by}, true, err
}

// beyond returns the address by which the tables know a peer of a container that is no container: that of a host
// outside of the cluster, or NODE::1. It returns the zero Addr for others.
func (c *Core) beyond(own, given netip.Addr, far Explanation) (peer netip.Addr, node bool) {
	if !far.Plaintext.IsValid() {
		if given.Is6() && !c.plan.Private.Contains(given) {
			return given, false
		}
		return peer, false
	}
	p, here := address.Split(far.Plaintext), address.Split(own)
	at := tenant.NodeAddress(p.Node)
	if far.Plaintext == at || p.App == address.GatewayApp && p.Tenant == here.Tenant {
		return at, true
	}
	return peer, false
}

// Access is what the tables of this node say of packets between a tenant's containers and a peer that is no container.
type Access struct {
	dpapi.AccessEntry
	Allowed bool
	Drop    dropreason.Reason // of a packet from the container, if it is not allowed
	Because string            // what decides
}

// Access looks up what a tenant id may reach: a host outside of the cluster, or a node at NODE::1.
func (c *Core) Access(id address.TenantID, peer netip.Addr) (a Access, err error) {
	of, _ := c.TenantOf(id)
	var found bool
	if a.AccessEntry, found, err = c.driver.LookupAccess(id, peer); err != nil {
		return a, err
	}
	if c.plan.Base.Contains(peer) {
		a.Allowed = found && a.Action == dpapi.AccessNode
		if a.Because = fmt.Sprintf("tenant %s reaches nodes in %v", of.Name, a.To); !a.Allowed {
			a.Drop = dropreason.ToNode
			a.Because = fmt.Sprintf("tenant %[1]s does not reach the node: pilaster tenant set %[1]s --nodes allow",
				of.Name)
		}
		return a, nil
	}
	if !found {
		a.Drop = dropreason.DstNotPrivate
		a.Because = fmt.Sprintf("tenant %s has no egress rules", of.Name) + c.insteadOf(peer, of.Name)
		return a, nil
	}
	protected, isProtected, err := c.driver.LookupAccess(0, peer)
	if err != nil {
		return a, err
	}
	if isProtected {
		a.Action, a.To, a.Gateways = dpapi.AccessDeny, protected.To, nil
	}
	switch i := slices.IndexFunc(of.Egress, func(r tenant.EgressRule) bool { return r.To == a.To }); {
	case isProtected:
		a.Because = fmt.Sprintf("no egress rule leads to %v, which is protected from all tenants", a.To)
	case i >= 0:
		a.Because = fmt.Sprintf("egress rule to %v of tenant %s", a.To, of.Name)
		for j, g := range of.Egress[i].Via {
			a.Because += [2]string{" via ", ", "}[min(j, 1)] + g.Node
		}
	case slices.Contains(of.Protected, a.To):
		a.Because = fmt.Sprintf("protected prefix %v of the cluster, which no egress rule of tenant %s names", a.To,
			of.Name)
	default:
		a.Because = fmt.Sprintf("no egress rule of tenant %s contains it", of.Name)
	}
	if a.Allowed = a.Action == dpapi.AccessOutside || a.Action == dpapi.AccessGateway; !a.Allowed {
		a.Drop = dropreason.EgressDenied
		a.Because += c.insteadOf(peer, of.Name)
	}
	return a, nil
}

// insteadOf says which address containers use, if peer is an external address of services of their tenant.
func (c *Core) insteadOf(peer netip.Addr, of string) (hint string) {
	for _, s := range c.services.At(peer) {
		if s.Tenant == of && slices.Contains(s.Outside(), peer) {
			hint += fmt.Sprintf("; it is an external address of service %v: containers use %v", s.Name, s.Address)
		}
	}
	return hint
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
