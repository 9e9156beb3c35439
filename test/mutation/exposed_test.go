package mutation_test

// exposed returns the mutations of exposed ports.
func exposed() []mutation {
	const (
		packets, answers, gone = "TestExposedPackets", "TestExposedAnswers", "TestExposedGone"
		policies, own          = "TestExposedPolicy", "TestExposedOwn"
		missing, macvlans      = "TestExposedWithoutPrograms", "TestExposedMacvlan"
	)
	return []mutation{
		{
			name: "program of exposed addresses",
			old: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_IN);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);`,
			new: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_IN);
		return TCX_NEXT;`,
			test:  missing,
			cases: []string{"to an exposed address"},
		},
		{
			name: "program of the tunnel",
			old: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_TUNNEL);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);`,
			new: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_TUNNEL);
		return TCX_NEXT;`,
			test:  missing,
			cases: []string{"from the tunnel"},
		},
		{
			name: "program of answers",
			old: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);`,
			new: `bpf_tail_call(skb, &pil_services_v1, EXPOSED_OUT);
		return TCX_NEXT;`,
			test:  missing,
			cases: []string{"an answer"},
		},
		{
			name:  "program of one node that is both",
			old:   "return drop(skb, REASON_NO_PROGRAM, hook);",
			new:   "return TCX_NEXT;",
			test:  missing,
			cases: []string{"to a backend here", "an answer by this node"},
		},

		{
			name:  "other ports of an external address",
			old:   "if (!found)\n\t\t\twhy = REASON_NO_SERVICE;",
			new:   "if (!found)\n\t\t\t;",
			test:  packets,
			cases: []string{"a SYN to a closed port", "a closed port", "to another port of this node"},
		},
		{
			name:  "other ports of a node",
			old:   "if (why && kind == EXPOSED_NODE)",
			new:   "if (why && !kind)",
			test:  packets,
			cases: []string{"ping of this node", "to another port of this node"},
		},
		{
			name: "answers of closed ports",
			old:  "return why == REASON_NO_SERVICE || why == REASON_NO_BACKEND || why == REASON_GATEWAY_FULL;",
			new:  "return 0;",
			test: packets,
			cases: []string{
				"a SYN to a closed port", "a SYN without a backend", "a closed port",
				"a port of a service that is not exposed",
			},
		},
		{
			name:  "limit of errors of an address",
			old:   "(d->back.local.hi ^ d->back.local.lo) *",
			new:   "0 *",
			test:  "TestExposedErrorLimit",
			cases: []string{"another address"},
		},
		{
			name: "clients in the cluster, at the ingress node",
			old: `if (!is_client(&d->back.remote) && (!why || why == REASON_NO_SERVICE))
		why = is_of_node(skb, &d->back) ? EXPOSED_TO_NODE : REASON_EXPOSED_SOURCE;`,
			test:  packets,
			cases: []string{"from a node", "from an egress address", "from a node to a port of this node"},
		},
		{
			name:  "connections of the node in the cluster",
			old:   "is_of_node(skb, &d->back) ? EXPOSED_TO_NODE : REASON_EXPOSED_SOURCE",
			new:   "REASON_EXPOSED_SOURCE",
			test:  "TestExposed",
			cases: []string{"a connection of the node to another node"},
		},
		{
			name:  "clients in the cluster, at the backend's node",
			old:   "return drop(skb, REASON_EXPOSED_SOURCE, HOOK_UPLINK_IN);",
			new:   ";",
			test:  answers,
			cases: []string{"from a container", "from a private address", "from a service"},
		},
		{
			name:  "clients with private addresses",
			old:   "!in_base(a) && !in_private(a) &&",
			new:   "!in_base(a) &&",
			test:  answers,
			cases: []string{"from a private address"},
		},
		{
			name:  "clients with addresses of services",
			old:   "!in_private(a) && !in_services(a) &&",
			new:   "!in_private(a) &&",
			test:  answers,
			cases: []string{"from a service"},
		},
		{
			name:  "clients with addresses of nodes and containers",
			old:   "return !in_base(a) && !in_private(a)",
			new:   "return !in_private(a)",
			test:  answers,
			cases: []string{"from a container"},
		},
		{
			name:  "protocols of clients",
			old:   "if (p->proto == NEXTHDR_ICMP || !is_translatable(p))\n\t\treturn REASON_SERVICE_PROTOCOL;",
			test:  packets,
			cases: []string{"a fragment", "ping"},
		},
		{
			name:  "ports without a backend",
			old:   "if (!b)\n\t\t\treturn REASON_NO_BACKEND;",
			new:   "if (!b)\n\t\t\treturn 0;",
			test:  packets,
			cases: []string{"a SYN without a backend", "counts"},
		},
		{
			name:  "count of connections",
			old:   "svc_count(s->frontend, false);",
			test:  packets,
			cases: []string{"counts"},
		},
		{
			name:  "errors about no connection",
			old:   "if (is_error(p))\n\t\treturn REASON_NO_SESSION;",
			test:  packets,
			cases: []string{"an error about no connection"},
		},
		{
			name:  "segments of clients",
			old:   "why = is_error(&p) ? 0 : clamp_to_tunnel(skb, &p, d->entry.address.hi);",
			new:   "why = 0;",
			test:  packets,
			cases: []string{"a SYN with segments that are too long for the tunnel"},
		},

		{
			name:  "outer source of a tunnel",
			old:   "h->nexthdr != PROTO_IPV6 || !is_exposed_tunnel(&key.src) ||",
			new:   "h->nexthdr != PROTO_IPV6 ||",
			test:  answers,
			cases: []string{"from a host outside"},
		},
		{
			name:  "what is no tunnel",
			old:   "if (h->nexthdr != PROTO_IPV6 || ",
			new:   "if (",
			test:  answers,
			cases: []string{"another protocol in the tunnel"},
		},
		{
			name: "unreadable tunnels",
			old: `sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new: `sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return TCX_NEXT;`,
			test:  answers,
			cases: []string{"another protocol in the tunnel", "from a host outside"},
		},
		{
			name: "inner addresses of a tunnel",
			old: `if (!(ends[0].hi == node && claims_app(&ends[0])) && !(ends[1].hi == own_node && tenant_id(&ends[1])))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			test:  answers,
			cases: []string{"an answer by another node than the container's", "to another node's container"},
		},
		{
			name:  "containers of the tunnel's other end",
			old:   "if (!(ends[0].hi == node && claims_app(&ends[0])) &&",
			new:   "if (!claims_app(&ends[0]) &&",
			test:  answers,
			cases: []string{"an answer by another node than the container's"},
		},
		{
			name:  "containers of this end",
			old:   "!(ends[1].hi == own_node && tenant_id(&ends[1]))",
			new:   "!tenant_id(&ends[1])",
			test:  answers,
			cases: []string{"to another node's container"},
		},
		{
			name:  "backends that have left",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  answers,
			cases: []string{"to no container"},
		},
		{
			name:  "protocols to backends",
			old:   "return drop(skb, REASON_SERVICE_PROTOCOL, HOOK_UPLINK_IN);",
			new:   ";",
			test:  answers,
			cases: []string{"ping"},
		},
		{
			name:  "ports that are not exposed",
			old:   "return drop(skb, REASON_NO_SERVICE, HOOK_UPLINK_IN);",
			new:   ";",
			test:  answers,
			cases: []string{"to a port that is not exposed", "to another tenant"},
		},

		{
			name:  "SYNs of a container",
			old:   " || is_first_segment(tcp_flags(skb, p)))\n\t\treturn false;",
			new:   ")\n\t\treturn false;",
			test:  answers,
			cases: []string{"a SYN of the container on its ports"},
		},
		{
			name:  "answers of exposed ports alone",
			old:   "!exposed_target(&seen, port, p->proto) || ",
			test:  answers,
			cases: []string{"a port that is no longer exposed"},
		},
		{
			name:  "ports that are no longer exposed",
			old:   "if (!still_exposed(&d->entry, p.proto, number))\n\t\treturn drop(skb, REASON_NO_SERVICE, hook);",
			new:   "still_exposed(&d->entry, p.proto, number);",
			test:  "TestExposedPortIsFree",
			cases: []string{"an answer of a port that is no longer exposed"},
		},
		{
			name:  "tenants without exposed ports",
			old:   "if (!connections)\n\t\treturn drop(skb, REASON_NO_SERVICE, hook);",
			new:   "if (!connections)\n\t\treturn TCX_NEXT;",
			test:  answers,
			cases: []string{"an answer of a tenant without exposed ports"},
		},
		{
			name:  "tables of connections of tenants",
			old:   "tenant = w->service.exposed;",
			new:   "tenant = w->service.exposed & 0x7fffff;",
			test:  answers,
			cases: []string{"an answer of another tenant"},
		},
		{
			name:  "protocols of answers",
			old:   "why = REASON_SERVICE_PROTOCOL;",
			new:   ";",
			test:  answers,
			cases: []string{"an echo as an answer"},
		},
		{
			name:  "answers without a connection",
			old:   "return drop(skb, REASON_NO_SESSION, hook);",
			new:   "return TCX_NEXT;",
			test:  answers,
			cases: []string{"an answer without a connection"},
		},
		{
			name:  "routes to clients",
			old:   "return drop(skb, REASON_NO_ROUTE, hook);",
			new:   "return TCX_NEXT;",
			test:  answers,
			cases: []string{"an answer to a client without a route"},
		},
		{
			name:  "ingress node of a session",
			old:   "if (m->ingress)\n\t\t\to.state.nat = pre->nats[RX];",
			test:  answers,
			cases: []string{"an answer after a change of the fabric"},
		},
		{
			name:  "ingress node of a cached verdict",
			old:   "if (v && mode == ENFORCE_EXPOSED && end->dir == RX && end->nat && *end->nat != v->nat)",
			new:   "if (0)",
			test:  answers,
			cases: []string{"an answer after a change of the fabric"},
		},

		{
			name: "policies about clients",
			old:  "if (exposed_enforce(skb, &p, f, &tag, RX))\n\t\treturn TC_ACT_SHOT;",
			new:  `asm volatile("" ::"r"(tag));`,
			test: policies,
			cases: []string{
				"a client that no policy allows", "a segment while sessions are adopted",
				"an answer of such a container",
			},
		},
		{
			name: "what an exposed session opens",
			old: `if (d->mode == ENFORCE_EXPOSED) {
			d->pre.verdicts[TX] = DENY;`,
			new: `if (d->mode == ENFORCE_EXPOSED) {
			;`,
			test:  policies,
			cases: []string{"a segment while sessions are adopted"},
		},
		{
			name:  "sessions apart from those of policies",
			old:   "#define SESSION_EXPOSED 2",
			new:   "#define SESSION_EXPOSED 0",
			test:  own,
			cases: []string{"its next datagram"},
		},
		{
			name:  "verdicts apart from those of policies",
			old:   "#define APPS_EXPOSED 1",
			new:   "#define APPS_EXPOSED 0",
			test:  own,
			cases: []string{"the client to the container's own address"},
		},

		{
			name:  "ports in use at a backend",
			old:   "if (other && !is_over(other, has, d->back.proto))\n\t\t\treturn false;",
			new:   "if (other && !is_over(other, has, d->back.proto))\n\t\t\tother = NULL;",
			test:  gone,
			cases: []string{"a port in use at the backend", "a connection whose port at the backend is another's"},
		},
		{
			name:  "ports that are free again",
			old:   "if (other && !is_over(",
			new:   "if (!other || !is_over(",
			test:  gone,
			cases: []string{"a port that no packet of the client confirms"},
		},
		{
			name: "connections that are over",
			old:  "if (other && !is_over(other, has, d->back.proto))",
			new:  "if (other)",
			test: "TestExposedPortIsFree",
			cases: []string{
				"another connection, after one that is closed",
				"another connection, after one that is reset by the backend",
				"another connection, after one that is reset by the client",
			},
		},
		{
			name: "half-closed connections",
			old:  "(client->seen & backend->seen & EXPOSED_FIN)",
			new:  "((client->seen | backend->seen) & EXPOSED_FIN)",
			test: "TestExposedPortIsFree",
			cases: []string{
				"another connection, after one that is half closed by the backend",
				"another connection, after one that is half closed by the client",
			},
		},
		{
			name: "count of refused packets",
			old: `if (why == REASON_NO_BACKEND || why == REASON_GATEWAY_FULL)
		svc_count(w->service.frontend, true);`,
			test:  packets,
			cases: []string{"counts"},
		},
		{
			name:  "reason without a port",
			old:   "\t}\n\treturn REASON_GATEWAY_FULL;\n}",
			new:   "\t}\n\treturn 0;\n}",
			test:  gone,
			cases: []string{"a port in use at the backend"},
		},
		{
			name:  "answers of a known connection",
			old:   "return is_error(p) || keep_exposed_answers(connections, d, opens) ? 0 : REASON_GATEWAY_FULL;",
			new:   "return 0;",
			test:  gone,
			cases: []string{"a connection whose port at the backend is another's"},
		},
		{
			name:  "connections whose backend is gone",
			old:   "if (p->proto == NEXTHDR_TCP && !opens)\n\t\t\treturn REASON_NO_BACKEND;",
			test:  gone,
			cases: []string{"a connection whose backend is gone"},
		},
		{
			name:  "SYNs whose backend is gone",
			old:   "if (p->proto == NEXTHDR_TCP && !opens)",
			new:   "if (p->proto == NEXTHDR_TCP)",
			test:  gone,
			cases: []string{"a SYN on its ports", "a SYN on the ports of a connection whose backend drains"},
		},
		{
			name:  "datagrams whose backend is gone",
			old:   "if (p->proto == NEXTHDR_TCP && !opens)",
			new:   "if (!opens)",
			test:  gone,
			cases: []string{"a datagram whose backend is gone"},
		},
		{
			name:  "new connections of a backend that drains",
			old:   "b->frontend == w->service.frontend && !(opens && b->draining)",
			new:   "b->frontend == w->service.frontend",
			test:  gone,
			cases: []string{"a SYN on the ports of a connection whose backend drains"},
		},
		{
			name:  "connections of a backend that drains",
			old:   "!(opens && b->draining)",
			new:   "!b->draining",
			test:  gone,
			cases: []string{"a datagram to a backend that drains", "a segment to a backend that drains"},
		},

		{
			name: "external addresses, by the uplink",
			old: `if (!why && (is_gateway_source(&src) || is_exposed_source(&src)))
		why = REASON_HOST_CLAIMS_TENANT;`,
			new: `if (!why && is_gateway_source(&src))
		why = REASON_HOST_CLAIMS_TENANT;`,
			test:  answers,
			cases: []string{"an external address"},
		},
		{
			name: "external addresses, by other interfaces",
			old: `if (!why && !inward && (is_gateway_source(&src) || is_exposed_source(&src)))
		why = REASON_HOST_CLAIMS_TENANT;`,
			new: `if (!why && !inward && is_gateway_source(&src))
		why = REASON_HOST_CLAIMS_TENANT;`,
			test:  answers,
			cases: []string{"an external address, by another interface"},
		},
		{
			name:  "addresses of the node",
			old:   "return exposed_kind_of(a) == EXPOSED_ADDRESS;",
			new:   "return exposed_kind_of(a);",
			test:  answers,
			cases: []string{"an address of the node", "an address of the node, by another interface"},
		},
		{
			name:  "exposed addresses of what was accepted",
			old:   "(is_gateway_source(&src) || is_exposed_address(&src))",
			new:   "is_gateway_source(&src)",
			test:  macvlans,
			cases: []string{"accepted"},
		},
		{
			name:  "namespace of what was accepted",
			old:   "return cookie == node_cookie && (is_gateway_source(&src) || is_exposed_address(&src));",
			new:   "return is_gateway_source(&src) || is_exposed_address(&src);",
			test:  macvlans,
			cases: []string{"from another namespace"},
		},
	}
}
