package mutation_test

// both returns each case for IPv4 and for IPv6.
func both(names ...string) (all []string) {
	for _, n := range names {
		all = append(all, n+", IPv4", n+", IPv6")
	}
	return all
}

func nimitzTables() []mutation {
	return []mutation{
		{
			name: "MAC of a container",
			old:  "(own_vtep4 || r->port < FIRST_DEVICE) && r->vtep.hi ? r->vtep.hi : ",
			test: "TestNimitzPackets",
			cases: both("b, the other tenant's arrives, TCP", "b, the other tenant's arrives, UDP",
				"b, the other tenant's arrives, UDP without a checksum", "b, the other tenant's arrives, ICMP",
				"b, the other tenant's arrives, another protocol", "b, the other tenant's arrives, a first fragment",
				"b, the other tenant's arrives, a later fragment"),
		},
	}
}

func nimitzDirect() []mutation {
	return []mutation{
		{
			name:  "tunnel addresses alone",
			old:   "from->lo != VTEP_HOST || ",
			test:  "TestNimitzPackets",
			cases: both("not from a VTEP", "not the tunnel address of the one abroad"),
		},
		{
			name: "nodes of the region",
			old: ` || !is_peer(from))
		return REASON_PEER_UNKNOWN;`,
			new: `)
		return REASON_PEER_UNKNOWN;`,
			test:  "TestNimitzPackets",
			cases: both("from another cluster's VTEP", "a node abroad that is no Edge Switch"),
		},
		{
			name:  "packets that were passed on",
			old:   "if (j->relayed == GBP_TWICE)\n\t\treturn false;",
			new:   "",
			test:  "TestNimitzMoved",
			cases: both("a late packet that was passed on twice"),
		},
		{
			name: "peers of packets that pass no device",
			old:  "why = check_peer(&t->src, j);\n\tif (why)\n\t\treturn why;",
			new:  "why = check_peer(&t->src, j);\n\tif (why && 0)\n\t\treturn why;",
			test: "TestNimitzPacketsDirect",
			cases: both("not from a VTEP", "not the tunnel address of the one abroad",
				"from another cluster's VTEP", "a node abroad that is no Edge Switch"),
		},
	}
}

func nimitz() []mutation {
	const packets, drops, tunnels = "TestNimitzPackets", "TestNimitzDrops", "TestNimitzTunnels"
	return []mutation{
		{
			name:  "only by the uplink",
			old:   "is_known_tunnel(skb) ? check_peer(&from, j) : REASON_PEER_UNKNOWN;",
			new:   "check_peer(&from, j);",
			test:  tunnels,
			cases: []string{"to another address of this node"},
		},
		{
			name: "containers that have moved",
			old:  "r->ifindex & ROUTE_RELAYS && may_relay(j)",
			new:  "0",
			test: "TestNimitzMoved",
			cases: both("a late packet, TCP", "a late packet, UDP", "a late packet, UDP without a checksum",
				"a late packet, ICMP", "a late packet, another protocol", "a late packet, a first fragment",
				"a late packet, a later fragment", "the last hop of a late packet", "a late packet that was passed on"),
		},
		{
			name:  "a relay does not return to a frontend",
			old:   " && (j->from != PORT_VXLAN || j->remote_edge))\n\t\t\tchoose_frontend",
			new:   ")\n\t\t\tchoose_frontend",
			test:  "TestFrontendsMoved",
			cases: []string{"to the backend"},
		},
		{
			name:  "senders",
			old:   "return REASON_SRC_NOT_OWN;",
			new:   "return REASON_NO_ENDPOINT;",
			test:  packets,
			cases: both("another's source", "a source of far away", "a source of the other tenant alone"),
		},
		{
			name: "TTL of IPv4",
			old: `if (!h4 || h4->ttl <= 1)
			return REASON_HOP_LIMIT;`,
			new: `if (!h4)
			return REASON_HOP_LIMIT;`,
			test:  packets,
			cases: []string{"the last hop is not for a tunnel, IPv4"},
		},
		{
			name: "hop limit of IPv6",
			old: `if (!h || h->hop_limit <= 1)
		return REASON_HOP_LIMIT;`,
			new: `if (!h)
		return REASON_HOP_LIMIT;`,
			test:  packets,
			cases: []string{"the last hop is not for a tunnel, IPv6"},
		},
		{
			name: "quotes",
			old: `if (is_any_error(p, j->family) && !quote_matches(skb, p, j, &from))
		return drop(skb, REASON_ICMP_QUOTE, j->hook);`,
			test: drops,
			cases: append(both("an error about another sender's packet", "an error that quotes nothing"),
				"an error about a packet for another receiver, IPv4"),
		},
		{
			name:  "source of a router's error",
			old:   "j->src = quoted[1];",
			test:  "TestNimitzErrors",
			cases: both("of a router"),
		},
		{
			name: "length",
			old: `if (fits)
		return REASON_TOO_BIG;`,
			test:  drops,
			cases: both("longer than a tunnel takes"),
		},
		{
			name: "a device for tunnels",
			old: `if (fits < 0)
		return REASON_NO_ROUTE;`,
			test:  "TestNimitzAnswers",
			cases: both("without the tunnels' device"),
		},
		{
			name: "route",
			old: `if (!r || !node)
		return drop(skb, REASON_NO_ROUTE, j->hook);`,
			new: `if (!r || !node)
		return TCX_NEXT;`,
			test: packets,
			cases: both(
				"outside, and no service", "the other tenant to the service", "from the gateway to nothing virtual",
				"an unknown VNI", "the gateway's VNI", "no VNI", "a tenant that is not in the other region",
			),
		},
		{
			name: "no port",
			old: `if (r->port == PORT_NONE)
		return drop(skb, REASON_NO_ENDPOINT, j->hook);`,
			test: packets,
			cases: both(
				"no container is there", "from abroad to a missing container", "the other tenant to who is beside",
			),
		},
		{
			name:  "transit packets",
			old:   "in_base(&r->vtep) == !j->remote_edge",
			new:   "!in_base(&r->vtep) && j->remote_edge",
			test:  packets,
			cases: both("a node passes nothing on"),
		},
		{
			name:  "transit between other nodes",
			old:   "in_base(&r->vtep) == !j->remote_edge",
			new:   "in_base(&r->vtep) && !j->remote_edge",
			test:  packets,
			cases: both("from abroad to abroad", "from abroad and back"),
		},
		{
			name: "back to the gateway",
			old: `(r->port == PORT_GATEWAY && (j->from == PORT_GATEWAY || !node->gateway)))
		return drop(skb, REASON_NO_ROUTE, j->hook);`,
			new: `(r->port == PORT_GATEWAY && !node->gateway))
		return drop(skb, REASON_NO_ROUTE, j->hook);`,
			test:  packets,
			cases: both("from the gateway back to it"),
		},
		{
			name: "a source for the underlay",
			old: `if (r->port == PORT_GATEWAY && !j->translated)
		return drop(skb, REASON_UNTRANSLATED, j->hook);`,
			test: packets,
			cases: both(
				"who has no virtual address to the service", "who has no virtual address to what is outside",
				"the other tenant to what is outside", "who has no virtual address here to the gateway",
				"from abroad to a service", "from abroad to the gateway",
			),
		},
		{
			name: "scope of outside prefixes",
			old: `.scope = scope_of(j->family, j->vni), .address = j->dst};

		if`,
			new: `.scope = scope_of(j->family, 7), .address = j->dst};

		if`,
			test: packets,
			cases: append(both(
				"b, to what is another tenant's service, TCP", "b, to what is another tenant's service, UDP",
				"b, to what is another tenant's service, UDP without a checksum",
				"b, to what is another tenant's service, ICMP",
				"b, to what is another tenant's service, another protocol",
				"b, to what is another tenant's service, a first fragment",
				"b, to what is another tenant's service, a later fragment",
			), both(
				"the other tenant to what is outside",
			)...),
		},
		{
			name: "foreign ciphertext",
			old:  "return REASON_FOREIGN_UNKNOWN;",
			new:  "return 0;",
			test: packets,
			cases: both(
				"a VNI of here from abroad", "a VNI of the third region from abroad",
				"the gateway's VNI from abroad", "a source of here from abroad",
				"a source of the third region from abroad",
			),
		},
		{
			name: "identities of other tenants",
			old: `j->vni = f->vni;
	j->identity = 0;`,
			new:  "j->vni = f->vni;",
			test: packets,
			cases: both(
				"e, arrives, TCP", "e, arrives, UDP", "e, arrives, UDP without a checksum", "e, arrives, ICMP",
				"e, arrives, another protocol", "e, arrives, a first fragment", "e, arrives, a later fragment",
			),
		},
		{
			name: "errors that are not sent",
			old:  "return j.why ? nimitz_icmp_error(skb, &p, &j) : why;",
			new:  "return j.why ? drop(skb, j.why, HOOK_CONTAINER) : why;",
			test: "TestNimitzAnswers",
			cases: both(
				"out of hops", "a long one out of hops", "longer than a tunnel takes",
				"longer than a narrow one takes",
			),
		},
		{
			name:  "hops of what a frontend judges",
			old:   "return why || hops > 1 ? why : REASON_HOP_LIMIT;",
			new:   "return why;",
			test:  "TestFrontendDrops",
			cases: []string{"out of hops"},
		},
		{
			name: "multicast destination",
			old: `if (!why && is_multicast(&j))
		why = over_ipv4 ? REASON_NOT_REPLICATED : REASON_MULTICAST;`,
			test: packets,
			cases: []string{
				"to all of 224.0.0.1, IPv4", "to all of 239.255.255.250, IPv4", "to all of 255.255.255.255, IPv4",
			},
		},
	}
}

func nimitzNAT() []mutation {
	const drops = "TestNimitzDrops"
	return []mutation{
		{
			name: "truncated ICMP message",
			old: `if (p->l4 + ICMPV6_HLEN > p->end || bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1))
		return REASON_MALFORMED;`,
			new:   "bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1);",
			test:  drops,
			cases: []string{"half an ICMP header"},
		},
		{
			name:  "redirects and routers",
			old:   "return REASON_ND_FORBIDDEN;",
			new:   "break;",
			test:  drops,
			cases: []string{"an ICMP redirect", "an ICMP router advertisement"},
		},
		{
			name: "version and length",
			old: `if (h->version_length >> 4 != 4 || (h->version_length & 15) < 5)
		return REASON_MALFORMED;`,
			test:  drops,
			cases: []string{"a header of 16 bytes", "version 5"},
		},
		{
			name: "options",
			old: `if ((h->version_length & 15) > 5)
		return REASON_ROUTING_HEADER;`,
			test:  drops,
			cases: []string{"options"},
		},
		{
			name: "length of the packet",
			old: `if (p->end > skb->len || p->end < sizeof(*h))
		return REASON_MALFORMED;`,
			test:  drops,
			cases: []string{"less data than the header says"},
		},
		{
			name: "tags",
			old: `if (skb->vlan_present)
		return REASON_NOT_IP6;`,
			test:  drops,
			cases: []string{"a tag"},
		},
		{
			name: "truncated header of IPv4",
			old: `if (!h4)
		return REASON_MALFORMED;`,
			new: `if (!h4)
		return REASON_NOT_IP6;`,
			test:  drops,
			cases: []string{"a frame shorter than a header"},
		},
		{
			name: "other families",
			old: `if (h4->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return REASON_NOT_IP6;`,
			test:  drops,
			cases: []string{"a frame of neither family"},
		},
		{
			name: "truncated header of IPv6",
			old: `if (!h)
		return REASON_MALFORMED;`,
			new: `if (!h)
		return REASON_NOT_IP6;`,
			test:  "TestNimitzTunnels",
			cases: []string{"half an IPv6 header"},
		},
		{
			name:  "quoted destination",
			old:   "same_addr(&quoted[0], &j->orig_dst) && same_addr(&quoted[1], from)",
			new:   "same_addr(&quoted[0], &j->orig_dst)",
			test:  drops,
			cases: []string{"an error about a packet for another receiver, IPv4"},
		},
		{
			name:  "quoted source",
			old:   "return same_addr(&quoted[0], &j->orig_dst) &&",
			new:   "return",
			test:  drops,
			cases: both("an error about another sender's packet"),
		},
		{
			name: "translation of quotes",
			old: `if (is_any_error(p, j->family) && translate_quote(skb, p, j, from))
		return -1;`,
			test:  "TestNimitzErrors",
			cases: both("of a container", "of a service", "of a router"),
		},
	}
}

func nimitzGateway() []mutation {
	const leaks = "TestGatewayLeaksNothing"
	return []mutation{
		{
			name: "sources",
			old: `if (!is_gateway_addr(&f.src))
		return drop(skb, REASON_UNTRANSLATED, HOOK_GATEWAY);`,
			test: leaks,
			cases: []string{
				"a container's virtual address", "a container's overlay address", "the node's address",
				"a tunnel address", "a container's netpila address", "another gateway's address", "without rules",
			},
		},
		{
			name:  "this node's tunnel packets",
			old:   "a->hi == own_node && ",
			test:  leaks,
			cases: []string{"another gateway's address"},
		},
		{
			name:  "not a container's address",
			old:   "!tenant_id(a) && ",
			test:  leaks,
			cases: []string{"a container's netpila address"},
		},
		{
			name:  "not an address of the node",
			old:   " && app_id(a) == GATEWAY_APP",
			test:  leaks,
			cases: []string{"the node's address", "a tunnel address"},
		},
		{
			name: "containers",
			old: `if (claims_tenant(&f.dst))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_GATEWAY);`,
			test:  leaks,
			cases: []string{"to a container of netpila"},
		},
		{
			name:  "the private prefix",
			old:   "why = check_private(&f.src, &f.dst);",
			new:   "why = 0;",
			test:  leaks,
			cases: []string{"to the private prefix"},
		},
		{
			name: "whole headers",
			old: `h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_GATEWAY);`,
			new: `h = eth_ip6_of(skb);
	if (!h)
		return TCX_NEXT;`,
			test:  leaks,
			cases: []string{"cut short"},
		},
		{
			name:  "no gateway",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  leaks,
			cases: []string{"a node without a gateway"},
		},
		{
			name: "tags and IPv4",
			old: `if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return drop(skb, REASON_NOT_IP6, HOOK_GATEWAY);`,
			test:  leaks,
			cases: []string{"a tag", "IPv4"},
		},
	}
}

func nimitzICMP() []mutation {
	return []mutation{
		{
			name:  "errors and fragments of IPv4",
			old:   "p->l4 && !is_error4(p) && ",
			test:  "TestNimitzAnswers",
			cases: []string{"a later fragment out of hops, IPv4", "an error out of hops, IPv4"},
		},
		{
			name: "drops without an error",
			old: `j->why == REASON_NO_ROUTE ||
	    `,
			test:  "TestNimitzAnswers",
			cases: both("without the tunnels' device"),
		},
		{
			name:  "errors and fragments of IPv6",
			old:   "j->family == FAMILY_4 ? icmp4_error_wanted(skb, p) : icmp_error_wanted(skb, p)",
			new:   "j->family != FAMILY_4 || icmp4_error_wanted(skb, p)",
			test:  "TestNimitzAnswers",
			cases: []string{"a later fragment out of hops, IPv6", "an error out of hops, IPv6"},
		},
	}
}

func tunnel() []mutation {
	return []mutation{
		{
			name:  "mark bits of netfilter",
			old:   "(skb->mark & tunnel_bits) == tunnel_mark",
			new:   "skb->mark == tunnel_mark",
			test:  "TestNimitzMarks",
			cases: []string{"0 bytes of 100 from invalid AddrPort", "dial tcp 10.0.2.2"},
		},
		{
			name:  "processes with the mark",
			old:   "!was_made_here(skb) && ",
			new:   "",
			test:  "TestNimitzTunnels",
			cases: []string{"a process that has guessed the mark"},
		},
	}
}

func uplinkClass() []mutation {
	return []mutation{
		{
			name:  "receivers of tunnel packets",
			old:   " || (dst->lo & c->lo_mask) != c->lo",
			new:   "",
			test:  "TestNimitzTunnels",
			cases: []string{"a node", "a node, with no identity", "to another address of this node"},
		},
		{
			name:  "a network that the node lacks",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  "TestFromFabric",
			cases: []string{"the gateway of a node without one"},
		},
	}
}
