package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

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
