package mutation_test

func container() []mutation {
	return []mutation{
		{
			name: "protocol that a socket claims",
			old: `if (h->eth.h_proto != bpf_htons(ETH_P_IPV6))
		return REASON_NOT_IP6;`,
			test:  "TestMacvlanSendsAsItself",
			cases: []string{"a tag that the socket calls IPv6"},
		},
		{
			name:  "tenant of the source",
			old:   "if (why)\n\t\treturn drop(skb, why, HOOK_CONTAINER);\n\t/* Containers see",
			new:   "if (why)\n\t\treturn TCX_NEXT;\n\t/* Containers see",
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"from a tenant that was removed"},
		},
		{
			name: "destination of a clear tenant",
			old: `if (own->clear) {
		if (!in_base(dst))
			return REASON_DST_NOT_PRIVATE;`,
			new:   "if (own->clear) {",
			test:  "TestClearTenantsStayInside",
			cases: []string{"what an encrypted tenant's containers see"},
		},
		{
			name: "destination of an encrypted tenant",
			old: `if (!in_private(dst))
			return REASON_DST_NOT_PRIVATE;`,
			new:   "",
			test:  "TestFromContainer",
			cases: []string{"a plaintext address"},
		},
		{
			name: "error of the cipher",
			old: `why = crypt(id, &plain, DECRYPT);
		if (why)`,
			new: `why = crypt(id, &plain, DECRYPT);
		if (why && 0)`,
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"without a key", "with a place for a key and none in it"},
		},
		{
			name: "decryption",
			old:  "crypt(id, &plain, DECRYPT)",
			new:  "crypt(id, &plain, ENCRYPT)",
			test: "TestCacheAnswersOnlyItsKey",
			cases: []string{
				"a next hop that is too old", "a node without a route, again", "another path",
				"an entry that was not finished", "from before a change",
			},
		},
		{
			name: "decrypted base",
			old: `if (!in_base(&plain))
			continue;`,
			test:  "TestFromContainer",
			cases: []string{"foreign base", "made up", "red's ciphertext"},
		},
		{
			name:  "random destinations",
			old:   "REASON_DST_UNDECRYPTABLE",
			new:   "0",
			test:  "TestNothingRandomGetsThrough",
			cases: []string{"counted 0 of 1000", "random"},
		},
		{
			name:  "other tenants",
			old:   "return tenant_id(&plain) ? REASON_TENANT_MISMATCH : REASON_TO_NODE;",
			new:   "return 0;",
			test:  "TestFromContainer",
			cases: []string{"red's tenant id", "unknown tenant id", "tenant 0"},
		},
		{
			name:  "keys of the tenant's other ids",
			old:   "if (tenant_id(&plain) == id)",
			new:   "if (has_id(own, tenant_id(&plain)))",
			test:  "TestIdsOfOneTenant",
			cases: []string{"an address under the key of another id"},
		},
		{
			name:  "nodes, for a clear tenant",
			old:   "may_reach_node(own->ids[0], dst->hi) ? 0 : REASON_TO_NODE;",
			new:   "1 ? 0 : REASON_TO_NODE;",
			test:  "TestClearTenantsStayInside",
			cases: []string{"a node"},
		},
		{
			name: "other tenants, for a clear one",
			old: `if (!has_id(own, tenant_id(dst)))
			return REASON_TENANT_MISMATCH;`,
			test:  "TestClearTenantsStayInside",
			cases: []string{"another tenant"},
		},
		{
			name:  "reserved apps",
			old:   "app_id(dst) >= FIRST_RESERVED_APP ? resolve_node(dst) : 0",
			new:   "0",
			test:  "TestFromContainer",
			cases: []string{"reserved app", "the alias of a node"},
		},
		{
			name: "other reserved apps",
			old: `if (app_id(dst) != NODE_APP)
		return REASON_APP_RESERVED;`,
			new:   "",
			test:  "TestFromContainer",
			cases: []string{"reserved app"},
		},
		{
			name: "aliases of nodes that the tenant may not reach",
			old: `if (!may_reach_node(tenant_id(dst), dst->hi))
		return REASON_TO_NODE;`,
			new:   "",
			test:  "TestFromContainer",
			cases: []string{"the alias of a node"},
		},
		{
			name:  "other addresses of nodes, for a clear tenant",
			old:   "is_node_address(dst) && may_reach_node(own->ids[0]",
			new:   "may_reach_node(own->ids[0]",
			test:  "TestNodesAllowed",
			cases: []string{"to another address of a node, plain"},
		},
		{
			name: "program of hosts outside",
			old: `bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_OUT);
		return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);`,
			new:   "bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_OUT);\n\t\treturn TCX_NEXT;",
			test:  "TestEgressWithoutPrograms",
			cases: []string{"to a host outside, without a program"},
		},
		{
			name: "other devices of the node",
			old: `if (!is_uplink(fib.ifindex))
		return REASON_NO_ROUTE;`,
			new:   "",
			test:  "TestOnlyTheUplinkLeadsOut",
			cases: []string{"through another device"},
		},
		{
			name:  "route",
			old:   "return why ? drop(skb, why, HOOK_CONTAINER) : forward(skb, h, p, f, egress",
			new:   "return why ? TCX_NEXT : forward(skb, h, p, f, egress",
			test:  "TestFromContainer",
			cases: []string{"a node without a route", "absent here"},
		},
		{
			name: "source",
			old:  "if (why == REASON_SRC_NOT_OWN)\n\t\treturn to_other_network(skb, key, why);",
			new:  "if (why == REASON_SRC_NOT_OWN)\n\t\treturn TCX_NEXT;",
			test: "TestFromContainer",
			cases: []string{
				"foreign source", "no source", "own plaintext as source", "own source from another device",
			},
		},
		{
			name:  "NETPILA sources behind a switch",
			old:   "return claims_netpila_src(key) ? drop(skb, why, HOOK_CONTAINER) : TC_ACT_SHOT;",
			new:   "return TC_ACT_SHOT;",
			test:  "TestNimitzPorts",
			cases: []string{"a switch's, in netpila's name"},
		},
		{
			name: "another network's program",
			old: `bpf_tail_call(skb, &pil_networks_v1, its->network);
	return drop(skb, REASON_NO_PROGRAM, HOOK_CONTAINER);`,
			new:   "bpf_tail_call(skb, &pil_networks_v1, its->network);\n\treturn TCX_NEXT;",
			test:  "TestNimitzPorts",
			cases: []string{"without a program"},
		},
		{
			name:  "device of the source",
			old:   " || m->from->ifindex != key->device)\n\t\treturn REASON_SRC_NOT_OWN;",
			new:   ")\n\t\treturn REASON_SRC_NOT_OWN;",
			test:  "TestFromContainer",
			cases: []string{"foreign source", "own source from another device"},
		},
		{
			name:  "unfinished cache entries",
			old:   "f->egress = 0; /* invalidates the slot until all fields are written */",
			new:   "",
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"a node without a route, again"},
		},
		{
			name: "other protocols",
			old: `if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->vlan_present)
		return to_other_network(skb, &key, REASON_NOT_IP6);`,
			new: `if (skb->vlan_present)
		return to_other_network(skb, &key, REASON_NOT_IP6);`,
			test:  "TestFromContainer",
			cases: []string{"ARP"},
		},
		{
			name:  "tags",
			old:   " || skb->vlan_present",
			new:   "",
			test:  "TestTaggedFramesStayOut",
			cases: []string{"a tagged frame from a container"},
		},
		{
			name: "truncated header",
			old: `if (!h)
		return REASON_MALFORMED;
	/* skb->protocol`,
			new: `if (!h)
		return REASON_NOT_IP6;
	/* skb->protocol`,
			test:  "TestHalfAHeaderStaysIn",
			cases: []string{"half an IPv6 header"},
		},
		{
			name:  "drops that a switch counts",
			old:   "its && its->network == NETWORK_OVS && (",
			new:   "its && its->network == NETWORK_COUNT && (",
			test:  "TestNimitzPorts",
			cases: []string{"a switch's", "half a header, in netpila's name"},
		},
		{
			name:  "packets that a switch leaves to us",
			old:   "(linkwide || !claims_netpila_src(key))",
			new:   "(linkwide || key)",
			test:  "TestNimitzPorts",
			cases: []string{"half a header, in netpila's name"},
		},
		{
			name:  "drops that a switch counts, any source",
			old:   "linkwide = why >= REASON_ND_FORBIDDEN && why <= REASON_MULTICAST",
			new:   "linkwide = false",
			test:  "TestNimitzPorts",
			cases: []string{"half a header, in netpila's name"},
		},
		{
			name: "devices that a switch reads",
			old: `if (its->network == NETWORK_OVS)
		return claims_netpila_src(key) ? drop(skb, why, HOOK_CONTAINER) : TC_ACT_SHOT;`,
			test:  "TestNimitzPorts",
			cases: []string{"a switch's", "a switch's, in netpila's name"},
		},
		{
			name: "multicast",
			old: `if (!why && *(__u8 *)&key->dst == 0xff)
		why = REASON_MULTICAST;`,
			new:   "",
			test:  "TestFromContainer",
			cases: []string{"multicast"},
		},
		{
			name:  "age of a next hop",
			old:   "if (likely(f->expires > bpf_jiffies64()))",
			new:   "if (f->expires || 1)",
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"a next hop that is too old"},
		},
		{
			name: "length",
			old: `if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return REASON_TOO_BIG;`,
			test:  "TestAnswers",
			cases: []string{"1,401 bytes, by a narrow route", "1,501 bytes", "1,501 bytes and a hop limit of 1"},
		},
		{
			name:  "MTU of a route",
			old:   "fib.tot_len = length > 0xffff ? 0xffff : length;",
			new:   "fib.tot_len = 0 * length;",
			test:  "TestAnswers",
			cases: []string{"1,401 bytes, by a narrow route", "1,500 bytes", "1,501 bytes"},
		},
		{
			name: "MTU from the FIB",
			old: `if (why == REASON_TOO_BIG) /* a router checks the hop limit first */
			return icmp_error_send(skb, p, f, h->hop_limit <= 1 ? REASON_HOP_LIMIT : why);`,
			test:  "TestAnswers",
			cases: []string{"1,401 bytes, by a narrow route", "1,501 bytes", "1,501 bytes and a hop limit of 1"},
		},
		{
			name:  "hop limit before MTU",
			old:   "h->hop_limit <= 1 ? REASON_HOP_LIMIT : why",
			new:   "why",
			test:  "TestAnswers",
			cases: []string{"1,501 bytes and a hop limit of 1"},
		},
	}
}
