package mutation_test

// serviceHost returns the mutations of sockets that get a backend: those of the node, and of containers.
func serviceHost() []mutation {
	const (
		connections, datagrams = "TestServiceHost", "TestServiceHostDatagrams"
		exposed, containers    = "TestServiceHostExposed", "TestServiceConnect"
	)
	here := []string{"on this node", "counts", "affinity to a node that the tenant no longer reaches"}
	exposedPorts := []string{
		"TCP to the node's address", "TCP to an address of an uplink", "TCP to an external address", "TCP to loopback",
		"UDP to the node's address", "UDP to an address of an uplink", "UDP to an external address", "UDP to loopback",
		"affinity of an exposed port", "an exposed port, on this node",
	}
	return []mutation{
		{
			name: "sockets of other tenants",
			old: `if (!client || !client->services || services_number(&asked->address) != client->services)
		return NO_SERVICE;`,
			new:   "if (!client)\n\t\treturn NO_SERVICE;",
			test:  containers,
			cases: []string{"another tenant"},
		},
		{
			name:  "datagrams of containers",
			old:   "asked->proto != NEXTHDR_TCP || ",
			test:  datagrams,
			cases: []string{"a container, connected"},
		},
		{
			name:  "a former connection",
			old:   `bpf_sk_storage_delete(&pil_svcsockets_v1, ctx->sk);`,
			new:   ";",
			test:  datagrams,
			cases: []string{"connected elsewhere"},
		},
		{
			name:  "a former connection to another service",
			old:   "*kept = now;",
			new:   ";",
			test:  datagrams,
			cases: []string{"connected to another service"},
		},
		{
			name: "refused connections",
			old: `return refuse(ECONNREFUSED);
	kept =`,
			new:  "return SOCK_ADDR_ALLOW;\n\tkept =",
			test: connections,
			cases: []string{
				"another port", "on nodes that the tenant does not reach", "without endpoints", "without the service",
			},
		},
		{
			name:  "port of the peer",
			old:   " || (__be16)ctx->user_port != kept->backend.port",
			test:  datagrams,
			cases: []string{"another port after a connection"},
		},
		{
			name: "datagrams of containers, not connected",
			old: `if (bpf_get_netns_cookie(ctx) != node_cookie)
		return SOCK_ADDR_ALLOW;`,
			test:  datagrams,
			cases: []string{"a container, not connected"},
		},
		{
			name: "datagrams of a connected socket, with an address",
			old: `if (connected_backend(ctx, &asked))
		return SOCK_ADDR_ALLOW;`,
			test:  datagrams,
			cases: []string{"connected, with an address"},
		},
		{
			name:  "connections of datagrams that have ended",
			old:   "if (ctx->sk->dst_port != kept->backend.port)",
			new:   "if (0)",
			test:  datagrams,
			cases: []string{"the service after a connection"},
		},
		{
			name: "refused datagrams",
			old: `return refuse(ECONNREFUSED);
	host_keep`,
			new:   "return SOCK_ADDR_ALLOW;\n\thost_keep",
			test:  datagrams,
			cases: []string{"not connected, without endpoints"},
		},
		{
			name:  "source of answers to a connected socket",
			old:   "node_cookie || connected_service(ctx))",
			new:   "node_cookie)",
			test:  datagrams,
			cases: []string{"connected", "connected, with an address", "connected, without its endpoint"},
		},
		{
			name:  "endpoints of this node",
			old:   "b->plain.hi == own_node || may",
			new:   "may",
			test:  connections,
			cases: here,
		},
		{
			name:  "endpoints on other nodes",
			old:   "|| may_reach_node(tenant_id(&b->plain), own_node)",
			new:   "|| 1",
			test:  connections,
			cases: append(here, "on nodes that the tenant does not reach"),
		},
		{
			name:  "affinity to endpoints on other nodes",
			old:   "if (b && host_reaches(b))",
			new:   "if (b)",
			test:  connections,
			cases: here[2:],
		},
		{
			name:  "tables of exposed ports",
			old:   "if (s->service.exposed)",
			new:   "if (0)",
			test:  exposed,
			cases: exposedPorts,
		},
		{
			name:  "affinity",
			old:   "svc_keep_affinity(&search.service, &node, search.found);",
			new:   ";",
			test:  connections,
			cases: []string{"affinity", "affinity to another node"},
		},
		{
			name:  "affinity of exposed ports",
			old:   "if (search.service.affinity)",
			new:   "if (search.service.affinity && !search.service.exposed)",
			test:  exposed,
			cases: []string{"affinity of an exposed port"},
		},
		{
			name: "backend of a socket",
			old: `if (!has || has->backend != number)
		bpf_map_update_elem(&pil_svcudp_v1, key, &is, BPF_ANY);`,
			test:  datagrams,
			cases: []string{"not connected", "an endpoint that drains"},
		},
		{
			name:  "last service of a backend",
			old:   "!has || !same_addr(&has->other.address, &is.other.address) || has->other.port != is.other.port",
			new:   "!has",
			test:  datagrams,
			cases: []string{"two services"},
		},
		{
			name:  "loopback",
			old:   "if (!key.address.hi && key.address.lo == bpf_cpu_to_be64(1))",
			new:   "if (0)",
			test:  exposed,
			cases: []string{"TCP to loopback", "UDP to loopback", "a node port without endpoints"},
		},
		{
			name:  "host ports at loopback",
			old:   "if (!is_node_port(key.port))",
			new:   "if (0)",
			test:  exposed,
			cases: []string{"a host port at loopback"},
		},
		{
			name: "other ports than those of services",
			old:  "in_services(&key.address) ? NO_BACKEND : NO_SERVICE",
			new:  "NO_BACKEND",
			test: exposed,
			cases: []string{
				"another port of loopback", "another port of the node", "another port of an external address",
				"an IPv4 address",
			},
		},
		{
			name:  "other ports of services",
			old:   "return in_services(&key.address) ? NO_BACKEND : NO_SERVICE",
			new:   "return NO_SERVICE",
			test:  connections,
			cases: []string{"another port", "without the service"},
		},
		{
			name:  "nodes that a socket no longer reaches",
			old:   "if (!b || !host_reaches(b))",
			new:   "if (!b)",
			test:  datagrams,
			cases: []string{"a node that the tenant no longer reaches"},
		},
		{
			name:  "addresses of endpoints of this node",
			old:   "b->plain.hi == own_node ? b->seen : b->plain",
			new:   "b->plain",
			test:  connections,
			cases: append(here, "on all nodes"),
		},
		{
			name:  "sockets that have sent to a backend",
			old:   "return bpf_map_lookup_elem(&pil_svcudp_v1, &key)",
			new:   "return false",
			test:  datagrams,
			cases: []string{"a node that the tenant no longer reaches", "two services"},
		},
		{
			name:  "sockets that have not sent to a backend",
			old:   "return bpf_map_lookup_elem(&pil_svcudp_v1, &key)",
			new:   "return true",
			test:  "TestToNode",
			cases: []string{"datagram to an open socket"},
		},
	}
}
