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
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/service"
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
		a.Drop, a.Because = dropreason.DstNotPrivate, fmt.Sprintf("tenant %s has no egress rules", of.Name)
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
	}
	return a, nil
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

// shownBackends is the most backends of a service for which Why has verdicts.
const shownBackends = 10

// Served is what the tables of this node say of packets to a service.
type Served struct {
	dpapi.Frontend                   // without an address if no entry is looked up
	Drop           dropreason.Reason // of the packets; 0 if backends get them
	Because        string            // why, or which backend gets a connection
}

// Service looks up the service that containers of a tenant id reach at a destination. It returns false if that is no
// address of services.
func (c *Core) Service(id address.TenantID, of Connection) (s Served, is bool, err error) {
	all, err := c.plan.ServicePrefix()
	if err != nil || !all.Contains(of.Destination) {
		return s, false, nil
	}
	t, _ := c.TenantOf(id)
	own, err := c.plan.TenantServices(t.ServicesNumber)
	switch protocol := service.Protocol(of.Protocol); {
	case protocol != service.TCP && protocol != service.UDP:
		s.Drop, s.Because = dropreason.ServiceProtocol, "addresses of services answer TCP and UDP on their ports only"
	case err != nil || !own.Contains(of.Destination):
		s.Drop, s.Because = dropreason.NoService, fmt.Sprintf("%v is no service of tenant %s", of.Destination, t.Name)
	case of.Destination == own.Addr():
		s.Drop, s.Because = dropreason.NoSession, "the address is the alias at which a container sees itself behind a "+
			"service, and takes only answers"
	}
	if s.Drop != 0 {
		return s, true, nil
	}
	key := dpapi.FrontendKey{Address: netip.AddrPortFrom(of.Destination, of.Port), Protocol: of.Protocol}
	f, found, err := c.driver.LookupService(key)
	s.Frontend = f
	switch s.FrontendKey = key; {
	case err != nil:
	case !found:
		s.Drop, s.Because = dropreason.NoService, fmt.Sprintf("tenant %s has no service with this address and "+
			"port %d/%v", t.Name, of.Port, service.Protocol(of.Protocol))
	case len(s.Backends) == 0:
		s.Drop, s.Because = dropreason.NoBackend, "the service has no endpoint for clients on this node; pilaster "+
			"service describe shows why"
	default:
		s.Because = fmt.Sprintf("the service has %s, of which a connection gets one at random",
			humanize.Of(len(s.Backends), "endpoint", "endpoints"))
		if s.Affinity != 0 {
			s.Because += fmt.Sprintf(", or that of the client's connections in the last %v", s.Affinity)
		}
	}
	return s, true, err
}

// whyService is Why for a container here and a service: one verdict that says so, and those for its backends, whose
// addresses and ports policies see. It returns false for other ends.
func (c *Core) whyService(of Connection, from Explanation) (all []Reason, is bool, err error) {
	if from.Endpoint == nil || !from.Plaintext.IsValid() {
		return nil, false, nil
	}
	here := address.Split(from.Plaintext)
	s, is, err := c.Service(here.Tenant, of)
	if err != nil || !is {
		return nil, is, err
	}
	r := Reason{
		Direction: policy.Egress, Tenant: from.Endpoint.Tenant, Endpoint: from.Endpoint, Peer: of.Destination,
		Own: here.App, Allowed: s.Drop == 0, Access: s.Because,
	}
	if s.Drop == 0 {
		r.Access += "; policies see the endpoint and its port"
	}
	shown := s.Backends[:min(len(s.Backends), shownBackends)]
	if len(shown) < len(s.Backends) {
		r.Access += fmt.Sprintf("; these are the verdicts for %d", len(shown))
	}
	all = []Reason{r}
	for _, b := range shown {
		to := of
		to.Destination, to.Port = b.Plain, b.Port
		reasons, err := []Reason{r}, error(nil)
		if b.Plain == from.Plaintext {
			reasons[0].Access = "the container is its own endpoint, and no policy applies to what it sends itself"
			reasons[0].Peer = b.Plain
		} else if reasons, err = c.Why(to); err != nil {
			return nil, true, err
		}
		for i := range reasons {
			reasons[i].Backend = netip.AddrPortFrom(b.Seen, b.Port)
		}
		all = append(all, reasons...)
	}
	return all, true, nil
}

// Exposed is what the tables of this node say of packets that hosts outside send to an exposed port.
type Exposed struct {
	Served
	IsNode bool           // the address is this node's
	Name   string         // of the service or host port, for people
	Tenant tenant.Tenant  // whose it is
	Choice *dpapi.Choice  // what the connection gets; nil if the client's port decides and is not known
	Client netip.AddrPort // whose address is checked
}

// ToNode reports whether the node's own stack gets the packets.
func (e Exposed) ToNode() bool {
	return e.IsNode && (e.Drop == dropreason.NoService || e.Drop == dropreason.ServiceProtocol)
}

// Exposed looks up the exposed port that a host outside reaches at a destination by this node. It returns false if the
// address has no exposed ports here. The checks are in the order of exposed_in (exposed_stages.h).
func (c *Core) Exposed(of Connection) (e Exposed, is bool, err error) {
	if e.IsNode, is, err = c.driver.LookupExposed(of.Destination); err != nil || !is {
		return e, is, err
	}
	e.Client = netip.AddrPortFrom(of.Source, of.SourcePort)
	protocol := service.Protocol(of.Protocol)
	if protocol != service.TCP && protocol != service.UDP {
		e.Drop, e.Because = dropreason.ServiceProtocol, "exposed ports are of TCP and UDP"
		return e, true, nil
	}
	key := dpapi.FrontendKey{Address: netip.AddrPortFrom(of.Destination, of.Port), Protocol: of.Protocol}
	found := false
	if e.Frontend, found, err = c.driver.LookupService(key); err != nil {
		return e, true, err
	}
	e.FrontendKey = key
	if e.IsNode && !found {
		e.Drop, e.Because = dropreason.NoService, fmt.Sprintf("no service of a tenant on this node has node port "+
			"%[1]d/%[2]v, and no container here has host port %[1]d/%[2]v", of.Port, protocol)
		return e, true, nil
	}
	if why, err := c.NoClient(of.Source); err != nil || why != "" {
		e.Drop, e.Because = dropreason.ExposedSource, why
		return e, true, err
	}
	if !found {
		e.Drop, e.Because = dropreason.NoService, fmt.Sprintf("the address does not have port %d/%v: pilaster explain "+
			"%v names its ports", of.Port, protocol, of.Destination)
		return e, true, nil
	}
	return e, true, c.chooseExposed(&e, of)
}

// nameExposed finds the container with a host port, or the service by what the orchestrator has sent, and the tenant.
func (c *Core) nameExposed(e *Exposed) (s service.Service) {
	for _, k := range c.tenants.All() {
		if k.Tenant.ServicesNumber == e.Frontend.Exposed.Services {
			e.Tenant = k.Tenant
		}
	}
	if holder, is := c.services.HostPort(e.FrontendKey); is && e.IsNode {
		e.Name = fmt.Sprintf("host port %d/%v of %s", e.Address.Port(), service.Protocol(e.Protocol), holder)
		return s
	}
	e.Name = "a service"
	for _, of := range c.services.At(e.Address.Addr()) {
		if of.Tenant == e.Tenant.Name && slices.ContainsFunc(of.Ports, func(p service.Port) bool {
			at := p.Port
			if e.IsNode {
				at = p.NodePort
			}
			return at == e.Address.Port() && uint8(p.Protocol) == e.Protocol
		}) {
			s, e.Name = of, "service "+of.Name.String()
		}
	}
	return s
}

// chooseExposed finds the endpoint that a connection gets.
func (c *Core) chooseExposed(e *Exposed, of Connection) error {
	s := c.nameExposed(e)
	e.Because = fmt.Sprintf("%s of tenant %s", e.Name, e.Tenant.Name)
	switch {
	case len(e.Backends) == 0 && s.TrafficPolicy == service.Local:
		e.Drop = dropreason.NoBackend
		e.Because += " has the traffic policy local, and no endpoint on this node that can serve: route its address " +
			"to nodes with ready endpoints"
		return nil
	case len(e.Backends) == 0:
		e.Drop = dropreason.NoBackend
		e.Because += " has no endpoint that can serve: pilaster service describe shows why"
		return nil
	case of.SourcePort == 0 && e.Affinity == 0 && len(e.Backends) > 1:
		e.Because += fmt.Sprintf(" has %d endpoints, of which the client's port chooses one: --source-port names it",
			len(e.Backends))
		return nil
	}
	choice, ok, err := c.driver.ChooseBackend(e.FrontendKey, e.Client)
	if err != nil {
		return err
	}
	if !ok { // its table has been replaced since it was read
		e.Drop, e.Because = dropreason.NoBackend, e.Because+" has changed at this moment: repeat the command"
		return nil
	}
	e.Choice = &choice
	e.Because += " has " + humanize.Of(len(e.Backends), "endpoint", "endpoints")
	switch {
	case choice.Connected:
		e.Because += "; the client has a connection from this port, which keeps its endpoint"
	case e.Affinity != 0:
		e.Because += "; with affinity, the client's address chooses one"
	case len(e.Backends) > 1:
		e.Because += "; the client's address and port choose one"
	}
	return nil
}

// NoClient returns why packets with a source are refused at exposed ports; empty if they are not. It is the opposite of
// is_client (exposed_stages.h).
func (c *Core) NoClient(source netip.Addr) (why string, err error) {
	services, _ := c.plan.ServicePrefix()
	own := []netip.Prefix{c.plan.Base, c.plan.Private, services, c.plan.ReservedPrefix()}
	if tenant.IsEgressAddress(source) {
		own = append(own, c.plan.Egress)
	}
	for _, p := range own {
		if p.Contains(source) {
			return fmt.Sprintf("the source is in %v of the cluster: containers use the service's own address, and "+
				"processes of nodes reach exposed ports of their own node only", p), nil
		}
	}
	protected, is, err := c.driver.LookupAccess(0, source)
	if err != nil || !is {
		return "", err
	}
	return fmt.Sprintf("the source is in %v, which is no prefix of hosts outside", protected.To), nil
}

// IsExposed reports whether the port of a connection is one at which a container of this node is an endpoint of an
// exposed port.
func (c *Core) IsExposed(plain netip.Addr, of Connection) (bool, error) {
	return c.driver.LookupTarget(netip.AddrPortFrom(c.seen(plain), of.Port), of.Protocol)
}

// whyExposed is Why for a host outside and an exposed port: one verdict that says which endpoint the connection gets,
// and those of the policies for the endpoints on this node. It returns false for other ends.
func (c *Core) whyExposed(of Connection, from Explanation) (all []Reason, is bool, err error) {
	if from.Endpoint != nil {
		return nil, false, nil
	}
	e, is, err := c.Exposed(of)
	if err != nil || !is {
		return nil, is, err
	}
	r := Reason{
		Direction: policy.Ingress, Tenant: e.Tenant.Name, Peer: of.Source, Allowed: e.Drop == 0, Access: e.Because,
	}
	if e.Choice != nil {
		r.Backend = netip.AddrPortFrom(e.Choice.Seen, e.Choice.Port)
	}
	if all = []Reason{r}; e.Drop != 0 {
		return all, true, nil
	}
	var elsewhere []string
	for _, b := range e.Backends {
		to, at := of, netip.AddrPortFrom(b.Seen, b.Port)
		to.Destination, to.Port = b.Plain, b.Port
		switch reasons, _, err := c.whyBeyond(to, from, c.Explain(b.Plain)); {
		case err != nil:
			return nil, true, err
		case len(reasons) == 0:
			elsewhere = append(elsewhere, at.String())
		case len(all) <= shownBackends:
			last := reasons[len(reasons)-1] // the first says that the port is exposed
			last.Backend = at
			all = append(all, last)
		}
	}
	if n := len(elsewhere); n > 0 {
		all[0].Access += fmt.Sprintf("; for %s on other nodes run the command there, to %s",
			humanize.Of(n, "endpoint", "endpoints"), strings.Join(elsewhere[:min(n, shownBackends)], ", "))
	}
	return all, true, nil
}
