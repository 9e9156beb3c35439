package mutation_test

func hostIf() []mutation {
	const stranger, process = "TestStranger", "TestProcessBySecondNIC"
	return []mutation{
		{
			name:  "other addresses as tenants'",
			old:   "in_base(a) && tenant_id(a);",
			new:   "tenant_id(a);",
			test:  "TestToFabric",
			cases: []string{"a ciphertext as source", "an address that reads like a tenant's"},
		},
		{
			name:  "locators as tenants",
			old:   " || in_ila(a)",
			test:  "TestToFabric",
			cases: []string{"a container of network ila as source"},
		},
		{
			name:  "nodes as tenants",
			old:   "in_base(a) && tenant_id(a);",
			new:   "in_base(a);",
			test:  "TestToFabric",
			cases: []string{"a ciphertext as destination", "the node"},
		},
		{
			name:  "ciphertexts as source",
			old:   "in_private(src) || in_private(dst) ? REASON_PRIVATE_OUTSIDE : 0",
			new:   "in_private(dst) ? REASON_PRIVATE_OUTSIDE : 0",
			test:  "TestFromFabric",
			cases: []string{"a ciphertext for the node itself", "a ciphertext for the underlay"},
		},
		{
			name:  "ciphertexts as destination",
			old:   "in_private(src) || in_private(dst) ? REASON_PRIVATE_OUTSIDE : 0",
			new:   "in_private(src) ? REASON_PRIVATE_OUTSIDE : 0",
			test:  "TestFromFabric",
			cases: []string{"for a ciphertext"},
		},
		{
			name:  "host as a container",
			old:   "claims_tenant(src) || is_egress(src) ? REASON_HOST_CLAIMS_TENANT : check_private(src, dst)",
			new:   "is_egress(src) ? REASON_HOST_CLAIMS_TENANT : check_private(src, dst)",
			test:  process,
			cases: []string{"another node's container", "own container"},
		},
		{
			name:  "host with the private prefix",
			old:   "REASON_HOST_CLAIMS_TENANT : check_private(src, dst)",
			new:   "REASON_HOST_CLAIMS_TENANT : 0",
			test:  process,
			cases: []string{"ciphertext", "guest"},
		},
		{
			name:  "host as a container outside",
			old:   "claims_tenant(src) || is_egress(src) ?",
			new:   "claims_tenant(src) ?",
			test:  "TestToFabric",
			cases: []string{"a container's egress address", "another node's egress address"},
		},
		{
			name: "spoofed egress addresses",
			old: `if (is_egress(src))
		return src->hi == own_egress ? REASON_OWN_SOURCE : REASON_TENANT_TO_NODE;`,
			new:  "",
			test: "TestFromEdge",
			cases: []string{
				"an egress address of this node, by eth1", "an egress address of this node, by tun1",
				"another node's egress address, by eth1", "another node's egress address, by tun1",
			},
		},
		{
			name: "egress addresses of a prefix of their own",
			old:  "(in_base(a) || (a->hi & egress_mask) == egress_prefix)",
			new:  "in_base(a)",
			test: "TestEgressPrefix",
			cases: []string{
				"an own address comes in", "an own address goes out", "another node's comes in",
				"another node's goes out",
			},
		},
		{
			name:  "host by other interfaces",
			old:   ": check_outward(&src, &dst);",
			new:   ": 0;",
			test:  process,
			cases: []string{"another node's container", "ciphertext", "guest", "own container"},
		},
		{
			name: "spoofed containers of this node",
			old: `if (src->hi == own_node && (tenant_id(src) || same_addr(src, &node)))
		return REASON_OWN_SOURCE;`,
			new:  "(void)node;",
			test: stranger,
			cases: []string{
				"container here", "container here, to its sibling", "container here, to the interface",
				"the node itself",
			},
		},
		{
			name:  "spoofed node address",
			old:   "(tenant_id(src) || same_addr(src, &node))",
			new:   "(tenant_id(src) || !same_addr(&node, &node))",
			test:  stranger,
			cases: []string{"the node itself"},
		},
		{
			name:  "services",
			old:   "(tenant_id(src) || same_addr(src, &node))",
			new:   "same_addr(&node, &node)",
			test:  "TestFromEdge",
			cases: []string{"a service in our /64, by eth1", "a service in our /64, by tun1"},
		},
		{
			name: "spoofed containers of other nodes",
			old: `if (claims_tenant(src))
		return REASON_TENANT_TO_NODE;`,
			new:  "",
			test: stranger,
			cases: []string{
				"container elsewhere", "container elsewhere, to a container",
				"container elsewhere, to the interface",
			},
		},
		{
			name:  "spoofed private prefix",
			old:   "\treturn check_private(src, dst);",
			new:   "\treturn 0;",
			test:  stranger,
			cases: []string{"answer of a container", "behind a priority", "to a container"},
		},
		{
			name: "spoofed sources",
			old:  "why = inward ? check_inward(&src, &dst) :",
			new:  "why = inward ? 0 :",
			test: "TestFromEdge",
			cases: []string{
				"a container here, by eth1", "a container here, by tun1", "another node's container, by eth1",
				"another node's container, by tun1", "another node's container, to a container, by eth1",
				"another node's container, to a container, by tun1",
				"another node's container, to the underlay, by eth1",
				"another node's container, to the underlay, by tun1", "no container here, by eth1",
				"no container here, by tun1", "the node itself, by eth1", "the node itself, by tun1",
				"to what containers see, by eth1", "to what containers see, by tun1",
				"what containers see, by eth1", "what containers see, by tun1",
				"an egress address of this node, by eth1", "an egress address of this node, by tun1",
				"another node's egress address, by eth1", "another node's egress address, by tun1",
				"a container of network ila, by eth1", "a container of network ila, by tun1",
			},
		},
		{
			name: "VLANs",
			old: `if (in_vlan(skb))
		return TCX_NEXT;
	if (vtep4_mask`,
			new:   "if (vtep4_mask",
			test:  stranger,
			cases: []string{"in a VLAN"},
		},
		{
			name: "several priorities",
			old: `if (hides_in_tag(&f))
		return drop(skb, REASON_MALFORMED, hook);`,
			new:   "",
			test:  stranger,
			cases: []string{"behind two priorities"},
		},
		{
			name: "other protocols",
			old: `if (f.eth.h_proto != bpf_htons(ETH_P_IPV6))
		return TCX_NEXT;`,
			new:   "",
			test:  "TestFromEdge",
			cases: []string{"IPv4 that reads like our own /64"},
		},
		{
			name: "link-local frames at a bridge port",
			old:  "return check_host_if(skb, true, HOOK_EDGE_IN);",
			new:  "return TCX_NEXT;",
			test: "TestStrangerAtPort",
			cases: []string{
				"behind a priority, at the port", "behind two priorities, at the port",
				"container elsewhere, at the port", "container here, at the port", "the node itself, at the port",
				"what containers see, at the port",
			},
		},
		{
			name: "tunnel packets on other interfaces",
			old:  "why = inward ? REASON_PEER_UNKNOWN : REASON_TUNNEL_FORGED;",
			new:  ";",
			test: "TestNimitzTunnels",
			cases: []string{
				"as a node, out by another interface", "from an unknown address to a node, out by another interface",
				"a process to its own node", "a process to its own node, as another",
				"a process to another address of its own node, as another",
				"a process that has guessed the mark, to its own node",
			},
		},
		{
			name: "loopback",
			old:  "check_host_if(skb, skb->ifindex != LOOPBACK, ",
			new:  "check_host_if(skb, true, ",
			test: "TestNimitzTunnels",
			cases: []string{
				"a process to its own node", "a process to its own node, as another",
				"a process to another address of its own node, as another",
				"a process that has guessed the mark, to its own node",
			},
		},
		{
			name: "tunnel addresses as destinations",
			old:  "!(is_vtep(src) || is_vtep(dst))",
			new:  "!is_vtep(src)",
			test: "TestNimitzTunnels",
			cases: []string{
				"a process to a node, from an unknown address", "a process to another region",
				"from an unknown address to a node, out by another interface",
			},
		},
		{
			name:  "tunnel addresses of others",
			old:   "a->lo == VTEP_HOST && (in_base(a) || is_peer(a));",
			new:   "a->lo == VTEP_HOST && in_base(a);",
			test:  "TestNimitzTunnels",
			cases: []string{"a process to another region", "a process as another region"},
		},
		{
			name:  "fragments of tunnels",
			old:   "return nexthdr != NEXTHDR_TCP && nexthdr != NEXTHDR_ICMP;",
			new:   "return false;",
			test:  "TestNimitzTunnels",
			cases: []string{"a process to a node, in fragments"},
		},
		{
			name:  "other ports",
			old:   "+ IPV6_HLEN + 2, &port, sizeof(port)) || is_tunnel_port(port);",
			new:   "+ IPV6_HLEN + 2, &port, sizeof(port)) || true;",
			test:  "TestNimitzTunnels",
			cases: []string{"a process to another port"},
		},
		{
			name: "tunnels over IPv4 on other interfaces",
			old: `if (vtep4_mask && is_tunnel4(skb))
		return drop(skb, inward ? REASON_PEER_UNKNOWN : REASON_TUNNEL_FORGED, hook);`,
			new:  "",
			test: "TestForgedTunnels4",
			cases: []string{
				"from a tunnel address, edge in",
				"from a tunnel address, edge out",
				"to a tunnel address, edge in",
				"to a tunnel address, edge out",
				"a later fragment, edge in",
				"a later fragment, edge out",
			},
		},
		{
			name: "IPv4 addresses of tunnels",
			old: `if ((h.src & vtep4_mask) != vtep4_prefix && (h.dst & vtep4_mask) != vtep4_prefix)
		return false;`,
			new:   "",
			test:  "TestForgedTunnels4",
			cases: []string{"other addresses, edge in", "other addresses, edge out", "other addresses, uplink out"},
		},
		{
			name: "fragments of tunnels over IPv4",
			old: `if (h.fragment & bpf_htons(IP4_FRAGMENT_OFFSET))
		return true;`,
			new:   "",
			test:  "TestForgedTunnels4",
			cases: []string{"a later fragment, edge in", "a later fragment, edge out", "a later fragment, uplink out"},
		},
		{
			name: "other ports over IPv4",
			old:  "at + 2, &port, sizeof(port)) || is_tunnel_port(port);",
			new:  "at + 2, &port, sizeof(port)) || true;",
			test: "TestForgedTunnels4",
			cases: []string{
				"to another port, edge in",
				"to another port, edge out",
				"to another port, uplink out",
				"a first fragment to another port, edge in",
				"a first fragment to another port, edge out",
				"a first fragment to another port, uplink out",
			},
		},
		{
			name: "other protocols over IPv4",
			old: ` ||
	    h.proto != NEXTHDR_UDP)`,
			new:   ")",
			test:  "TestForgedTunnels4",
			cases: []string{"another protocol, edge in", "another protocol, edge out", "another protocol, uplink out"},
		},
		{
			name: "frames for other hosts",
			old: `skb->pkt_type == PACKET_OTHERHOST ? TCX_NEXT
						 : `,
			new:   "",
			test:  "TestFromEdge",
			cases: []string{"for another machine on the link"},
		},
	}
}
