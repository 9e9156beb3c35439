package mutation_test

// services returns the mutations of packets to services, and of answers to them.
func services() []mutation {
	const (
		packets, answers, gone = "TestServicePackets", "TestServiceAnswers", "TestServiceGone"
		itself, missing, limit = "TestServiceToItself", "TestServiceWithoutPrograms", "TestServiceSessionLimit"
		routes, clear          = "TestServiceRoutes", "TestServiceOfClearTenant"
	)
	ofOthers := []string{
		"TCP to another tenant's service", "UDP to another tenant's service",
		"a later fragment to another tenant's service",
	}
	datagrams := []string{"UDP to another port", "UDP to another tenant's service", "UDP without a backend"}
	withoutBackend := []string{
		"TCP behind options without a backend", "TCP without a backend", "UDP without a backend",
		"a segment without a backend",
	}
	noSession := []string{"a FIN of no session", "a reset of no session"}
	return []mutation{
		{
			name: "program of packets to services",
			old: `bpf_tail_call(skb, &pil_services_v1, SERVICE_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);`,
			new:   "bpf_tail_call(skb, &pil_services_v1, SERVICE_OUT);\n\t\treturn TCX_NEXT;",
			test:  missing,
			cases: []string{"to a service"},
		},
		{
			name: "program of answers",
			old: `bpf_tail_call(skb, &pil_services_v1, SERVICE_IN);
		return drop(skb, REASON_NO_PROGRAM, hook);`,
			new:   "bpf_tail_call(skb, &pil_services_v1, SERVICE_IN);",
			test:  missing,
			cases: []string{"from a backend", "from a backend of this node"},
		},
		{
			name: "errors about datagrams",
			old:  " ||\n\t\t       service_pair_lives(client, backend, NEXTHDR_UDP)",
			test: answers,
			cases: []string{
				"an error before any connection, from the fabric", "an error before any connection, from this node",
			},
		},
		{
			name:  "what may be an answer, from the fabric",
			old:   "to->services && is_backend(&key->src)",
			new:   "to->services",
			test:  missing,
			cases: []string{"from no backend"},
		},
		{
			name:  "tenants with services",
			old:   "to->services && is_backend(&key->src)",
			new:   "is_backend(&key->src)",
			test:  missing,
			cases: []string{"to a tenant without services"},
		},
		{
			name: "answers from the fabric",
			old:  "f->translate |= MAY_ANSWER;",
			new:  ";",
			test: answers,
			cases: []string{
				"a SYN-ACK, from the fabric", "a fragment, from the fabric", "a later fragment, from the fabric",
				"an answer behind options, from the fabric", "an answer from the cache, from the fabric",
				"an answer without a checksum, from the fabric", "an answer, from the fabric",
				"an error about a datagram, from the fabric", "an error about a segment, from the fabric",
				"an error of a router",
			},
		},
		{
			name: "answers from this node",
			old:  "m->own->services && is_backend(&f->src) ? MAY_ANSWER : 0",
			new:  "0",
			test: answers,
			cases: []string{
				"a SYN-ACK, from this node", "a fragment, from this node", "a later fragment, from this node",
				"an answer behind options, from this node", "an answer from the cache, from this node",
				"an answer without a checksum, from this node", "an answer, from this node",
				"an error about a datagram, from this node", "an error about a segment, from this node",
			},
		},
		{
			name: "backends that have left",
			old: `if (!to)
		return REASON_NO_ENDPOINT;
	f->translate`,
			new: `if (!to)
		return 0;
	f->translate`,
			test:  routes,
			cases: []string{"a backend that has left this node"},
		},
		{
			name: "type of errors about services",
			old: `if (reason == REASON_NO_BACKEND || reason == REASON_NO_SERVICE) {
		a.type = ICMPV6_UNREACHABLE;`,
			new:   "if (reason == REASON_NO_BACKEND || reason == REASON_NO_SERVICE) {",
			test:  packets,
			cases: datagrams,
		},
		{
			name:  "reasons of these errors",
			old:   "reason == REASON_NO_BACKEND || ",
			test:  packets,
			cases: []string{"UDP without a backend"},
		},
		{
			name:  "numbers of tenants",
			old:   "bpf_be64_to_cpu(a->hi) & 0xffffff",
			new:   "bpf_be64_to_cpu(a->hi) & 0x7fffff",
			test:  packets,
			cases: ofOthers,
		},
		{
			name: "services of other tenants",
			old: `if (!m->own->services || services_number(&w->flow.peer) != m->own->services)
		return REASON_NO_SERVICE;`,
			test:  packets,
			cases: ofOthers,
		},
		{
			name:  "protocols of services",
			old:   "why = REASON_SERVICE_PROTOCOL;",
			new:   ";",
			test:  packets,
			cases: []string{"SCTP", "an echo"},
		},
		{
			name:  "later fragments to services",
			old:   "return REASON_FRAGMENT_UNKNOWN;",
			new:   "return REASON_NO_SESSION;",
			test:  packets,
			cases: []string{"a later fragment without a first one"},
		},
		{
			name:  "services without a backend",
			old:   "return w->service.frontend ? REASON_NO_BACKEND : REASON_NO_SERVICE;",
			new:   "return REASON_NO_SERVICE;",
			test:  packets,
			cases: append([]string{"a reset without a backend"}, withoutBackend...),
		},
		{
			name:  "answers to later fragments",
			old:   "!p->l4 || (why != REASON_NO_BACKEND && why != REASON_NO_SERVICE)",
			new:   "why != REASON_NO_BACKEND && why != REASON_NO_SERVICE",
			test:  packets,
			cases: []string{"a later fragment to another tenant's service"},
		},
		{
			name:  "answers without a backend",
			old:   "(why != REASON_NO_BACKEND && why != REASON_NO_SERVICE)",
			new:   "why != REASON_NO_SERVICE",
			test:  packets,
			cases: withoutBackend,
		},
		{
			name:  "answers for other reasons",
			old:   "!p->l4 || (why != REASON_NO_BACKEND && why != REASON_NO_SERVICE)",
			new:   "!p->l4",
			test:  packets,
			cases: []string{"a FIN of no session"},
		},
		{
			name: "resets",
			old:  "if (w->flow.proto == NEXTHDR_TCP)\n\t\treturn tcp_reset",
			new:  "if (0)\n\t\treturn tcp_reset",
			test: packets,
			cases: []string{
				"TCP behind options without a backend", "TCP to another port", "TCP to another tenant's service",
				"TCP without a backend", "a reset without a backend", "a segment without a backend",
			},
		},
		{
			name:  "resets of resets",
			old:   " || flags & TCP_RST",
			test:  packets,
			cases: []string{"a reset without a backend"},
		},
		{
			name:  "what a reset acknowledges",
			old:   " + p->end - p->l4 - (offset >> 4 << 2)",
			test:  packets,
			cases: []string{"TCP behind options without a backend", "TCP without a backend"},
		},
		{
			name:  "segments of no session",
			old:   "return nat & SVC_FULL ? REASON_SESSION_LIMIT : REASON_NO_SESSION;",
			new:   "return 0;",
			test:  packets,
			cases: noSession,
		},
		{
			name:  "reason without room",
			old:   "nat & SVC_FULL ? REASON_SESSION_LIMIT : REASON_NO_SESSION",
			new:   "REASON_NO_SESSION",
			test:  limit,
			cases: []string{"no room"},
		},
		{
			name: "room for answers",
			old: `if (svc_refusal(nat))
		return svc_refusal(nat);
	set_end(`,
			new: `if (svc_refusal(nat))
		return 0;
	set_end(`,
			test:  limit,
			cases: []string{"an answer"},
		},
		{
			name:  "sessions that backends open",
			old:   "d->pre.verdicts[RX] = DENY;",
			new:   ";",
			test:  gone,
			cases: []string{"a SYN after that of the backend"},
		},
		{
			name:  "sessions of other services",
			old:   "nat = svc_session(&w->translated, w->backend.frontend, nat);",
			new:   ";",
			test:  gone,
			cases: []string{"an answer of a service that is back", "an answer of another service"},
		},
		{
			name:  "verdicts of other services",
			old:   "svc_forget(); /* answers",
			new:   "; /* answers",
			test:  gone,
			cases: []string{"an answer of another service"},
		},
		{
			name:  "answers that establish a new session",
			old:   "if (w->confirmed && !is_hairpin_alias(peer))",
			new:   "if (!is_hairpin_alias(peer))",
			test:  "TestServiceSessionEvicted",
			cases: []string{"sessions after the next answer"},
		},
		{
			name:  "connections of two services",
			old:   "return REASON_NO_BACKEND; /* the client uses this port for both",
			new:   "return 0; /* the client uses this port for both",
			test:  gone,
			cases: []string{"a port in use at the backend"},
		},
		{
			name: "other backends",
			old:  "nat = candidate ? svc_session(&w->flow, candidate, gone) : 0;",
			new:  "nat = 0;",
			test: gone,
			cases: []string{
				"a SYN whose backend is gone", "a datagram whose backend is gone", "a datagram whose service is back",
				"an answer of a service that is back", "an answer of another backend",
				"a port in use at the backend",
			},
		},
		{
			name: "answers that establish a connection",
			old: `t->peer = w->answer.front.address;
	t->peer_port = w->answer.front.port;
	svc_session(t, 0, 0);
	if (p->parts`,
			new:   "if (p->parts",
			test:  gone,
			cases: []string{"sessions of established connections"},
		},
		{
			name: "segments that change a session",
			old: `if (f->proto == NEXTHDR_TCP && f->flags & (TCP_SYN | TCP_FIN | TCP_RST))
		return NULL;`,
			test:  gone,
			cases: []string{"a SYN after a connection to a draining backend"},
		},
		{
			name:  "sessions apart from those of policies",
			old:   "key->session_kind = SESSION_SERVICE;",
			new:   "key->session_kind = 0;",
			test:  clear,
			cases: []string{"an answer", "an answer from the cache", "to the service", "to the service after a denial"},
		},
		{
			name: "verdicts apart from those of policies",
			old: `v = verdict_slot(&d->ct.key.remote, &d->ct.key.local, ports_of(&d->ct.key));
	if (!v)
		return false;
	v->until = 0;
	v->generation = a ? generation() : 0;
	v->apps = 0;
	v->nat = s->nat;
	v->key = d->ct.key;
	v->key.local = d->ct.key.remote;
	v->key.remote = d->ct.key.local;`,
			new: `v = verdict_slot(&d->ct.key.local, &d->ct.key.remote, ports_of(&d->ct.key));
	if (!v)
		return false;
	v->until = 0;
	v->generation = 0;
	v->apps = 0;
	v->nat = s->nat;
	v->key = d->ct.key;`,
			test:  clear,
			cases: []string{"an answer after a denial", "to the service after a denial"},
		},
		{
			name: "routes to backends",
			old: `if (why && why != REASON_TOO_BIG)
			return drop(skb, why, HOOK_CONTAINER);`,
			test:  routes,
			cases: []string{"a backend that has left this node", "no route to the backend"},
		},
		{
			name:  "errors of the route to a backend",
			old:   "if (why && why != REASON_TOO_BIG)",
			new:   "if (why)",
			test:  packets,
			cases: []string{"1,501 bytes", "1,501 bytes and a hop limit of 1"},
		},
		{
			name: "clients whose flows are cached",
			old: `why = identify(&w->key, &m);
	if (why)
		return why;
	begin_flow(`,
			new: `m.from = bpf_map_lookup_elem(&pil_sources_v2, &w->key.src);
	m.own = m.from ? bpf_map_lookup_elem(&pil_tenants_v2, &m.from->tenant_id) : NULL;
	why = m.own ? 0 : REASON_SRC_NOT_OWN;
	if (why)
		return why;
	begin_flow(`,
			test:  "TestServiceSpoofedClients",
			cases: []string{"another client's flow, from the cache"},
		},
		{
			name: "tenant that a session counts for",
			old:  "key->tenant = f->tenant;",
			new:  "key->tenant = 0;",
			test: "TestServiceFloods",
			cases: []string{
				"connections of another tenant", "datagrams of another tenant",
				"datagrams with answers of another tenant", "half-open connections of another tenant",
				"connections of another container",
			},
		},
		{
			name: "container that a session counts for",
			old:  "key->endpoint = f->endpoint;",
			new:  "key->endpoint = 0;",
			test: "TestServiceFloods",
			cases: []string{
				"connections of another tenant", "datagrams of another tenant",
				"datagrams with answers of another tenant", "half-open connections of another tenant",
				"connections of another container",
			},
		},
		{
			name: "hop limit of packets to services",
			old: `if (leaves_node(egress) && h->hop_limit <= 1)
		return icmp_error_send(skb, p, f, REASON_HOP_LIMIT);`,
			test:  packets,
			cases: []string{"1,501 bytes and a hop limit of 1", "a hop limit of 1"},
		},
		{
			name: "length of packets to services",
			old: `if (leaves_node(egress) && skb->len - ETH_HLEN > f->mtu && wire_length(skb, p) > f->mtu)
		return icmp_error_send(skb, p, f, REASON_TOO_BIG);`,
			test:  packets,
			cases: []string{"1,501 bytes"},
		},
		{
			name:  "packets to oneself, from the cache",
			old:   "if (b && !same_addr(&b->seen, &w->flow.client))",
			new:   "if (b)",
			test:  itself,
			cases: []string{"a datagram of the cache", "a segment of the cache"},
		},
		{
			name: "answers to oneself",
			old: `if (!front)
		return REASON_NO_SESSION;`,
			new: `if (!front)
		return REASON_NO_SERVICE;`,
			test: itself,
			cases: []string{
				"a later fragment of nothing", "an answer before a question", "an answer of another port",
			},
		},
		{
			name: "fragments of answers to oneself",
			old: `if (p->l4 && p->parts & HAS_FRAGMENT)
		svc_fragment(t, p->fragment, number);`,
			test:  itself,
			cases: []string{"a later fragment of an answer"},
		},
		{
			name: "quoted checksum of a service",
			old:  "return translate_quoted_checksum(skb, p, csum_add(",
			new:  "return 0 && translate_quoted_checksum(skb, p, csum_add(",
			test: answers,
			cases: []string{
				"an error about a datagram, from the fabric", "an error about a datagram, from this node",
				"an error about a segment, from the fabric", "an error about a segment, from this node",
				"an error before any connection, from the fabric",
				"an error before any connection, from this node", "an error of a router",
			},
		},
		{
			name:  "sum over the whole packet",
			old:   "BPF_F_RECOMPUTE_CSUM",
			new:   "0",
			test:  "TestServiceSumOfTheWholePacket",
			cases: []string{"a later fragment", "a later fragment of an answer"},
		},
		{
			name:  "port of a tunnel without a pending checksum",
			old:   "if (!is_sum_pending(skb, p))",
			new:   "if (!p->pending)",
			test:  "TestServiceChecksumsLeftToADevice",
			cases: []string{"UDP in a tunnel"},
		},
	}
}
