package mutation_test

// attackers returns mutations of the uplink's checks against attackers outside of containers: a process of the node,
// and a compromised node. The tests have two nodes on one wire.
func attackers() []mutation {
	const process, node = "TestHostNetworkProcess", "TestAnotherNode"
	return []mutation{
		{
			name: "local process",
			old:  "why = check_outward(&src, &dst);",
			new:  "why = check_outward(&src, &dst) && 0;",
			test: process,
			cases: []string{
				"another node's container", "own container to a container", "own container to a node", "ciphertext",
				"guest",
			},
		},
		{
			name: "another node as this one",
			old: `if (src_of(h)->hi == own_node)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);`,
			new:   "",
			test:  node,
			cases: []string{"this node", "this node's container"},
		},
		{
			name:  "another node as another tenant",
			old:   "!(from_id ? has_id(to, from_id) : ",
			new:   "!(from_id ? 1 : ",
			test:  node,
			cases: []string{"another tenant's container", "its own container, to another tenant"},
		},
		{
			name:  "another node as itself",
			old:   "is_node_address(source) && may_reach_node(tenant, source->hi)",
			new:   "is_node_address(source)",
			test:  node,
			cases: []string{"as itself"},
		},
		{
			name: "another node as its alias",
			old: `if (app_id(&source) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);`,
			new:   "",
			test:  node,
			cases: []string{"guest"},
		},
		{
			name:  "another node to a missing endpoint",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  node,
			cases: []string{"its own container, to a missing container"},
		},
		{
			name:  "another node's containers to the node",
			old:   "why = REASON_TENANT_TO_NODE;",
			new:   ";",
			test:  node,
			cases: []string{"its own container, to the node", "its own container, to the underlay"},
		},
		{
			name:  "another node as a ciphertext",
			old:   ": check_private(&key.src, &key.dst);",
			new:   ": 0;",
			test:  node,
			cases: []string{"ciphertext, to the node", "ciphertext, to the underlay"},
		},
		{
			name: "another node as a router, about local traffic",
			old: `if (peer.hi == own)
		return REASON_ICMP_QUOTE;`,
			new:   "",
			test:  node,
			cases: []string{"as a router, about what never left"},
		},
	}
}
