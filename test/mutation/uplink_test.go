package mutation_test

func uplink() []mutation {
	return append(attackers(), []mutation{
		{
			name: "tunnels of processes over IPv4",
			old: `if (vtep4_mask && !is_own_tunnel(skb) && is_tunnel4(skb))
		return drop(skb, REASON_TUNNEL_FORGED, HOOK_UPLINK_OUT);`,
			new:  "",
			test: "TestForgedTunnels4",
			cases: []string{
				"from a tunnel address, uplink out",
				"to a tunnel address, uplink out",
				"a later fragment, uplink out",
			},
		},
		{
			name: "tunnel packets of processes",
			old:  "why = REASON_TUNNEL_FORGED;",
			new:  ";",
			test: "TestNimitzTunnels",
			cases: []string{
				"a process to a node", "a process to a node, in fragments",
				"a process to a node, from an unknown address",
				"a process to another region", "a process as another region",
				"a process that has guessed the mark",
			},
		},
		{
			name: "errors without a quote",
			old: `sizeof(peer), &peer, sizeof(peer)))
		return REASON_ICMP_QUOTE;`,
			new: `sizeof(peer), &peer, sizeof(peer)) && 0)
		return REASON_ICMP_QUOTE;`,
			test:  "TestErrorsOfTheFabric",
			cases: []string{"an error that quotes half a header", "an error that quotes nothing"},
		},
		{
			name: "errors about local traffic",
			old: `if (peer.hi == own)
		return REASON_ICMP_QUOTE;`,
			new:   "",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"an error about a packet that never left"},
		},
		{
			name: "reserved apps",
			old: `if (app_id(&key->dst) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);`,
			new:   "",
			test:  "TestFromFabric",
			cases: []string{"reserved app"},
		},
		{
			name:  "absent containers",
			old:   "return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);",
			new:   "return TCX_NEXT;",
			test:  "TestFromFabric",
			cases: []string{"no such container", "the container under another app"},
		},
		{
			name: "base of the source",
			old: `if (!to || !in_base(&source) || !(from_id ? has_id(to, from_id) : is_allowed_node(&source, to_id)))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_UPLINK_IN);`,
			new: `if (!to || !(from_id ? has_id(to, from_id) : is_allowed_node(&source, to_id)))
		return drop(skb, REASON_TENANT_MISMATCH, HOOK_UPLINK_IN);`,
			test:  "TestFromFabric",
			cases: []string{"a tenant id outside the base"},
		},
		{
			name:  "other tenants",
			old:   "!(from_id ? has_id(to, from_id) : ",
			new:   "!(from_id ? 1 : ",
			test:  "TestFromFabric",
			cases: []string{"from another tenant", "from an unknown tenant"},
		},
		{
			name:  "nodes that the tenant may not reach",
			old:   "is_node_address(source) && may_reach_node(tenant, source->hi)",
			new:   "is_node_address(source)",
			test:  "TestFromFabric",
			cases: []string{"from a node"},
		},
		{
			name: "other addresses of nodes",
			old:  "is_node_address(source) && may_reach_node(tenant, source->hi)",
			new:  "may_reach_node(tenant, source->hi)",
			test: "TestNodesAllowed",
			cases: []string{
				"from another address of a node, blue", "from another address of a node, plain",
			},
		},
		{
			name:  "own egress addresses",
			old:   "why = key.src.hi == own_egress ? REASON_OWN_SOURCE : check_private(&key.src, &key.dst);",
			new:   "why = check_private(&key.src, &key.dst);",
			test:  "TestEgressPrefix",
			cases: []string{"an own address from the fabric"},
		},
		{
			name: "packets for an address of a gateway",
			old: `bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);
		return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);`,
			new:   "bpf_tail_call(skb, &pil_uplinks_v1, PROGRAM_EGRESS_GW);\n\t\treturn TCX_NEXT;",
			test:  "TestEgressWithoutPrograms",
			cases: []string{"to its address, without a program"},
		},
		{
			name: "reserved apps as source",
			old: `if (app_id(&source) >= FIRST_RESERVED_APP)
		return drop(skb, REASON_APP_RESERVED, HOOK_UPLINK_IN);`,
			new:   "",
			test:  "TestFromFabric",
			cases: []string{"from a reserved app"},
		},
		{
			name: "error of the cipher",
			old: `node_alias(to_id, &source);
		if (why)`,
			new: `node_alias(to_id, &source);
		if (why && 0)`,
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"from the fabric without a key"},
		},
		{
			name: "encryption",
			old:  "crypt(from_id, &source, ENCRYPT)",
			new:  "crypt(from_id, &source, DECRYPT)",
			test: "TestErrorsOfTheFabric",
			cases: []string{
				"too big", "too big, from the cache", "time exceeded, from a node", "about a packet with options",
				"about a first fragment", "about a later fragment", "about a TCP segment with a checksum of 0",
				"about an echo",
			},
		},
		{
			name: "other protocols",
			old: `if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;`,
			new:   "",
			test:  "TestFromFabric",
			cases: []string{"IPv4 that reads like our own /64"},
		},
		{
			name:  "tags",
			old:   "in_vlan(skb) || ",
			new:   "",
			test:  "TestTaggedFramesStayOut",
			cases: []string{"in the container"},
		},
		{
			name:  "owner of a packet on its second pass",
			old:   "own->ifindex == (ON_UPLINK | cookie)",
			new:   "own->ifindex & ON_UPLINK",
			test:  "TestMacvlanSendsAsItself",
			cases: []string{"as another tenant's, with the secret mark", "leaked"},
		},
		{
			name:  "packets on the node's route",
			old:   "(ON_UPLINK | cookie) || cookie == node_cookie);",
			new:   "(ON_UPLINK | cookie) || cookie == ~node_cookie);",
			test:  "TestMacvlanKinds",
			cases: []string{"a pair beside macvlans"},
		},
		{
			name: "containers behind macvlans",
			old: `if (macvlan && !from_node_netns(skb))
		return from_container(skb);`,
			test: "TestMacvlanSendsAsItself",
			cases: []string{
				"ARP, as the node", "IPv4", "a tag", "a tag that the socket calls IPv6", "after all of it",
				"as a sibling, with its MAC", "as a sibling, with its own MAC",
				"as another tenant's, with the secret mark", "as the node", "as the node's underlay",
				"as the node, with the mark", "as the node, with the secret mark", "dial tcp [fccc", "in plaintext",
				"in plaintext to a host, with the mark", "to all hosts on the link",
			},
		},
		{
			name: "frames for macvlans",
			old: `if (for_macvlan(skb))
			return drop(skb, REASON_MAC_OUTSIDE, HOOK_UPLINK_IN);`,
			test:  "TestMacvlanHearsTheFabricOnlyThroughUs",
			cases: []string{"drops for mac-outside", "the container received"},
		},
		{
			name: "tags behind tags",
			old: `if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`,
			new:  "",
			test: "TestPriorityTags",
			cases: []string{
				"a container to the node, tagged twice", "a container to a container, tagged twice",
				"a container to the node, tagged by a provider",
			},
		},
		{
			name: "tags that the host sends",
			old: `if (hides_in_tag(h))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_OUT);`,
			new:   "",
			test:  "TestToFabric",
			cases: []string{"a tag of VLAN 0", "two tags of VLAN 0"},
		},
		{
			name:  "tags of delivered packets",
			old:   "bpf_skb_vlan_pop(skb);",
			new:   ";",
			test:  "TestPriorityTags",
			cases: []string{"a container to a container"},
		},
		{
			name:  "frames for other hosts",
			old:   " || skb->pkt_type == PACKET_OTHERHOST",
			new:   "",
			test:  "TestFromFabric",
			cases: []string{"for another machine on the link"},
		},
		{
			name: "own source",
			old: `if (src_of(h)->hi == own_node)
		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);`,
			new:   "",
			test:  "TestFromFabric",
			cases: []string{"our own /64 as source", "our own node as source"},
		},
		{
			name: "other destinations",
			old: `return why ? drop(skb, why, HOOK_UPLINK_IN) : classify(skb, &key.dst);
	}
	why = parse`,
			new: `if (why)
			return drop(skb, why, HOOK_UPLINK_IN);
	}
	why = parse`,
			test: "TestFromFabric",
			cases: []string{
				"neighbour discovery", "the node's underlay address", "another node",
				"a container elsewhere, from a container", "the node itself",
				"the node itself, from a host whose address reads like a tenant's", "the node itself, from a node",
				"the gateway of a node without one", "the node itself, from a container",
			},
		},
		{
			name: "ciphertexts to the node",
			old:  ": check_private(&key.src, &key.dst);",
			new:  ": 0;",
			test: "TestFromFabric",
			cases: []string{
				"a ciphertext for the node itself", "a ciphertext for the underlay", "for a ciphertext",
			},
		},
		{
			name: "containers to hosts",
			old:  "why = REASON_TENANT_TO_NODE;",
			new:  ";",
			test: "TestFromFabric",
			cases: []string{
				"another address of this node, from a container", "the node's underlay address, from a container",
				"the node itself, from a container of network ila",
			},
		},
		{
			name:  "containers of other networks to nodes",
			old:   "claims_app(&key.src) && is_node_address(&key.dst)",
			new:   "is_node_address(&key.dst)",
			test:  "TestFromFabric",
			cases: []string{"the node itself, from a container of network ila"},
		},
		{
			name:  "containers to remote containers",
			old:   "claims_tenant(&key.src) && !claims_tenant(&key.dst) &&",
			new:   "claims_tenant(&key.src) &&",
			test:  "TestFromFabric",
			cases: []string{"a container elsewhere, from a container"},
		},
		{
			name:  "hosts to the node",
			old:   "claims_tenant(&key.src) && !claims",
			new:   "tenant_id(&key.src) && !claims",
			test:  "TestFromFabric",
			cases: []string{"the node itself, from a host whose address reads like a tenant's"},
		},
		{
			name:  "tenants of other nodes to the node",
			old:   "claims_tenant(&key.src) && !claims",
			new:   "in_base(&key.src) && !claims",
			test:  "TestFromFabric",
			cases: []string{"the node itself, from a node", "the node itself, from a container of network ila"},
		},
		{
			name:  "only errors get the peer's source",
			old:   "if (is_error(&p) && !claims_tenant",
			new:   "if (!claims_tenant",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"an echo of a router"},
		},
		{
			name:  "router errors only from the fabric",
			old:   "if (is_error(&p) && !claims_tenant(&key.src))",
			new:   "if (is_error(&p))",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"an error of another container about its peer's packet"},
		},
		{
			name:  "mark",
			old:   "(skb->mark == packet_mark && skb->ingress_ifindex)",
			new:   "skb->ingress_ifindex",
			test:  "TestToFabric",
			cases: []string{"forwarded from another device"},
		},
		{
			name:  "device it came in by",
			old:   "(skb->mark == packet_mark && skb->ingress_ifindex)",
			new:   "skb->mark == packet_mark",
			test:  "TestToFabric",
			cases: []string{"a process that knows the mark"},
		},
		{
			name: "mark with macvlans",
			old: `	if (macvlan)
		return skb->mark == accept_mark && is_accepted(skb);
`,
			test:  "TestMacvlanWithoutOwner",
			cases: []string{"the mark", "the secret mark"},
		},
		{
			name: "secret mark of a netkit's packets",
			old:  "return skb->mark == accept_mark || (",
			new:  "return true || (",
			test: "TestToFabric",
			cases: []string{
				"a process with a container's address", "a process that knows the mark",
				"forwarded from another device", "a ciphertext as source", "a ciphertext as destination",
				"a tag of VLAN 0", "two tags of VLAN 0", "another node's container", "a container's egress address",
				"another node's egress address", "a container of network ila as source",
			},
		},
		{
			name: "protocol in the header",
			old:  "if (h->eth.h_proto != bpf_htons(ETH_P_IPV6))",
			new:  "if (skb->protocol != bpf_htons(ETH_P_IPV6))",
			test: "TestNodeCannotLieAboutTheProtocol",
			cases: []string{
				"a container's packet declared as 0x0800", "a container's packet declared as 0x8100",
				"sent as 0x0800", "sent as 0x8100",
			},
		},
	}...)
}
