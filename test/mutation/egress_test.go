package mutation_test

import "slices"

const neighbour = "TestOutsideScanOfANeighbour"

// noSession are the packets of TestEgressArrives that belong to no session, apart from an echo request, which another
// check drops too.
var noSession = []string{
	"another port", "another host", "a SYN", "an error about no session", "a segment while sessions are adopted",
}

// egress returns the mutations of egress rules and of packets between containers and hosts outside.
func egress() []mutation {
	const packets, arrives, stays = "TestEgressPackets", "TestEgressArrives", "TestEgressStaysAtItsGateway"
	denied := []string{"denied", "a prefix of nodes", "protected", "protected, by a gateway"}
	return []mutation{
		{
			name:  "errors about denied destinations",
			old:   "why == REASON_EGRESS_DENIED || ",
			test:  packets,
			cases: denied,
		},
		{
			name:  "errors of the route",
			old:   " || why == REASON_HOP_LIMIT || why == REASON_TOO_BIG)",
			new:   ")",
			test:  packets,
			cases: []string{"1,501 bytes", "1,501 bytes and a hop limit of 1"},
		},
		{
			name:  "tenants without egress rules",
			old:   "return REASON_DST_NOT_PRIVATE;",
			new:   "return 0;",
			test:  "TestFromContainer",
			cases: []string{"the internet"},
		},
		{
			name: "type of these errors",
			old: `if (reason == REASON_EGRESS_DENIED) {
		a.type = ICMPV6_UNREACHABLE;`,
			new:   "if (reason == REASON_EGRESS_DENIED) {",
			test:  packets,
			cases: denied,
		},
		{
			name:  "tenant of an egress address",
			old:   "if (!id) { /* the source is an egress address */",
			new:   "if (0) {",
			test:  packets,
			cases: []string{"1,501 bytes", "1,501 bytes and a hop limit of 1", "a hop limit of 1"},
		},
		{
			name:  "flow cache of its own",
			old:   "if (set)\n\t\t*take_way(set, f->extra, f->key.generation) = *f;",
			new:   "struct flow *slot = flow_slot(&f->key);\n\n\tif (set && slot)\n\t\t*slot = *f;",
			test:  "TestOutsideScan",
			cases: []string{"flows during the scan"},
		},
		{
			name: "flows of packets without a session",
			old: `if (egress_enforce(skb, p, f, dir, hook))
		return TC_ACT_SHOT;
	if (is_new && f->egress)
		keep_outside_flow(f);`,
			new: `if (is_new && f->egress)
		keep_outside_flow(f);
	if (egress_enforce(skb, p, f, dir, hook))
		return TC_ACT_SHOT;`,
			test:  "TestNoSessionTakesNoSlot",
			cases: []string{"from many hosts to an egress address", "to many ports of an egress address"},
		},
		{
			name:  "tenants of flows",
			old:   "take_way(set, f->extra,",
			new:   "take_way(set, 0,",
			test:  neighbour,
			cases: []string{"flows to hosts outside", "flows from hosts outside"},
		},
		{
			name:  "actions of rules",
			old:   "(rule->action != ACCESS_OUTSIDE && rule->action != ACCESS_GATEWAY) || ",
			test:  packets,
			cases: []string{"denied", "a prefix of nodes"},
		},
		{
			name:  "protected destinations",
			old:   " || is_protected(&dst))\n\t\treturn REASON_EGRESS_DENIED;",
			new:   ")\n\t\treturn REASON_EGRESS_DENIED;",
			test:  packets,
			cases: []string{"protected", "protected, by a gateway"},
		},
		{
			name:  "containers without an egress address",
			old:   "return REASON_NO_EGRESS_ADDRESS;",
			new:   "return 0;",
			test:  packets,
			cases: []string{"without an egress address"},
		},
		{
			name:  "hop limit before MTU",
			old:   "return why == REASON_TOO_BIG && h && h->hop_limit <= 1 ? REASON_HOP_LIMIT : why;",
			new:   "return h ? why : why;",
			test:  packets,
			cases: []string{"1,501 bytes and a hop limit of 1"},
		},
		{
			name: "protocols of gateways",
			old: `if (!is_translatable(p))
		return drop(skb, REASON_GATEWAY_PROTOCOL, HOOK_CONTAINER);`,
			new:  "",
			test: packets,
			cases: []string{
				"a fragment by a gateway", "a later fragment by a gateway", "SCTP by a gateway",
				"an error by a gateway",
			},
		},
		{
			name: "sessions by gateways",
			old: `if (gateway_enforce(skb, p, f, &tag, avoid))
		return TC_ACT_SHOT;`,
			new:   `asm volatile("" ::"r"(avoid));`,
			test:  stays,
			cases: []string{"a session that has a gateway", "a session that has left its gateway"},
		},
		{
			name: "first gateway of a session",
			old: `if (tag == gateway_tag(rule->gateways[0]))
		node = rule->gateways[0];
	else `,
			new:   "",
			test:  stays,
			cases: []string{"a session that has a gateway", "a session that has left its gateway"},
		},
		{
			name: "second gateway of a session",
			old: `else if (rule->gateways[1] && tag == gateway_tag(rule->gateways[1]))
		node = rule->gateways[1];`,
			new:   "",
			test:  stays,
			cases: []string{"a session that has a gateway", "a session that has left its gateway"},
		},
		{
			name:  "route to a gateway",
			old:   "drop(skb, REASON_NO_ROUTE, HOOK_CONTAINER);",
			new:   "TCX_NEXT;",
			test:  packets,
			cases: []string{"no route to the gateway"},
		},
		{
			name:  "MTU of the tunnel",
			old:   "f->mtu = node == own_node ? hop->mtu : hop->mtu - TUNNEL_HLEN;",
			new:   "f->mtu = hop->mtu;",
			test:  packets,
			cases: []string{"1,461 bytes by a gateway"},
		},
		{
			name: "program of this node's gateway",
			old: `bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);`,
			new:   "return TCX_NEXT;",
			test:  "TestEgressWithoutPrograms",
			cases: []string{"by this node, without a program"},
		},
		{
			name: "hop limit by a gateway",
			old: `why = dec_hop_limit(skb, h, p, f);
	if (why) {`,
			new:  "why = 0;\n\tif (why) {",
			test: packets,
			cases: []string{
				"1,460 bytes by a gateway", "1,461 bytes by a gateway", "a hop limit of 1 by a gateway", "by a gateway",
				"by a gateway, from the cache", "by this node", "1,500 bytes by this node", "1,501 bytes by this node",
			},
		},
		{
			name: "sessions of hosts outside",
			old: `if (egress_enforce(skb, p, f, dir, hook))
		return TC_ACT_SHOT;`,
			new:   "",
			test:  arrives,
			cases: append(slices.Clone(noSession), "an echo with the container's identifier"),
		},
		{
			name: "addresses of no container",
			old: `if (!to)
		return REASON_NO_ENDPOINT;
	inside`,
			new: `if (!to)
		return 0;
	inside`,
			test:  arrives,
			cases: []string{"no such address", "the address on another node"},
		},
		{
			name:  "egress addresses of other nodes",
			old:   "key->dst.hi == own_egress ? bpf_map_lookup_elem(&pil_elocals_v1, &key->dst.lo) : NULL",
			new:   "bpf_map_lookup_elem(&pil_elocals_v1, &key->dst.lo)",
			test:  arrives,
			cases: []string{"the address on another node"},
		},
		{
			name: "rules for answers",
			old: `if (!rule || rule->action != ACCESS_OUTSIDE || is_protected(&src))
		return REASON_NO_SESSION;`,
			new: `if (!rule || is_protected(&src))
		return REASON_NO_SESSION;`,
			test:  arrives,
			cases: []string{"an answer after a denial", "an answer past the gateway"},
		},
		{
			name:  "answers of protected hosts",
			old:   " || is_protected(&src)",
			test:  arrives,
			cases: []string{"an answer of a protected host"},
		},
		{
			name: "peer of an error",
			old: `if (!why && is_error(&p))
		why = icmp_err_set_peer_src(skb, &p, &key.src, own_node);`,
			new:  "",
			test: arrives,
			cases: []string{
				"a router's error", "an error about another container's packet", "an error about local traffic",
			},
		},
		{
			name:  "router of an error",
			old:   "is_error(&p) && show_router(skb, &p, &key.src, &router)",
			new:   "is_error(&p) && !p.l4 && show_router(skb, &p, &key.src, &router)",
			test:  arrives,
			cases: []string{"a router's error"},
		},
		{
			name: "program of gateways",
			old: `bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);`,
			new: `bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return TCX_NEXT;`,
			test:  "TestEgressWithoutPrograms",
			cases: []string{"to the gateway, without a program"},
		},
	}
}

// egressSessions returns the mutations of sessions with hosts outside.
func gatewayAddresses() []mutation {
	const test = "TestGatewayAddressIsNoHosts"
	return []mutation{
		{
			name:  "gateways' addresses, by the uplink",
			old:   "if (!why && (is_gateway_source(&src) || is_exposed_source(&src)))\n",
			new:   "if (!why && is_exposed_source(&src))\n",
			test:  test,
			cases: []string{"a process with a gateway's address"},
		},
		{
			name:  "gateways' addresses, by other interfaces",
			old:   "!inward && (is_gateway_source(&src) || is_exposed_source(&src))",
			new:   "!inward && is_exposed_source(&src)",
			test:  test,
			cases: []string{"a process with a gateway's address, by another interface"},
		},
	}
}

func egressSessions() []mutation {
	const arrives = "TestEgressArrives"
	return []mutation{
		{
			name: "echo requests from outside",
			old: `if (p->proto == NEXTHDR_ICMP && p->icmp_type == ICMPV6_ECHO_REQUEST && d->ct.pkt.dir == RX)
			return REASON_NO_SESSION;`,
			test:  "TestEgressArrives",
			cases: []string{"an echo with the container's identifier"},
		},
		{
			name:  "gateways of new sessions",
			old:   "d->pre.nats[TX] = d->nat;",
			test:  "TestEgressStaysAtItsGateway",
			cases: []string{"a session that has a gateway", "a session that has left its gateway"},
		},
		{
			name:  "reason without a session",
			old:   "if (d->ct.pkt.outside && o->dir == RX)\n\t\t\treturn REASON_NO_SESSION;",
			new:   "",
			test:  arrives,
			cases: noSession,
		},
		{
			name:  "sessions that hosts outside open",
			old:   "d->pre.verdicts[RX] = DENY;",
			new:   ";",
			test:  arrives,
			cases: noSession,
		},
		{
			name:  "older sessions of hosts outside",
			old:   " || (t->pkt.outside && t->pkt.dir == RX)",
			test:  arrives,
			cases: []string{"a segment while sessions are adopted"},
		},
		{
			name:  "apps of hosts outside",
			old:   "claims_app(&e->remote) ? current_app(&e->remote, app_id(&e->remote)) : APP_OUTSIDE",
			new:   "current_app(&e->remote, app_id(&e->remote))",
			test:  "TestOutsideHasNoApp",
			cases: []string{"to a host whose address reads like the app's"},
		},
		{
			name: "verdict cache of its own",
			old:  "set->ways[way_to_take(&w) % WAYS] = *v;",
			new: `struct verdict *slot = verdict_slot(&v->key.local, &v->key.remote, ports_of(&v->key));

	if (slot)
		*slot = *v;`,
			test:  neighbour,
			cases: []string{"no two of 128 flows share a set of kind 1"},
		},
		{
			name:  "tenants of verdicts",
			old:   "{.owner = v->key.tenant}",
			new:   "{.owner = 0}",
			test:  neighbour,
			cases: []string{"verdicts"},
		},
		{
			name:  "verdicts of half-open sessions",
			old:   "d->fresh.until && ",
			new:   "",
			test:  "TestNoSessionTakesNoSlot",
			cases: []string{"SYNs to many hosts that do not answer", "datagrams to many hosts that do not answer"},
		},
		{
			name: "verdicts of packets without a session",
			old:  "if (!why && is_outside(mode) && d->fresh.until && same_session",
			new:  "if (is_outside(mode) && same_session",
			test: "TestNoSessionTakesNoSlot",
			cases: []string{
				"from many hosts to an egress address", "in the tunnel, to many ports",
				"to many ports of an egress address", "SYNs to many hosts that do not answer",
				"datagrams to many hosts that do not answer",
			},
		},
	}
}

// ways returns the mutations of how tenants share sets of caches.
func ways() []mutation {
	all := []string{"flows to hosts outside", "flows from hosts outside", "verdicts"}
	return []mutation{
		{
			name:  "those that have most",
			old:   "rank += w->owners[i] == w->owners[j] ? 2 * WAYS : 0;",
			new:   ";",
			test:  neighbour,
			cases: all,
		},
		{
			name:  "own ways first",
			old:   "if (w->owners[i] == w->owner)\n\t\t\trank += 3 * WAYS;",
			test:  neighbour,
			cases: all,
		},
	}
}

// gateway returns the mutations of egress gateways.
func gateway() []mutation {
	const out, back, answers, probes = "TestGatewayOut", "TestGatewayBack", "TestGatewayAnswers", "TestGatewayProbes"
	clamped := []string{
		"segments that are too long for the tunnel", "at an odd offset", "after other options", "after 36 bytes",
		"behind an extension header", "with ECN",
	}
	return []mutation{
		{
			name:  "owners of next hops",
			old:   "begin_outside(f, key, src, dst, hop_owner(src, device));",
			new:   "begin_outside(f, key, src, dst, 0);",
			test:  "TestGatewayScanOfANeighbour",
			cases: []string{"next hops to hosts outside", "next hops of tunnels"},
		},
		{
			name: "silent gateways",
			old: `if (is_silent(first) != is_silent(second))
		return is_silent(first) ? second : first;`,
			new:  "",
			test: "TestEgressStaysAtItsGateway",
			cases: []string{
				"the gateway that answers", "a session that has a gateway", "a session that has left its gateway",
				"a session whose gateway is silent",
			},
		},
		{
			name:  "connections of one host",
			old:   "\t}\n\treturn REASON_GATEWAY_FULL;\n}",
			new:   "\t}\n\treturn 0;\n}",
			test:  out,
			cases: []string{"no free port"},
		},
		{
			name:  "free ports",
			old:   "if (!bpf_map_update_elem(connections, &d->back, &own, BPF_NOEXIST))",
			new:   "if (!bpf_map_update_elem(connections, &d->back, &own, BPF_ANY))",
			test:  out,
			cases: []string{"no free port"},
		},
		{
			name: "evicted entries of answers",
			old: `if (take_port(connections, d, d->entry.port))
		return 0;`,
			new:   "return 0;",
			test:  back,
			cases: []string{"an answer after its entry was evicted"},
		},
		{
			name: "tables of connections",
			old: `if (!connections)
		return drop(skb, REASON_GATEWAY_DENIED, hook);`,
			new: `if (!connections)
		return TCX_NEXT;`,
			test:  out,
			cases: []string{"no table of connections"},
		},
		{
			name: "protocols",
			old: `if (!why && !is_translatable(&p))
		why = REASON_GATEWAY_PROTOCOL;`,
			new:   "",
			test:  out,
			cases: []string{"SCTP", "a fragment"},
		},
		{
			name:  "routes outside",
			old:   "return drop(skb, REASON_NO_ROUTE, hook);",
			new:   "return TCX_NEXT;",
			test:  out,
			cases: []string{"no route"},
		},
		{
			name: "hop limit",
			old:  "why = hook == HOOK_UPLINK_IN ? dec_hop_limit(skb, h, &p, hop) : 0;",
			new:  "why = 0;",
			test: out,
			cases: []string{
				"TCP", "UDP", "UDP of a known connection", "a hop limit of 1", "after 36 bytes",
				"after an option without a length", "after other options", "after the last option", "at an odd offset",
				"behind an extension header", "in another option", "not in a SYN", "of a wrong length",
				"segments that are too long for the tunnel", "segments that fit", "with ECN",
			},
		},
		{
			name:  "count of long packets",
			old:   "drop(skb, reason, HOOK_UPLINK_IN);\n\th = eth_ip6_of(skb);",
			new:   "h = eth_ip6_of(skb);",
			test:  back,
			cases: []string{"1,461 bytes"},
		},
		{
			name: "long packets",
			old: `if (skb->len - ETH_HLEN > hop->mtu - TUNNEL_HLEN && wire_length(skb, p) > hop->mtu - TUNNEL_HLEN)
		return error_outside(skb, p, hop->mtu - TUNNEL_HLEN, tenant_id(&d->entry.address), REASON_TOO_BIG);`,
			test:  back,
			cases: []string{"1,461 bytes"},
		},
		{
			name:  "quotes of packets of others",
			old:   " ||\n\t    !same_addr(&quoted[0], &key->local))\n\t\treturn REASON_ICMP_QUOTE;",
			new:   ")\n\t\treturn REASON_ICMP_QUOTE;",
			test:  back,
			cases: []string{"an error about a packet of others"},
		},
		{
			name: "quotes that cannot be parsed",
			old: `if (proto < 0 || d->quotes_fragment)
		return REASON_ICMP_QUOTE;`,
			new:   "",
			test:  back,
			cases: []string{"an error about a fragment", "an error about half a header"},
		},
		{
			name:  "protocols of answers",
			old:   "is_translatable(&p) ? read_nat_ports(skb, &p, true, &d->back) : REASON_GATEWAY_PROTOCOL",
			new:   "read_nat_ports(skb, &p, true, &d->back)",
			test:  back,
			cases: []string{"SCTP", "a fragment"},
		},
		{
			name:  "packets of no connection",
			old:   "return drop(skb, REASON_NO_SESSION, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  back,
			cases: []string{"an error about no connection", "another host", "another port"},
		},
		{
			name: "routes to nodes",
			old: `return drop(skb, REASON_NO_ROUTE, HOOK_UPLINK_IN);
	if (h->hop_limit`,
			new: `return TCX_NEXT;
	if (h->hop_limit`,
			test:  back,
			cases: []string{"no route to the node"},
		},
		{
			name: "hop limit of answers",
			old: `if (h->hop_limit <= 1)
		return drop(skb, REASON_HOP_LIMIT, HOOK_UPLINK_IN);`,
			new:   "",
			test:  back,
			cases: []string{"a hop limit of 1"},
		},
		{
			name:  "answers to no container",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);\n\tf = &d->flow;",
			new:   "return TCX_NEXT;\n\tf = &d->flow;",
			test:  answers,
			cases: []string{"to no container"},
		},
		{
			name: "other probes",
			old: `probe.magic != GATEWAY_PROBE_MAGIC || (probe.kind != GATEWAY_PROBE && probe.kind != GATEWAY_ALIVE))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new: `0)
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			test:  probes,
			cases: []string{"another kind", "another magic"},
		},
		{
			name:  "segments for the tunnel",
			old:   "why = clamp_to_tunnel(skb, &p, d->out.local.hi);",
			new:   "why = 0;",
			test:  out,
			cases: clamped,
		},
		{
			name:  "segments of a SYN alone",
			old:   "!(tcp_flags(skb, p) & TCP_SYN)",
			new:   "p->proto != NEXTHDR_TCP",
			test:  out,
			cases: []string{"not in a SYN"},
		},
		{
			name:  "end of the options",
			old:   " ||\n\t    option[0] == TCP_OPTION_END)",
			new:   ")",
			test:  out,
			cases: []string{"after the last option"},
		},
		{
			name:  "options without a length",
			old:   "if (option[1] < 2)\n\t\treturn 1;",
			test:  out,
			cases: []string{"after an option without a length"},
		},
		{
			name:  "length of the option",
			old:   " || option[1] != TCP_MSS_LEN)",
			new:   ")",
			test:  out,
			cases: []string{"of a wrong length"},
		},
		{
			name:  "segments that fit",
			old:   "if (bpf_ntohs(s.mss) <= most)\n\t\treturn 0;",
			new:   "if (!s.mss)\n\t\treturn 0;",
			test:  out,
			cases: []string{"segments that fit"},
		},
		{
			name:  "options at odd offsets",
			old:   "if (s.at & 1)",
			new:   "if (0)",
			test:  out,
			cases: []string{"at an odd offset", "after other options"},
		},
		{
			name:  "probes of others",
			old:   "outer->nexthdr == PROTO_NONE && is_egress_tunnel(src_of(outer))",
			new:   "outer->nexthdr == PROTO_NONE",
			test:  probes,
			cases: []string{"a probe from no tunnel address"},
		},
		{
			name: "errors about probes alone",
			old: `e.type <= ICMPV6_ERROR_MAX && e.nexthdr == PROTO_NONE && e.src.hi == own_node &&
	       e.src.lo == EGRESS_TUNNEL_HOST`,
			new:  "1",
			test: probes,
			cases: []string{
				"an error about another node's probe", "an error about a packet in a tunnel", "an echo with a quote",
			},
		},
		{
			name: "what is no tunnel",
			old: `if (outer->nexthdr != PROTO_IPV6 || !is_egress_tunnel(src_of(outer)) ||
	    bpf_skb_load_bytes(skb, sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new: `if (bpf_skb_load_bytes(skb, sizeof(struct eth_ip6) + 8, ends, sizeof(ends)))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			test:  out,
			cases: []string{"another protocol in the tunnel", "from no tunnel address"},
		},
		{
			name:  "containers of other nodes",
			old:   "ends[0].hi == node && claims_app(&ends[0])",
			new:   "claims_app(&ends[0])",
			test:  out,
			cases: []string{"a container of another node"},
		},
		{
			name: "answers for other nodes",
			old: `if (!to_outside && !(ends[1].hi == own_node && tenant_id(&ends[1])))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new:   "",
			test:  answers,
			cases: []string{"to another node's container"},
		},
		{
			name: "rules of the gateway",
			old: `if (!rule || !has_gateway(rule, own_node) || is_protected(&ends[1]))
			return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new: `if (!rule || is_protected(&ends[1]))
			return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			test:  out,
			cases: []string{"a destination by another gateway", "a destination without a gateway"},
		},
		{
			name: "rules of answers",
			old: `if (!rule || !has_gateway(rule, gateway) || is_protected(&src))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			new: `if (!rule || is_protected(&src))
		return drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);`,
			test: answers,
			cases: []string{
				"by another gateway", "of a denied host", "of a host without a gateway",
				"an answer by this node after a denial",
			},
		},
		{
			name:  "protected destinations",
			old:   " || is_protected(&ends[1])",
			test:  out,
			cases: []string{"a protected destination"},
		},
		{
			name:  "answers of protected hosts",
			old:   " || is_protected(&src)",
			test:  answers,
			cases: []string{"of a protected host"},
		},
		{
			name:  "tenants of this node without this gateway",
			old:   ": drop(skb, REASON_GATEWAY_DENIED, HOOK_CONTAINER);",
			new:   ": TCX_NEXT;",
			test:  out,
			cases: []string{"no gateway of this container's tenant"},
		},
		{
			name:  "tenants without this gateway",
			old:   ": drop(skb, REASON_GATEWAY_DENIED, HOOK_UPLINK_IN);",
			new:   ": TCX_NEXT;",
			test:  out,
			cases: []string{"no gateway of this tenant"},
		},
	}
}
