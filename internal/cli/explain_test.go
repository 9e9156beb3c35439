package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/unixrpc"
)

// explainAgent is an agent that explains addresses of one tenant and hosts a container of this tenant.
type explainAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	base string
	node *pilasterv1.Node
}

func (s explainAgent) Status(
	context.Context,
	*connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(&pilasterv1.StatusResponse{
		Node: s.node,
		Plan: &pilasterv1.Plan{
			BasePrefix:      s.base,
			PrivatePrefix:   "fc00::/8",
			GatewayPrefixes: []string{"100.64.0.0/10", "fd70:696c:6700::/48"},
			EgressPrefix:    "3fff:7::/48",
		},
	}), nil
}

func (explainAgent) Explain(
	_ context.Context,
	r *connect.Request[pilasterv1.ExplainRequest],
) (*connect.Response[pilasterv1.ExplainResponse], error) {
	known := &pilasterv1.ExplainResponse{Plaintext: r.Msg.Address}
	switch r.Msg.Address {
	case "fc88:83c1:cf8:1561:4d50:127a:8d8b:f640":
		known.Plaintext = "fd70:696c:6100:1:0:100:100:3bc"
		known.Endpoint = &pilasterv1.Endpoint{
			Id:          7,
			Pod:         "shop/front",
			ContainerId: "c0ffee",
			Interface:   "eth0",
			State:       "active",
		}
		fallthrough
	case "fd70:696c:6100:3:0:100:100:13":
		known.Tenant = "blue"
		known.App = &pilasterv1.App{Tenant: "blue", Id: 1, Labels: map[string]string{"tier": "front", "app": "web"}}
	case "fd70:696c:6100:1:0:ff:101:2f":
		known.Tenant = "blue"
		known.Endpoint = &pilasterv1.Endpoint{Id: 7, Pod: "shop/front", ContainerId: "c0ffee", Interface: "eth0",
			State: "active"}
	case "fd70:696c:6100:3:0:ff:100:10":
		known.Tenant = "blue"
	case "2001:db8:9::1":
		known.Plaintext, known.Tenant = "", "blue"
	case "fc00::1", "100.64.3.7":
		known.Plaintext = ""
	case "10.0.3.1", "fc12::3:1":
		known.Plaintext = ""
		known.Overlaid = []*pilasterv1.Overlaid{
			{
				Tenant:   "green",
				Cidr:     "10.0.0.0/16",
				Endpoint: &pilasterv1.Endpoint{Id: 8, ContainerId: "c0c0a", Interface: "eth0", State: "active"},
			},
			{Tenant: "grey", Cidr: "10.0.0.0/15", Region: "east"},
		}
	case "fd09::7":
		known.Plaintext = ""
		known.UnderlayServices = []*pilasterv1.UnderlayService{
			{Tenant: "green", Name: "host", Virtual: "fd09::7", Real: "2001:db8:70::2"},
		}
	case "fd70:696c:7300:5::1":
		known.Plaintext, known.Tenant = "", "blue"
	case "fd70:696c:7300:6::1":
		known.Plaintext = ""
	case "fd70:696c:7300:5::3":
		known.Plaintext, known.Tenant, known.Services = "", "blue", []*pilasterv1.Service{exposedService()}
	case "2001:db8:7::9", "2001:db8:70::3":
		known.Plaintext, known.Services = "", []*pilasterv1.Service{exposedService()}
	case "2001:db8:70::4":
		known.Plaintext, known.Publishers = "", []*pilasterv1.Endpoint{{Id: 7, Pod: "shop/front", Tenant: "blue",
			HostPorts: []*pilasterv1.HostPort{{Host: 8080, Container: 80, Protocol: "TCP"}}}}
	case "fd70:696c:6100:3:0:ff:0:2":
		known.Publication, known.Published = "green/web", "fd12::3:1"
	}
	return connect.NewResponse(known), nil
}

// exposedService is a service with all kinds of addresses for hosts outside.
func exposedService() *pilasterv1.Service {
	return &pilasterv1.Service{
		Tenant: "blue", Namespace: "shop", Name: "web", Address: "fd70:696c:7300:5::3", NodePorts: true,
		Ports:       []*pilasterv1.ServicePort{{Protocol: "TCP", Port: 80, Target: 8080, NodePort: 30080}},
		ExternalIps: []string{"2001:db8:7::9"}, TrafficPolicy: "Local", LoadBalancer: true,
		LoadBalancerIp: "2001:db8:8::7",
	}
}

// serve serves an agent on a new socket and returns the socket's path.
func serve(t *testing.T, agent pilasterv1connect.AgentServiceHandler) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(pilasterv1connect.NewAgentServiceHandler(agent))
	return serveMux(t, mux)
}

func serveOperator(t *testing.T, operator pilasterv1connect.OperatorServiceHandler) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(pilasterv1connect.NewOperatorServiceHandler(operator))
	return serveMux(t, mux)
}

func serveMux(t *testing.T, mux *http.ServeMux) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "agent.sock")
	l, err := unixrpc.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	server := unixrpc.Server(mux)
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return socket
}

func TestExplain(t *testing.T) {
	agent := serve(t, explainAgent{base: "fd70:696c:6100::/40"})
	elsewhere := serve(t, explainAgent{base: "2001:db8::/32"})
	own := serve(t, explainAgent{
		base: "fd70:696c:6100::/40", node: &pilasterv1.Node{Name: "n3", Prefix: "fd70:696c:6100:3::/64"},
	})
	t.Setenv("PILASTER_AGENT_SOCKET", "/nonexistent/agent.sock")
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"offline", []string{"fd70:696c:6100:3:0:100:100:13"}, `
fd70:696c:6100:3:0:100:100:13
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   routed by the fabric
  tenant   1   names unknown: no agent answers on /nonexistent/agent.sock
  app      1   names unknown: no agent answers on /nonexistent/agent.sock
  index    19
`},
		{"a node", []string{"fd70:696c:6100:3::1"}, `
fd70:696c:6100:3::1
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   routed by the fabric
  tenant   0   the node itself: its address for containers and their nodes
  app      0   none
  index    1
`},
		{"a tunnel", []string{"fd70:696c:6100:3::2"}, `
fd70:696c:6100:3::2
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   routed by the fabric
  tenant   0   the node's tunnel endpoint for tenants of network nimitz
  app      0   none
  index    2
`},
		{"an identifier", []string{"fd70:696c:e100:0:6000:7:2:5"}, `
fd70:696c:e100:0:6000:7:2:5
  SIR     fd70:696c:e100::/64   addresses on network ila, the same on every node
  VNID    7                     names unknown: no agent answers on /nonexistent/agent.sock
  index   131077
`},
		{"an identifier at a locator", []string{"fd70:696c:e100:2:7000:7:2:f002"}, `
fd70:696c:e100:2:7000:7:2:f002
  seen as   fd70:696c:e100:0:6000:7:2:5   by containers
  locator   fd70:696c:e100:2::/64         of node fd70:696c:6100:2::/64
  VNID      7                             names unknown: no agent answers on /nonexistent/agent.sock
  index     131077
`},
		{"an underlay service", []string{"--agent-socket", agent, "fd09::7"}, `
fd09::7
  underlay service   green/host   real address 2001:db8:70::2
`},
		{"another plan", []string{"--base-prefix", "2001:db8::/32", "2001:db8:0:5:0:1ff:0:1"}, `
2001:db8:0:5:0:1ff:0:1
  base     2001:db8::/32
  node     5       2001:db8:0:5::/64   routed by the fabric
  tenant   1       names unknown: no agent answers on /nonexistent/agent.sock
  app      65280   reserved: the alias of node 2001:db8:0:5::/64, for containers of the tenant
  index    1
`},
		{"foreign", []string{"2001:db8::1"}, `
2001:db8::1
  foreign   in neither fd70:696c:6100::/40 (nodes) nor fc00::/8 (containers), ` +
			`tenants of network nimitz or evpn unknown: no agent answers on /nonexistent/agent.sock
  exposed   unknown: no orchestrator answers on this machine; pilaster service list on one shows exposed ports
`},
		{"IPv4, perhaps of an overlay", []string{"10.0.3.1"}, `
10.0.3.1
  foreign   in neither fd70:696c:6100::/40 (nodes) nor fc00::/8 (containers), ` +
			`tenants of network nimitz or evpn unknown: no agent answers on /nonexistent/agent.sock
`},
		{"ciphertext without an agent", []string{"fc00::1"}, `
fc00::1
  private     fc00::/8   encrypted addresses, for containers of one tenant
  encrypted   names unknown: no agent answers on /nonexistent/agent.sock
              run this on a node that hosts the tenant, or: pilaster address decrypt --key HEX fc00::1
`},
		{"names from the agent", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:100:100:13"}, `
fd70:696c:6100:3:0:100:100:13
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   routed by the fabric
  tenant   1   blue
  app      1   app=web,tier=front
  index    19
`},
		{"on the address's node", []string{"--agent-socket", own, "fd70:696c:6100:3:0:100:100:13"}, `
fd70:696c:6100:3:0:100:100:13
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   node n3, routed by the fabric
  tenant   1   blue
  app      1   app=web,tier=front
  index    19
`},
		{"on another node", []string{"--agent-socket", own, "fd70:696c:6100:4::1"}, `
fd70:696c:6100:4::1
  base     fd70:696c:6100::/40
  node     4   fd70:696c:6100:4::/64   routed by the fabric
  tenant   0   the node itself: its address for containers and their nodes
  app      0   none
  index    1
`},
		{"decrypted by the agent", []string{"--agent-socket", agent, "fc88:83c1:cf8:1561:4d50:127a:8d8b:f640"}, `
fc88:83c1:cf8:1561:4d50:127a:8d8b:f640
  private     fc00::/8   encrypted addresses, for containers of one tenant
  plaintext   fd70:696c:6100:1:0:100:100:3bc
  base        fd70:696c:6100::/40
  node        1   fd70:696c:6100:1::/64   routed by the fabric
  tenant      1   blue
  app         1   app=web,tier=front
  index       956
  endpoint    7   shop/front c0ffee   eth0   active
`},
		{"tenant that the node does not host", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:200:100:13"}, `
fd70:696c:6100:3:0:200:100:13
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   routed by the fabric
  tenant   2   not hosted on this node
  app      1   unknown on this node
  index    19
`},
		{"ciphertext of a tenant that the node does not host", []string{"--agent-socket", agent, "fc00::1"}, `
fc00::1
  private     fc00::/8   encrypted addresses, for containers of one tenant
  encrypted   this node hosts no tenant whose key decrypts it
              run this on a node that hosts the tenant, or: pilaster address decrypt --key HEX fc00::1
`},
		{"an overlay address of IPv4", []string{"--agent-socket", agent, "10.0.3.1"}, `
10.0.3.1
  overlay    10.0.0.0/16   tenant green   in this region, on network nimitz or evpn
  endpoint   8             c0c0a          eth0   active
  overlay    10.0.0.0/15   tenant grey    in region east, on network nimitz or evpn
`},
		{"an overlay address that could be a ciphertext", []string{"--agent-socket", agent, "fc12::3:1"}, `
fc12::3:1
  overlay    10.0.0.0/16   tenant green   in this region, on network nimitz or evpn
  endpoint   8             c0c0a          eth0   active
  overlay    10.0.0.0/15   tenant grey    in region east, on network nimitz or evpn
`},
		{"a virtual address", []string{"--agent-socket", agent, "100.64.3.7"}, `
100.64.3.7
  gateway   fd70:696c:6100:3::/64   ` +
			`a virtual address of the gateway of node 3   between containers of network nimitz and the underlay
`},
		{"a gateway", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:ff:0:1"}, `
fd70:696c:6100:3:0:ff:0:1
  base     fd70:696c:6100::/40
  node     3       fd70:696c:6100:3::/64   routed by the fabric
  tenant   0       the node's gateway for tenants of network nimitz
  app      65280   reserved: the gateway's own address
  index    1
`},
		{"a publication", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:ff:0:2"}, `
fd70:696c:6100:3:0:ff:0:2
  base          fd70:696c:6100::/40
  node          3       fd70:696c:6100:3::/64   routed by the fabric
  tenant        0       the node's gateway for tenants of network nimitz
  app           65280   reserved for publications
  index         2
  publication   green/web   of container fd12::3:1
`},
		{"a publication address that is not used", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:ff:0:3"}, `
fd70:696c:6100:3:0:ff:0:3
  base     fd70:696c:6100::/40
  node     3       fd70:696c:6100:3::/64   routed by the fabric
  tenant   0       the node's gateway for tenants of network nimitz
  app      65280   reserved for publications; no publication on this node has it
  index    3
`},
		{"an egress address", []string{"--agent-socket", agent, "fd70:696c:6100:1:0:ff:101:2f"}, `
fd70:696c:6100:1:0:ff:101:2f
  base       fd70:696c:6100::/40
  node       1       fd70:696c:6100:1::/64   routed by the fabric
  tenant     0       egress address of a container of tenant blue
  app        65281   reserved: egress
  index      65583
  endpoint   7   shop/front c0ffee   eth0   active
`},
		{"an egress address of another node", []string{"--agent-socket", own, "3fff:7:0:3:0:ff:101:2f"}, `
3fff:7:0:3:0:ff:101:2f
  egress   3fff:7::/48
  node     3       fd70:696c:6100:3::/64   node n3, routed by the fabric
  tenant   0       egress address of a container, for hosts outside of the cluster
                   pilaster egress who 3fff:7:0:3:0:ff:101:2f on node n3 names the container
  app      65281   reserved: egress
  index    65583
`},
		{"an address of an egress gateway", []string{"--agent-socket", agent, "fd70:696c:6100:3:0:ff:100:10"}, `
fd70:696c:6100:3:0:ff:100:10
  base     fd70:696c:6100::/40
  node     3       fd70:696c:6100:3::/64   routed by the fabric
  tenant   0       address of an egress gateway of tenant blue
  app      65281   reserved: egress
  index    16
`},
		{"another address of an egress gateway", []string{"--agent-socket", agent, "2001:db8:9::1"}, `
2001:db8:9::1
  gateway   of tenant blue   hosts outside see containers behind an egress gateway at it
`},
		{"a service", []string{"--agent-socket", agent, "fd70:696c:7300:5::1"}, `
fd70:696c:7300:5::1
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     5                     blue
  service    unknown               ` +
			`no orchestrator answers on this machine; pilaster service list on one names it
`},
		{"a service of another tenant", []string{"--agent-socket", agent, "fd70:696c:7300:6::1"}, `
fd70:696c:7300:6::1
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     6                     not hosted on this node
  service    unknown               ` +
			`no orchestrator answers on this machine; pilaster service list on one names it
`},
		{"a service that this node knows", []string{"--agent-socket", agent, "fd70:696c:7300:5::3"}, `
fd70:696c:7300:5::3
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     5                     blue
  service    shop/web              80/TCP to 8080
  exposed    for hosts outside     [2001:db8:8::7]:80/TCP, [2001:db8:7::9]:80/TCP, node port 30080/TCP ` +
			`to 80, policy Local
`},
		{"an external address", []string{"--agent-socket", agent, "2001:db8:7::9"}, `
2001:db8:7::9
  exposed   shop/web   80/TCP to 8080, policy Local   for hosts outside, at an external address, of tenant blue
`},
		{"an address of the node", []string{"--agent-socket", agent, "2001:db8:70::3"}, `
2001:db8:70::3
  exposed   shop/web   node port 30080/TCP to 80, policy Local   for hosts outside, at this node, of tenant blue
`},
		{"an address of the node with a host port", []string{"--agent-socket", agent, "2001:db8:70::4"}, `
2001:db8:70::4
  host port   shop/front   8080/TCP to 80   for hosts outside, at this node, of tenant blue
`},
		{"the tunnel of a node", []string{"fd70:696c:6100:3:0:ff:100:1"}, `
fd70:696c:6100:3:0:ff:100:1
  base     fd70:696c:6100::/40
  node     3       fd70:696c:6100:3::/64   routed by the fabric
  tenant   0       the node's end of tunnels from and to egress gateways
  app      65281   reserved: egress
  index    1
`},
		{"the agent's plan", []string{"--agent-socket", elsewhere, "fd70:696c:6100:3::1"}, `
fd70:696c:6100:3::1
  foreign   in neither 2001:db8::/32 (nodes) nor fc00::/8 (containers), ` +
			`and no tenant of network nimitz or evpn on this node has it in its CIDRs
  exposed   unknown: no orchestrator answers on this machine; pilaster service list on one shows exposed ports
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := run(t, "", append([]string{"explain"}, c.args...)...)
			if code != ExitDone || "\n"+stdout != c.want {
				t.Errorf("exit %d, stderr %q, stdout\n%swant\n%s", code, stderr, stdout, c.want[1:])
			}
		})
	}
}

// explainOperator is an orchestrator with one node and one tenant.
type explainOperator struct {
	pilasterv1connect.UnimplementedOperatorServiceHandler
}

func (explainOperator) ListNodes(
	context.Context, *connect.Request[pilasterv1.ListNodesRequest],
) (*connect.Response[pilasterv1.ListNodesResponse], error) {
	return connect.NewResponse(&pilasterv1.ListNodesResponse{
		Nodes: []*pilasterv1.Node{{Name: "n3", Prefix: "fd70:696c:6100:3::/64"}},
	}), nil
}

func (explainOperator) ListTenants(
	context.Context, *connect.Request[pilasterv1.ListTenantsRequest],
) (*connect.Response[pilasterv1.ListTenantsResponse], error) {
	return connect.NewResponse(&pilasterv1.ListTenantsResponse{
		Tenants: []*pilasterv1.Tenant{{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1}}, ServicesNumber: 5,
			Egress: []*pilasterv1.EgressRule{{Gateways: []*pilasterv1.EgressGateway{
				{Address: "fd70:696c:6100:3:0:ff:100:10"}, {Address: "2001:db8:9::1"},
			}}}}},
	}), nil
}

func (explainOperator) ListServices(
	context.Context, *connect.Request[pilasterv1.ListServicesRequest],
) (*connect.Response[pilasterv1.ListServicesResponse], error) {
	return connect.NewResponse(&pilasterv1.ListServicesResponse{Services: []*pilasterv1.ServiceSummary{
		{Service: &pilasterv1.Service{Tenant: "blue", Namespace: "shop", Name: "web", Address: "fd70:696c:7300:5::1",
			Ports: []*pilasterv1.ServicePort{{Protocol: "TCP", Port: 80, Target: 8080}}}},
		{Service: &pilasterv1.Service{Tenant: "blue", Name: "db", Headless: true}}, {Service: exposedService()},
	}}), nil
}

func (explainOperator) ListServicePools(
	context.Context, *connect.Request[pilasterv1.ListServicePoolsRequest],
) (*connect.Response[pilasterv1.ListServicePoolsResponse], error) {
	return connect.NewResponse(&pilasterv1.ListServicePoolsResponse{
		Pools: []*pilasterv1.ServicePool{{Prefix: "2001:db8:8::/112"}},
	}), nil
}

func (explainOperator) GetTenant(
	context.Context, *connect.Request[pilasterv1.GetTenantRequest],
) (*connect.Response[pilasterv1.GetTenantResponse], error) {
	return connect.NewResponse(&pilasterv1.GetTenantResponse{
		Apps: []*pilasterv1.App{{Id: 1, Labels: map[string]string{"app": "web"}}},
	}), nil
}

// On a machine with an orchestrator and no agent, explain has all names.
func TestExplainOnTheOrchestrator(t *testing.T) {
	t.Setenv("PILASTER_AGENT_SOCKET", "/nonexistent/agent.sock")
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", serveOperator(t, explainOperator{}))
	for address, want := range map[string]string{
		"fd70:696c:6100:3:0:100:100:13": `
fd70:696c:6100:3:0:100:100:13
  base     fd70:696c:6100::/40
  node     3   fd70:696c:6100:3::/64   node n3, routed by the fabric
  tenant   1   blue
  app      1   app=web
  index    19
`,
		"fd70:696c:6100:4:0:200:100:13": `
fd70:696c:6100:4:0:200:100:13
  base     fd70:696c:6100::/40
  node     4   fd70:696c:6100:4::/64   routed by the fabric
  tenant   2   no tenant of this cluster has this id
  app      1   no tenant of this cluster has this id
  index    19
`,
		"fd70:696c:6100:3:0:ff:100:10": `
fd70:696c:6100:3:0:ff:100:10
  base     fd70:696c:6100::/40
  node     3       fd70:696c:6100:3::/64   node n3, routed by the fabric
  tenant   0       address of an egress gateway of tenant blue
  app      65281   reserved: egress
  index    16
`,
		"2001:db8:9::1": `
2001:db8:9::1
  gateway   of tenant blue   hosts outside see containers behind an egress gateway at it
`,
		"fd70:696c:7300:5::1": `
fd70:696c:7300:5::1
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     5                     blue
  service    shop/web              80/TCP to 8080
`,
		"fd70:696c:7300:5::2": `
fd70:696c:7300:5::2
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     5                     blue
  service    none                  no service has this address
`,
		"fd70:696c:7300:5::": `
fd70:696c:7300:5::
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     5                     blue
  service    none                  the alias at which a container sees itself if it is its own endpoint
`,
		"2001:db8:8::7": `
2001:db8:8::7
  exposed   shop/web           80/TCP to 8080, policy Local   ` +
			`for hosts outside, at a load-balancer address, of tenant blue
  pool      2001:db8:8::/112   of load-balancer addresses
`,
		"2001:db8:7::9": `
2001:db8:7::9
  exposed   shop/web   80/TCP to 8080, policy Local   for hosts outside, at an external address, of tenant blue
`,
		"2001:db8:8::8": `
2001:db8:8::8
  pool   2001:db8:8::/112   of load-balancer addresses; no service has this one
`,
		"2001:db8:5::8": `
2001:db8:5::8
  foreign   in neither fd70:696c:6100::/40 (nodes) nor fc00::/8 (containers), ` +
			`tenants of network nimitz or evpn unknown: no agent answers on /nonexistent/agent.sock
  exposed   no service has it for hosts outside, and it is in no pool
`,
		"fd70:696c:7300:6::1": `
fd70:696c:7300:6::1
  services   fd70:696c:7300::/40   addresses that stand for many containers each
  tenant     6                     no tenant of this cluster has this number
  service    none                  no service has this address
`,
	} {
		if code, stdout, stderr := run(t, "", "explain", address); code != ExitDone || "\n"+stdout != want {
			t.Errorf("explain %s: exit %d, %s%s\nwant%s", address, code, stdout, stderr, want)
		}
	}
}

func TestExplainJSON(t *testing.T) {
	agent := serve(t, explainAgent{base: "fd70:696c:6100::/40"})
	_, stdout, _ := run(
		t,
		"",
		"explain",
		"-o",
		"json",
		"--agent-socket",
		agent,
		"fc88:83c1:cf8:1561:4d50:127a:8d8b:f640",
	)
	var e explanation
	if err := json.Unmarshal([]byte(stdout), &e); err != nil {
		t.Fatal(err)
	}
	if e.Kind != "ciphertext" || e.Plaintext.String() != "fd70:696c:6100:1:0:100:100:3bc" || e.Node.Number != 1 ||
		e.Tenant.Name != "blue" || (*e.App.Labels)["app"] != "web" || *e.Index != 0x3bc ||
		e.Endpoint.Pod != "shop/front" {
		t.Errorf("explain -o json: %s, want all parts of the address", stdout)
	}
}

func TestExplainRefuses(t *testing.T) {
	t.Setenv("PILASTER_AGENT_SOCKET", "/nonexistent/agent.sock")
	for _, args := range [][]string{
		{"nonsense"}, {"::ffff:192.0.2.1"}, {"fe80::1%eth0"},
		{"fd70::1", "--base-prefix", "nonsense"}, {"fd70::1", "--base-prefix", "10.0.0.0/8"},
		{"fd70::1", "--private-prefix", "fc00::/12"},
	} {
		if code, stdout, _ := run(t, "", append([]string{"explain"}, args...)...); code != ExitUsage || stdout != "" {
			t.Errorf("explain %v: exit %d, stdout %q; want exit %d and no output", args, code, stdout, ExitUsage)
		}
	}
}
