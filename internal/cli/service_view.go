package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/service"
)

// serviceView is a service as JSON.
type serviceView struct {
	Tenant          string            `json:"tenant"`
	Namespace       string            `json:"namespace,omitempty"`
	Name            string            `json:"name"`
	Address         string            `json:"address,omitempty"` // none if headless
	Headless        bool              `json:"headless,omitempty"`
	Ports           []servicePortView `json:"ports"`
	Selector        map[string]string `json:"selector,omitempty"`
	AffinitySeconds int64             `json:"affinitySeconds,omitempty"`
	PublishNotReady bool              `json:"publishNotReady,omitempty"`
	Distribution    string            `json:"distribution,omitempty"`
	ExternalIPs     []string          `json:"externalIPs,omitempty"`
	LoadBalancerIP  string            `json:"loadBalancerIP,omitempty"` // none without a load balancer
	TrafficPolicy   string            `json:"trafficPolicy,omitempty"`  // of hosts outside: "Cluster" or "Local"
	Created         time.Time         `json:"created"`

	Action    string         `json:"action,omitempty"` // of apply: created, configured, unchanged
	DryRun    bool           `json:"dryRun,omitempty"`
	Counts    *serviceCounts `json:"endpointCounts,omitempty"` // of list and describe
	Endpoints []endpointOf   `json:"endpoints,omitzero"`       // of describe
	Nodes     []string       `json:"nodes,omitzero"`           // of describe: those that host the tenant
}

type servicePortView struct {
	Name     string `json:"name,omitempty"`
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
	Target   uint16 `json:"targetPort"`
	NodePort uint16 `json:"nodePort,omitempty"`
}

type serviceCounts struct {
	Ready uint32 `json:"ready"`
	All   uint32 `json:"all"`
}

// endpointOf is an endpoint of a service as JSON.
type endpointOf struct {
	Address string `json:"address"` // plaintext
	Name    string `json:"name,omitempty"`
	Node    string `json:"node,omitempty"` // that reports it; none for fixed endpoints
	Zone    string `json:"zone,omitempty"`
	State   string `json:"state"` // "ready", "serving", "draining" or "excluded"
	Why     string `json:"why,omitempty"`
}

func viewService(m *pilasterv1.Service) (serviceView, error) {
	is, err := service.FromProto(m)
	if err != nil {
		return serviceView{}, err
	}
	v := serviceView{
		Tenant: is.Tenant, Namespace: is.Namespace, Name: is.Name.Name, Address: m.GetAddress(), Headless: is.Headless,
		Ports: []servicePortView{}, Selector: is.Selector, AffinitySeconds: int64(is.Affinity / time.Second),
		PublishNotReady: is.PublishNotReady, Distribution: string(is.Distribution), Created: is.Created,
	}
	for _, p := range is.Ports {
		v.Ports = append(v.Ports, servicePortView{p.Name, p.Protocol.String(), p.Port, p.Target, p.NodePort})
	}
	if is.IsExposed() {
		v.ExternalIPs, v.TrafficPolicy = m.GetExternalIps(), is.TrafficPolicy.String()
		v.LoadBalancerIP = m.GetLoadBalancerIp()
	}
	return v, nil
}

func (v serviceView) called() string {
	return service.Name{Namespace: v.Namespace, Name: v.Name}.String()
}

func (v serviceView) at() string {
	if v.Headless {
		return "headless"
	}
	return v.Address
}

// ports formats the ports: "http 80/TCP to 8080, 53/UDP".
func (v serviceView) ports() string {
	var all []string
	for _, p := range v.Ports {
		text := strings.TrimSpace(fmt.Sprintf("%s %d/%s", p.Name, p.Port, p.Protocol))
		if p.Target != p.Port {
			text += fmt.Sprintf(" to %d", p.Target)
		}
		all = append(all, text)
	}
	if len(all) == 0 {
		return "-"
	}
	return strings.Join(all, ", ")
}

// exposed formats where hosts outside of the cluster reach a service, "" if nowhere:
// "[2001:db8:7::9]:80/TCP, node port 30080/TCP to 80, policy Cluster".
func (v serviceView) exposed() string {
	var all []string
	at := v.ExternalIPs
	if v.LoadBalancerIP != "" && !slices.Contains(at, v.LoadBalancerIP) {
		at = append([]string{v.LoadBalancerIP}, at...)
	}
	for _, a := range at {
		for _, p := range v.Ports {
			all = append(all, fmt.Sprintf("[%s]:%d/%s", a, p.Port, p.Protocol))
		}
	}
	if ports := v.nodePorts(); ports != "" {
		all = append(all, ports)
	}
	if len(all) == 0 {
		return ""
	}
	return strings.Join(append(all, "policy "+v.TrafficPolicy), ", ")
}

// isAt reports whether hosts outside reach the service at an external or load-balancer address.
func (v serviceView) isAt(a netip.Addr) bool {
	return v.LoadBalancerIP == a.String() || slices.Contains(v.ExternalIPs, a.String())
}

// nodePorts formats the node ports: "node port 30080/TCP to 80, node port 30081/UDP to 53".
func (v serviceView) nodePorts() string {
	var all []string
	for _, p := range v.Ports {
		if p.NodePort != 0 {
			all = append(all, fmt.Sprintf("node port %d/%s to %d", p.NodePort, p.Protocol, p.Port))
		}
	}
	return strings.Join(all, ", ")
}

// states returns the endpoints that clients at a place get, and those that they do not.
func states(is service.Service, all []service.Slice, node, zone string) (views []endpointOf) {
	views = []endpointOf{}
	add := func(p service.Placed, state string) {
		views = append(views, endpointOf{p.Address.String(), p.Name, p.Node, p.Zone, state, p.Why})
	}
	c := service.Select(is, all, node, zone)
	for _, p := range c.Active {
		state := "serving"
		switch {
		case p.Unreachable:
			p.Why = service.WhyUnreachable + ", and none is ready"
		case p.Terminating:
			p.Why = "terminating, and none is ready"
		default:
			state = "ready"
		}
		add(p, state)
	}
	for _, p := range c.Draining {
		add(p, choose(p.Terminating || p.Unreachable, "draining", "excluded"))
	}
	for _, p := range c.Excluded {
		add(p, "excluded")
	}
	return views
}

// zoneOf returns the zone of a node as its agent reports it, or else its rack.
func zoneOf(node, rack string, all []service.Slice) string {
	for _, slice := range all {
		if slice.Node == node && slice.Zone != "" {
			return slice.Zone
		}
	}
	return rack
}

func printService(w io.Writer, v serviceView) {
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, value)
		}
	}
	row("service", v.called())
	row("tenant", v.Tenant)
	row("address", v.at())
	row("ports", v.ports())
	row("exposed", v.exposed())
	var labels []string
	for _, key := range slices.Sorted(maps.Keys(v.Selector)) {
		labels = append(labels, key+"="+v.Selector[key])
	}
	row("selector", strings.Join(labels, ","))
	if v.AffinitySeconds > 0 {
		row("affinity", fmt.Sprint("ClientIP, ", time.Duration(v.AffinitySeconds)*time.Second))
	}
	if v.PublishNotReady {
		row("publishes", "endpoints that are not ready, too")
	}
	row("distribution", v.Distribution)
	row("created", v.Created.Format(time.RFC3339))
	row("nodes", strings.Join(v.Nodes, ", "))
	row("endpoints", fmt.Sprintf("%d of %d ready", v.Counts.Ready, v.Counts.All))
	if len(v.Endpoints) == 0 {
		return
	}
	fmt.Fprint(w, "\nENDPOINT\tNAME\tNODE\tZONE\tSTATE\tWHY\n")
	for _, e := range v.Endpoints {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Address, cmp.Or(e.Name, "-"), cmp.Or(e.Node, "-"),
			cmp.Or(e.Zone, "-"), e.State, cmp.Or(e.Why, "-"))
	}
}

type explainedService struct {
	Prefix  netip.Prefix `json:"prefix"`            // of all services
	Number  uint32       `json:"number"`            // of the tenant
	Name    string       `json:"name,omitempty"`    // "namespace/name", if this node or an orchestrator knows it
	Ports   string       `json:"ports,omitempty"`   // likewise
	Outside string       `json:"outside,omitempty"` // likewise: where hosts outside reach it
	Alias   bool         `json:"alias,omitempty"`   // at which a container sees itself behind a service
	asked   bool         // the orchestrator
}

type explainedExposed struct {
	Tenant string `json:"tenant"`
	Name   string `json:"name"` // "namespace/name" of the service or pod, or the id of the container
	Ports  string `json:"ports"`
	As     string `json:"as"`                      // "external", "load-balancer", "node" or "host-port"
	Policy string `json:"trafficPolicy,omitempty"` // of a service
}

// addService adds the names of a service and of its tenant.
func (s *orchestratorSocket) addService(ctx context.Context, e *explanation) error {
	tenants, err := s.client().ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil {
		return err
	}
	e.Service.asked, e.Unknown = true, ""
	i := slices.IndexFunc(tenants.Msg.Tenants, func(t *pilasterv1.Tenant) bool {
		return e.Service.Number != 0 && t.ServicesNumber == e.Service.Number
	})
	if i < 0 {
		return nil
	}
	e.Tenant = &explainedTenant{Name: tenants.Msg.Tenants[i].Name}
	all, err := s.client().ListServices(ctx, connect.NewRequest(&pilasterv1.ListServicesRequest{Tenant: e.Tenant.Name}))
	if err != nil {
		return err
	}
	for _, its := range all.Msg.Services {
		v, err := viewService(its.Service)
		if err != nil {
			return err
		}
		if its.Service.Address == e.Address.String() {
			e.Service.set(v)
		}
	}
	return nil
}

func (s *explainedService) set(v serviceView) {
	s.Name, s.Ports, s.Outside = v.called(), v.ports(), v.exposed()
}

// addExposed adds the services that hosts outside reach at the address, and the pool that has it.
func (s *orchestratorSocket) addExposed(ctx context.Context, e *explanation) error {
	all, err := servicesAt(ctx, s.client(), e.Address)
	if err != nil {
		return err
	}
	pools, err := s.client().ListServicePools(ctx, connect.NewRequest(&pilasterv1.ListServicePoolsRequest{}))
	if err != nil {
		return err
	}
	e.asked = true
	if len(all) > 0 {
		e.Exposed = nil // as the agent knows them
	}
	for _, v := range all {
		e.expose(v, false)
	}
	for _, p := range pools.Msg.Pools {
		if prefix, err := netip.ParsePrefix(p.Prefix); err == nil && prefix.Contains(e.Address) {
			if e.Pool = p.Prefix; e.Kind == "foreign" {
				e.Kind = "pool"
			}
		}
	}
	return nil
}

// servicesAt returns the services of all tenants with an external or load-balancer address.
func servicesAt(
	ctx context.Context, of pilasterv1connect.OperatorServiceClient, a netip.Addr,
) (at []serviceView, err error) {
	all, err := of.ListServices(ctx, connect.NewRequest(&pilasterv1.ListServicesRequest{}))
	if err != nil {
		return nil, err
	}
	for _, its := range all.Msg.Services {
		v, err := viewService(its.Service)
		if err != nil {
			return nil, err
		}
		if v.isAt(a) {
			at = append(at, v)
		}
	}
	return at, nil
}

// addServices adds the services with the address that the agent knows.
func (e *explanation) addServices(all []*pilasterv1.Service) {
	for _, s := range all {
		v, err := viewService(s)
		if err != nil {
			continue // of a newer agent
		}
		if e.Service != nil && v.Address == e.Address.String() {
			e.Service.set(v)
		}
		e.expose(v, true)
	}
}

// expose adds a service that hosts outside reach at the address. own says that it may be an address of this node.
func (e *explanation) expose(v serviceView, own bool) {
	x := explainedExposed{Tenant: v.Tenant, Name: v.called(), Ports: v.ports(), Policy: v.TrafficPolicy}
	switch a := e.Address.String(); {
	case v.LoadBalancerIP == a:
		x.As = "load-balancer"
	case slices.Contains(v.ExternalIPs, a):
		x.As = "external"
	case own && v.Address != a:
		x.As, x.Ports = "node", v.nodePorts()
	default:
		return
	}
	e.addExposed(x)
}

func (e *explanation) addExposed(x explainedExposed) {
	if e.Exposed = append(e.Exposed, x); e.Kind == "foreign" {
		e.Kind = "exposed"
	}
}

// addPublishers adds the containers with host ports at the address.
func (e *explanation) addPublishers(all []*pilasterv1.Endpoint) {
	for _, of := range all {
		v := viewEndpoint(of)
		e.addExposed(explainedExposed{
			Tenant: v.Tenant, Name: v.name(), Ports: listHostPorts(v.HostPorts), As: "host-port",
		})
	}
}

// explainService sets the fields of an address in the prefix of services; false if it is in another one.
func (e *explanation) explainService(plan address.Plan, of string) bool {
	all, err := plan.ServicePrefix()
	if err != nil || !all.Contains(e.Address) {
		return false
	}
	own := netip.PrefixFrom(e.Address, address.NodeBits).Masked()
	e.Kind = "service"
	e.Service = &explainedService{
		Prefix: all, Number: uint32(address.SubnetNumber(all, own)), Alias: e.Address == own.Addr(),
	}
	if of != "" {
		e.Tenant = &explainedTenant{Name: of}
	}
	return true
}
