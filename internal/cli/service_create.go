package cli

import (
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/choice"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// fixedSlice is the name of the slice with the endpoints of `service create --endpoint`.
const fixedSlice = "fixed"

// trafficPolicies are the values of --traffic-policy.
var trafficPolicies = map[string]service.TrafficPolicy{"cluster": service.Cluster, "local": service.Local}

// distributions are the values of --distribution.
var distributions = map[string]service.Distribution{
	"anywhere": service.Anywhere, "same-zone": service.PreferSameZone, "same-node": service.PreferSameNode,
}

// serviceFlags are the flags of service create.
type serviceFlags struct {
	namespace, address, distribution string
	ports, selectors, endpoints      []string
	affinity                         time.Duration
	publishNotReady, headless        bool

	externalIPs, fixedNodePorts []string
	nodePorts, loadBalancer     bool
	loadBalancerIP              string
	trafficPolicy               string
}

func newServiceCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var f serviceFlags
	var of string
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a service",
		Long: `Create a service. Its endpoints are the containers of the tenant that have all labels of --select, in the
same namespace; without --namespace, those that have no namespace. --endpoint adds fixed ones.

With --affinity, a client keeps its endpoint for this long after its last connection. With --distribution,
clients get endpoints on their own node, or in its zone, if any of these is ready. A headless service has no
address: it only keeps the list of its endpoints.

Hosts outside of the cluster reach the service at addresses of --external-ip, which the fabric must route to
nodes that host the tenant, and with --node-ports at the addresses of these nodes. With --load-balancer the
service gets an external address from the pools of "pilaster service pool". With --traffic-policy local they
get endpoints on the node that their connection comes in by.`,
		Example: "  pilaster service create web --tenant blue --port 80:8080 --select app=web\n" +
			"  pilaster service create dns --tenant blue --port dns:53/udp --port dns-tcp:53 --select app=dns " +
			"--affinity 3h\n" +
			"  pilaster service create db --tenant blue --namespace shop --port 5432 " +
			"--endpoint fc12:3456:789a::1\n" +
			"  pilaster service create shop --tenant blue --port 443:8443 --select app=shop " +
			"--external-ip 2001:db8:7::9 --node-port 443=30443\n" +
			"  pilaster service create mail --tenant blue --port 25 --select app=mail --load-balancer",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			is, fixed, err := f.service(of, args[0])
			if err != nil {
				return err
			}
			resp, err := socket.client().CreateService(cmd.Context(), connect.NewRequest(
				&pilasterv1.CreateServiceRequest{Service: is.Proto(), Endpoints: fixed.Proto()}))
			if err != nil {
				return err
			}
			v, err := viewService(resp.Msg.Service)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				if v.Headless {
					fmt.Fprintf(w, "headless service %s of tenant %s created\n", v.called(), v.Tenant)
					return
				}
				fmt.Fprintf(w, "service %s of tenant %s created: its containers reach it at %s, %s\n", v.called(),
					v.Tenant, v.Address, v.ports())
				if at := v.exposed(); at != "" {
					fmt.Fprintf(w, "hosts outside of the cluster reach it at %s\n", at)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	ofTenant(cmd, &of, &socket)
	f.bind(cmd)
	return cmd
}

func (f *serviceFlags) bind(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.namespace, "namespace", "", "namespace of the service and of its containers")
	flags.StringArrayVar(&f.ports, "port", nil, "port as [NAME:]PORT[:TARGET][/udp], with TARGET the port of the "+
		"containers (default PORT); may be repeated")
	flags.StringSliceVar(&f.selectors, "select", nil, "labels of containers, as KEY=VALUE; may be repeated")
	flags.StringSliceVar(&f.endpoints, "endpoint", nil, "address of a container that is a fixed endpoint; may be "+
		"repeated")
	flags.DurationVar(&f.affinity, "affinity", 0, "how long a client keeps its endpoint, at most 24h; 0 for no "+
		"affinity")
	flags.BoolVar(&f.publishNotReady, "publish-not-ready", false, "use containers that are not ready, too")
	flags.BoolVar(&f.headless, "headless", false, "no address")
	flags.StringVar(&f.address, "address", "", "address of the service (default the tenant's next one)")
	flags.StringSliceVar(&f.externalIPs, "external-ip", nil, "address at which hosts outside of the cluster reach it; "+
		"may be repeated")
	flags.BoolVar(&f.nodePorts, "node-ports", false, "let hosts outside of the cluster reach each port at a port of "+
		"the nodes that host the tenant")
	flags.StringSliceVar(&f.fixedNodePorts, "node-port", nil, "node port of a port, as NAME=NODEPORT or "+
		"PORT=NODEPORT, 30000 to 32767 (default a free one); implies --node-ports; may be repeated")
	flags.BoolVar(&f.loadBalancer, "load-balancer", false, "let hosts outside of the cluster reach it at an address "+
		"of the pools, which stays the same")
	flags.StringVar(&f.loadBalancerIP, "load-balancer-ip", "", "load-balancer address, one of a pool (default a free "+
		"one); implies --load-balancer")
	for _, name := range []string{
		"load-balancer-ip", "namespace", "port", "select", "endpoint", "affinity", "address", "external-ip",
		"node-port",
	} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	choice.Bind(cmd, &f.distribution, "distribution", "which endpoints clients get first: anywhere, same-zone or "+
		"same-node", []string{"anywhere", "same-zone", "same-node"})
	choice.Bind(cmd, &f.trafficPolicy, "traffic-policy", "which endpoints hosts outside of the cluster get: those in "+
		"the cluster, or local ones, on the node that their connection comes in by", []string{"cluster", "local"})
}

func (f *serviceFlags) service(of, name string) (is service.Service, fixed service.Slice, err error) {
	is = service.Service{
		Tenant: of, Name: service.ParseName(name), Affinity: f.affinity, PublishNotReady: f.publishNotReady,
		Distribution: distributions[f.distribution], Headless: f.headless,
		NodePorts: f.nodePorts || len(f.fixedNodePorts) > 0, TrafficPolicy: trafficPolicies[f.trafficPolicy],
		LoadBalancer: f.loadBalancer || f.loadBalancerIP != "",
	}
	if f.namespace != "" {
		if is.Namespace != "" {
			return is, fixed, usage("%s has a namespace already: leave --namespace out", name)
		}
		is.Namespace = f.namespace
	}
	if is.Selector, err = tenant.ParseLabels(strings.Join(f.selectors, ",")); err != nil {
		return is, fixed, usage("--select: %w", err)
	}
	for _, text := range f.ports {
		p, err := parsePort(text)
		if err != nil {
			return is, fixed, usage("--port %q: %w", text, err)
		}
		if p.Name == "" && len(f.ports) > 1 {
			p.Name = fmt.Sprintf("%s-%d", strings.ToLower(p.Protocol.String()), p.Port)
		}
		is.Ports = append(is.Ports, p)
	}
	if err := f.expose(&is); err != nil {
		return is, fixed, err
	}
	if f.address != "" {
		if is.Address, err = serviceAddress("--address", f.address); err != nil {
			return is, fixed, err
		}
	}
	fixed = service.Slice{Tenant: of, Service: is.Name, Name: fixedSlice}
	for _, text := range f.endpoints {
		a, err := serviceAddress("--endpoint", text)
		if err != nil {
			return is, fixed, err
		}
		fixed.Endpoints = append(fixed.Endpoints, service.Endpoint{Address: a})
	}
	if err := is.Check(); err != nil {
		return is, fixed, usage("%w; nothing was changed", err)
	}
	return is, fixed, nil
}

// expose sets the addresses for hosts outside and the numbers of node ports.
func (f *serviceFlags) expose(is *service.Service) (err error) {
	if f.loadBalancerIP != "" {
		if is.LoadBalancerIP, err = serviceAddress("--load-balancer-ip", f.loadBalancerIP); err != nil {
			return err
		}
	}
	for _, text := range f.externalIPs {
		a, err := serviceAddress("--external-ip", text)
		if err != nil {
			return err
		}
		is.ExternalIPs = append(is.ExternalIPs, a)
	}
	for _, text := range f.fixedNodePorts {
		name, number, _ := strings.Cut(text, "=")
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || n < service.FirstNodePort || n > service.LastNodePort {
			return usage("--node-port %q: write NAME=NODEPORT or PORT=NODEPORT, with a node port of %d to %d", text,
				service.FirstNodePort, service.LastNodePort)
		}
		found := false
		for i, p := range is.Ports { // a number is that of TCP and of UDP
			if (p.Name != name || name == "") && strconv.Itoa(int(p.Port)) != name {
				continue
			}
			if p.NodePort != 0 && p.NodePort != uint16(n) {
				return usage("--node-port %q: port %d/%v has node port %d already; a port has one", text, p.Port,
					p.Protocol, p.NodePort)
			}
			is.Ports[i].NodePort, found = uint16(n), true
		}
		if !found {
			return usage("--node-port %q: no --port has name or number %q", text, name)
		}
	}
	return nil
}

func serviceAddress(flag, text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is6() || a.Is4In6() {
		return a, usage("%s %q is not an IPv6 address", flag, text)
	}
	return a, nil
}

// parsePort parses [NAME:]PORT[:TARGET][/PROTOCOL].
func parsePort(text string) (p service.Port, err error) {
	text, protocol, _ := strings.Cut(text, "/")
	if p.Protocol, err = service.ParseProtocol(strings.ToUpper(protocol)); err != nil {
		return p, err
	}
	words := strings.Split(text, ":")
	if _, err := strconv.Atoi(words[0]); err != nil && len(words) > 1 {
		p.Name, words = words[0], words[1:]
	}
	if len(words) > 2 {
		return p, fmt.Errorf("write [NAME:]PORT[:TARGET][/udp], as in http:80:8080")
	}
	for i, to := range []*uint16{&p.Port, &p.Target}[:len(words)] {
		n, err := strconv.ParseUint(words[i], 10, 16)
		if err != nil || n == 0 {
			return p, fmt.Errorf("%q is not a port: ports are 1 to 65535", words[i])
		}
		*to = uint16(n)
	}
	if len(words) == 1 {
		p.Target = p.Port
	}
	return p, nil
}
