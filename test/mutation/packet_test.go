package mutation_test

func packet() []mutation {
	mutations := []mutation{
		{
			name: "listener report, version 2",
			old: `	case 143:
		return REASON_MLD_IGNORED;`,
			new:   "\t\treturn REASON_MLD_IGNORED;",
			cases: []string{"listener report"},
		},
		{
			name: "listener query",
			old: `	case 130:
`,
			cases: []string{"listener query"},
		},
		{
			name: "listener report",
			old: `	case 131:
`,
			cases: []string{"listener report, version 1"},
		},
		{
			name: "listener done",
			old: `	case 132:
`,
			cases: []string{"listener done"},
		},
		{
			name: "router solicitation",
			old: `	case 133:
`,
			cases: []string{"router solicitation"},
		},
		{
			name: "neighbour solicitation",
			old: `	case 135:
		return REASON_ND_IGNORED;`,
			new:   "\t\treturn REASON_ND_IGNORED;",
			cases: []string{"neighbour solicitation"},
		},
		{
			name: "router advertisement",
			old: `	case 134:
`,
			cases: []string{"router advertisement"},
		},
		{
			name: "neighbour advertisement",
			old: `	case 136:
`,
			cases: []string{"neighbour advertisement"},
		},
		{
			name: "redirect",
			old: `	case 137:
		return REASON_ND_FORBIDDEN;`,
			new:   "\t\treturn REASON_ND_FORBIDDEN;",
			cases: []string{"redirect"},
		},
		{
			name:  "length of TCP",
			old:   "p->proto == NEXTHDR_TCP ? 20 :",
			cases: []string{"a TCP header short of a byte", "half a TCP header, same node"},
		},
		{
			name:  "length of DCCP",
			old:   "p->proto == NEXTHDR_DCCP ? 12 :",
			cases: []string{"half a DCCP header"},
		},
		{
			name: "length of UDP",
			old: `	case NEXTHDR_UDP:
	case NEXTHDR_UDPLITE:
	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return p->l4 + need > p->end ? REASON_MALFORMED : 0;`,
			new: `	case NEXTHDR_UDPLITE:
	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return p->l4 + need > p->end ? REASON_MALFORMED : 0;`,
			cases: []string{"half a UDP header, same node"},
		},
		{
			name: "length of UDP-Lite",
			old: `	case NEXTHDR_UDPLITE:
	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return p->l4`,
			new: `	case NEXTHDR_SCTP:
	case NEXTHDR_DCCP:
		return p->l4`,
			cases: []string{"half a UDP-Lite header, same node"},
		},
		{
			name: "length of ICMPv6",
			old: `if (p->l4 + need > p->end || bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1))
			return REASON_MALFORMED;`,
			new: `if (bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1))
			return REASON_MALFORMED;`,
			cases: []string{"an ICMPv6 header short of a byte"},
		},
		{
			name: "checksum of UDP-Lite",
			old: `	case NEXTHDR_UDPLITE:
	case NEXTHDR_DCCP:
		return 6;`,
			new: `	case NEXTHDR_DCCP:
		return 6;`,
			cases: []string{"UDP-Lite across"},
		},
		{
			name: "checksum of DCCP",
			old: `	case NEXTHDR_DCCP:
		return 6;`,
			new:   "\t\treturn 6;",
			cases: []string{"DCCP across"},
		},
		{
			name: "home address",
			old: `if (option[0] == OPTION_HOME_ADDRESS)
			return REASON_ROUTING_HEADER;`,
			cases: []string{"home address", "home address behind a pad"},
		},
		{
			name:  "pads of one byte",
			old:   "option[0] == OPTION_PAD1",
			new:   "0",
			cases: []string{"home address behind a pad"},
		},
		{
			name: "option without a length",
			old: `if (bpf_skb_load_bytes(skb, at, option, 2))
			return REASON_MALFORMED;`,
			new: `if (bpf_skb_load_bytes(skb, at, option, 2))
			return 0;`,
			cases: []string{"an option without its length"},
		},
		{
			name:  "too many options",
			old:   "return at >= end ? 0 : REASON_MALFORMED;",
			new:   "return 0;",
			cases: []string{"home address behind 16 options"},
		},
		{
			name: "routing header",
			old: `if (kind == NEXTHDR_ROUTING)
			return REASON_ROUTING_HEADER;`,
			cases: []string{
				"routing header", "routing header behind authentication", "routing header behind options",
			},
		},
		{
			name: "hop-by-hop options",
			old: `if (!why && p->parts & HAS_HOP_OPTIONS && !is_big_tcp(skb))
		why = REASON_HOP_OPTIONS;`,
			cases: []string{
				"hop-by-hop options", "hop-by-hop options of a later fragment",
				"BIG TCP's option of a packet without segments", "BIG TCP's option of short segments",
			},
		},
		{
			name:  "BIG TCP's length",
			old:   "skb->len > ETH_HLEN + LEGACY_MAX_SIZE &&",
			cases: []string{"BIG TCP's option of short segments"},
		},
		{
			name:  "length of SCTP",
			old:   "p->proto == NEXTHDR_SCTP ? 12 :",
			cases: []string{"an SCTP header that is cut short"},
		},
		{
			name: "behind hop-by-hop options",
			old:  "kind != NEXTHDR_HOP && ",
			cases: []string{
				"an option header longer than the packet", "listener report", "routing header behind options",
				"hop-by-hop options", "hop-by-hop options of a later fragment",
				"BIG TCP's option of a packet without segments", "BIG TCP's option of short segments",
			},
		},
		{
			name: "behind destination options",
			old:  "kind != NEXTHDR_DEST && ",
			cases: []string{
				"behind options", "home address", "home address behind 16 options", "home address behind a pad",
				"nine extension headers", "an option without its length",
			},
		},
		{
			name:  "behind a fragment header",
			old:   "kind != NEXTHDR_FRAGMENT && ",
			cases: []string{"first fragment", "tiny first fragment", "a fragment header behind the end"},
		},
		{
			name:  "behind authentication",
			old:   " && kind != NEXTHDR_AUTH",
			cases: []string{"routing header behind authentication"},
		},
		{
			name: "headers beyond the packet",
			old: `if (at + sizeof(header) > p->end || bpf_skb_load_bytes(skb, at, header, sizeof(header)))
			return REASON_MALFORMED;`,
			new: `if (bpf_skb_load_bytes(skb, at, header, sizeof(header)))
			return REASON_MALFORMED;`,
			cases: []string{"a fragment header behind the end"},
		},
		{
			name:  "length of authentication",
			old:   "(header[1] + 2) * 4",
			new:   "(header[1] + 1) * 8",
			cases: []string{"routing header behind authentication"},
		},
		{
			name: "headers longer than the packet",
			old: `if (at + length > p->end)
			return REASON_MALFORMED;`,
			cases: []string{"an option header longer than the packet"},
		},
		{
			name: "too many extension headers",
			old: `		at += length;
	}
	return REASON_MALFORMED;`,
			new: `		at += length;
	}
	return 0;`,
			cases: []string{"nine extension headers"},
		},
		{
			name: "version",
			old: `if (f->priority_version >> 4 != 6)
		return REASON_MALFORMED;`,
			cases: []string{"version 4"},
		},
		{
			name:  "length of 0",
			old:   "!payload && skb->gso_segs",
			new:   "!payload",
			cases: []string{"a length of 0, not of segments", "a fragment header behind the end"},
		},
		{
			name: "length beyond the packet",
			old: `if (p->end > skb->len)
		return REASON_MALFORMED;`,
			cases: []string{"less data than the header says"},
		},
	}
	for i := range mutations {
		mutations[i].test = "TestFromContainer"
	}
	const pending = "TestDeviceMayNotWriteOverWhatWasChecked"
	return append(mutations,
		mutation{
			name: "BIG TCP's header",
			old:  "header == bpf_htonl(JUMBO_HEADER)",
			new:  "header",
			test: "TestOptionsOfLongPackets",
			cases: []string{
				"BIG TCP's option before other options", "BIG TCP's option before another header", "router alert",
			},
		},
		mutation{
			name: "priority tags",
			old:  "return skb->vlan_present && skb->vlan_tci & VLAN_VID;",
			new:  "return skb->vlan_present;",
			test: "TestPriorityTags",
			cases: []string{
				"a container to the node", "a container to a container", "this node", "this node's container",
				"ciphertext", "a container to the node, tagged twice", "a container to a container, tagged twice",
				"a container to the node, tagged by a provider",
			},
		},
		mutation{
			name:  "a provider's tags",
			old:   "proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD)",
			new:   "proto == bpf_htons(ETH_P_8021Q)",
			test:  "TestFromFabric",
			cases: []string{"a provider's tag of VLAN 0"},
		},
		mutation{
			name:  "other protocols without Ethernet",
			old:   "f->priority_version >> 4 == 6",
			new:   "f->priority_version",
			test:  "TestFromEdge",
			cases: []string{"IPv4 without Ethernet that reads like our own /64"},
		},
		mutation{
			name:  "tags of VLANs",
			old:   "tag[0] & bpf_htons(VLAN_VID)",
			new:   "0",
			test:  "TestFromFabric",
			cases: []string{"a tag of VLAN 5"},
		},
		mutation{
			name:  "tags before other protocols",
			old:   " && (inner == bpf_htons(ETH_P_IPV6) || is_tag(inner))",
			new:   " && (inner || !inner)",
			test:  "TestFromFabric",
			cases: []string{"an urgent frame that is not IPv6"},
		},
		mutation{
			name:  "tags before tags",
			old:   " || is_tag(inner))",
			new:   ")",
			test:  "TestToFabric",
			cases: []string{"two tags of VLAN 0"},
		},
		mutation{
			name: "checksum offset",
			old:  "p->pending < skb->len)\n\t\treturn 0;\n\treturn REASON_MALFORMED;",
			new:  "p->pending < skb->len)\n\t\treturn 0;\n\treturn 0;",
			test: pending,
			cases: []string{
				"a checksum over the a later fragment", "a checksum over the an option",
				"a checksum over the just behind the ports", "a checksum over the next header",
				"a checksum over the ports", "a checksum over the source, from behind it",
				"a checksum over the tenant id of the source", "a checksum over the type of an ICMPv6 message",
			},
		},
		mutation{
			name:  "checksum field",
			old:   "kernel->csum_offset == field",
			new:   "field",
			test:  pending,
			cases: []string{"a checksum over the ports", "a checksum over the type of an ICMPv6 message"},
		},
		mutation{
			name: "tunnels begin behind the transport header",
			old:  "p->l4 && p->pending >= p->l4 + TRANSPORT_MIN",
			new:  "p->l4 && p->pending >= p->l4",
			test: pending,
			cases: []string{
				"a checksum over the just behind the ports", "a checksum over the ports",
				"a checksum over the type of an ICMPv6 message",
			},
		},
		mutation{
			name:  "later fragments of tunnels",
			old:   "p->l4 && p->pending >= p->l4 + TRANSPORT_MIN",
			new:   "p->pending >= p->l4 + TRANSPORT_MIN",
			test:  pending,
			cases: []string{"a checksum over the a later fragment"},
		},
	)
}
