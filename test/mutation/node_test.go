package mutation_test

func node() []mutation {
	return []mutation{
		{
			name:  "echoes of containers",
			old:   "return is_error(p) || p->icmp_type == ICMPV6_REPLY ? 0 : REASON_TO_NODE;",
			new:   "return 0;",
			test:  "TestToNode",
			cases: []string{"echo"},
		},
		{
			name: "fragments",
			old: `if (p->parts & HAS_FRAGMENT)
		return REASON_TO_NODE;`,
			test: "TestToNode",
			cases: []string{
				"first fragment of a reply", "first fragment with identification 0", "first fragment of an answer",
				"first fragment of an error",
			},
		},
		{
			name: "no socket",
			old: `if (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP)
		return REASON_TO_NODE;`,
			new: `if (p->proto != NEXTHDR_TCP && p->proto != NEXTHDR_UDP)
		return 0;`,
			test:  "TestToNode",
			cases: []string{"another protocol"},
		},
		{
			name: "new connections on old ports",
			old: `if ((flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
			return REASON_TO_NODE;`,
			new:   "",
			test:  "TestToNode",
			cases: []string{"connection where one is"},
		},
		{
			name: "segments outside of a connection",
			old: `return false;
		connected = socket->state != BPF_TCP_LISTEN;`,
			new: `return true;
		connected = socket->state != BPF_TCP_LISTEN;`,
			test:  "TestToNode",
			cases: []string{"segment of no connection"},
		},
		{
			name:  "listeners",
			old:   "socket->state != BPF_TCP_LISTEN",
			new:   "true",
			test:  "TestToNode",
			cases: []string{"segment for a listener"},
		},
		{
			name: "datagrams without a socket",
			old: `return false;
		__builtin_memcpy(&peer, t->ipv6.saddr, sizeof(peer));`,
			new: `return true;
		__builtin_memcpy(&peer, t->ipv6.saddr, sizeof(peer));`,
			test: "TestToNode",
			cases: []string{
				"datagram to a connected socket, from another port", "datagram without a socket",
				"answer of a container that was not asked",
			},
		},
		{
			name:  "open sockets",
			old:   "socket->state == BPF_TCP_ESTABLISHED",
			new:   "true",
			test:  "TestToNode",
			cases: []string{"datagram to an open socket"},
		},
		{
			name: "state of sockets",
			old:  "return has_connection(skb, &t, p->proto) ? 0 : REASON_TO_NODE;",
			new:  "return has_connection(skb, &t, p->proto) ? 0 : 0;",
			test: "TestToNode",
			cases: []string{
				"segment for a listener", "segment of no connection", "datagram to an open socket",
				"datagram to a connected socket, from another port", "datagram without a socket",
				"answer of a container that was not asked",
			},
		},
		{
			name: "not a reply",
			old: `why = 0;
	if (why)
		return drop(skb, why, HOOK_CONTAINER);`,
			new:  "why = 0;",
			test: "TestToNode",
			cases: []string{
				"echo", "connection", "connection where one is", "segment for a listener",
				"segment of no connection", "later fragment", "another protocol", "datagram to an open socket",
				"first fragment of a reply", "first fragment with identification 0", "first fragment of an answer",
				"first fragment of an error",
				"datagram to a connected socket, from another port", "datagram without a socket",
				"answer of a container that was not asked",
			},
		},
		{
			name: "tenants that may not reach the node",
			old:  "if (why == REASON_TO_NODE && !(p->parts & HAS_FRAGMENT) && may_reach_node(tenant, own_node))",
			new:  "if (why == REASON_TO_NODE && !(p->parts & HAS_FRAGMENT))",
			test: "TestToNode",
			cases: []string{
				"echo", "connection", "connection where one is", "segment for a listener",
				"segment of no connection", "another protocol", "datagram to an open socket",
				"datagram to a connected socket, from another port", "datagram without a socket",
				"answer of a container that was not asked",
			},
		},
		{
			name:  "fragments of tenants that may reach the node",
			old:   " && !(p->parts & HAS_FRAGMENT) && may_reach_node(tenant, own_node)",
			new:   " && may_reach_node(tenant, own_node)",
			test:  "TestNodesAllowed",
			cases: []string{"a fragment to its own node, blue", "a fragment to its own node, plain"},
		},
		{
			name: "other sources of the node",
			old: `if (!same_addr(&key->src, &node))
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_NODE);`,
			new: `if (!same_addr(&node, &node))
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_NODE);`,
			test:  "TestFromNode",
			cases: []string{"underlay address", "address of a container", "gateway", "another of the node"},
		},
		{
			name:  "other destinations of the node",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_NODE);",
			new:   "return TCX_NEXT;",
			test:  "TestFromNode",
			cases: []string{"container of another node", "plaintext address", "gateway as destination"},
		},
		{
			name:  "tenant",
			old:   "return drop(skb, REASON_NO_KEY, HOOK_NODE);",
			new:   "return TCX_NEXT;",
			test:  "TestFromNode",
			cases: []string{"without its tenant"},
		},
		{
			name: "other protocols",
			old: `if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return drop(skb, REASON_NOT_IP6, HOOK_NODE);`,
			new:   "",
			test:  "TestFromNode",
			cases: []string{"IPv4"},
		},
		{
			name: "forwarded packets",
			old: `if (skb->ingress_ifindex)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_NODE);`,
			new:   "",
			test:  "TestFromNode",
			cases: []string{"forwarded"},
		},
		{
			name: "truncated header",
			old: `if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_NODE);`,
			new: `if (!h)
		return TCX_NEXT;`,
			test:  "TestNodeClaimsNobody",
			cases: []string{"half an IPv6 header"},
		},
	}
}
