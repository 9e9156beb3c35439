package mutation_test

func forward() []mutation {
	return []mutation{
		{
			name:  "DSCP",
			old:   "h->priority_version &= 0xf0;",
			test:  "TestDSCP",
			cases: []string{"clear, packet 0", "clear, packet 1"},
		},
		{
			name:  "ECN",
			old:   "h->flow[0] &= 0x3f;",
			new:   "h->flow[0] &= 0x0f;",
			test:  "TestDSCP",
			cases: []string{"clear, packet 0", "clear, packet 1"},
		},
		{
			name: "quote beyond the packet",
			old: `if (at + sizeof(quoted) > p->end || bpf_skb_load_bytes(skb, at, quoted, sizeof(quoted)))
		return REASON_ICMP_QUOTE;`,
			new: `if (bpf_skb_load_bytes(skb, at, quoted, sizeof(quoted)))
		return REASON_ICMP_QUOTE;`,
			test:  "TestFromContainer",
			cases: []string{"an error with its quote behind the end"},
		},
		{
			name: "quoted source",
			old: `if (!same_addr(&quoted[0], &f->key.dst) || !same_addr(&quoted[1], &f->key.src))
		return REASON_ICMP_QUOTE;`,
			new: `if (!same_addr(&quoted[1], &f->key.src))
		return REASON_ICMP_QUOTE;`,
			test:  "TestFromContainer",
			cases: []string{"an error about another sender's packet"},
		},
		{
			name: "quoted destination",
			old:  " || !same_addr(&quoted[1], &f->key.src)",
			test: "TestFromContainer",
			cases: []string{
				"an error about a packet for another receiver", "an error about another sender's packet, same node",
			},
		},
		{
			name:  "quoted source, from the fabric",
			old:   "!same_addr(&quoted[0], &f->key.dst) || ",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"an error about another container's packet"},
		},
		{
			name:  "quoted checksum",
			old:   "return translate_quoted_checksum(skb, p, f->checksum);",
			new:   "return 0;",
			test:  "TestFromContainer",
			cases: []string{"port unreachable"},
		},
		{
			name: "quotes of packets that cannot be parsed",
			old: `if (find_transport(skb, &q))
		return REASON_ICMP_QUOTE;`,
			new:   "find_transport(skb, &q);",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"about a packet with a routing header"},
		},
		{
			name: "errors about errors",
			old: ` || is_error(&q))
			return REASON_ICMP_QUOTE;`,
			new: `)
			return REASON_ICMP_QUOTE;`,
			test:  "TestErrorsOfTheFabric",
			cases: []string{"about an error"},
		},
		{
			name:  "quotes of later fragments",
			old:   "if (q.l4 && field > q.l4",
			new:   "if (field > q.l4",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"about a later fragment"},
		},
		{
			name:  "quoted checksum of 0",
			old:   "if (sum || q.proto != NEXTHDR_UDP) {",
			new:   "if (sum) {",
			test:  "TestErrorsOfTheFabric",
			cases: []string{"about a TCP segment with a checksum of 0"},
		},
		{
			name: "errors",
			old:  "if (is_error(p)) {",
			new:  "if (is_error(p) && 0) {",
			test: "TestFromContainer",
			cases: []string{
				"an error about a packet for another receiver", "an error about another sender's packet",
				"an error about another sender's packet, same node", "an error that quotes nothing",
				"an error with its quote behind the end", "port unreachable",
			},
		},
		{
			name: "hop limit",
			old: `if (h->hop_limit <= 1)
		return REASON_HOP_LIMIT;`,
			test:  "TestFromContainer",
			cases: []string{"last hop"},
		},
		{
			name: "length",
			old: `if (skb->len - ETH_HLEN > f->mtu && wire_length(skb, p) > f->mtu)
		return REASON_TOO_BIG;`,
			test:  "TestAnswers",
			cases: []string{"1,401 bytes, from the cache"},
		},
		{
			name: "length of segments",
			old:  " && wire_length(skb, p) > f->mtu",
			test: "TestLengthOfSegments",
			cases: []string{
				"TCP", "TCP with options", "TCP with options behind options", "UDP", "a list of packets",
				"behind options",
			},
		},
		{
			name:  "length of TCP's header",
			old:   "(tcp[TCP_OFFSET] >> 4 << 2)",
			new:   "20",
			test:  "TestLengthOfSegments",
			cases: []string{"TCP with options, a byte more"},
		},
		{
			name:  "length of TCP's header behind extension headers",
			old:   "header = octet >> 4 << 2;",
			new:   "header = 20;",
			test:  "TestLengthOfSegments",
			cases: []string{"TCP with options behind options, a byte more"},
		},
		{
			name: "BIG TCP option",
			old:  "at -= JUMBO_OPTION;",
			new:  ";",
			test: "TestBigTCP",
			cases: []string{
				"dropped for too-big", "longer than 65,535 bytes", "no packet was longer than IPv6 can say",
			},
		},
		{
			name:  "SCTP segments",
			old:   "if (size == GSO_BY_FRAGS)",
			new:   "if (0)",
			test:  "TestLengthOfSegments",
			cases: []string{"a list of packets"},
		},
		{
			name:  "hop limit decremented",
			old:   "h->hop_limit--;",
			test:  "TestTimeExceeded",
			cases: []string{"the container saw"},
		},
		{
			name:  "sum over the whole packet",
			old:   "BPF_F_RECOMPUTE_CSUM",
			new:   "0",
			test:  "TestSumOfTheWholePacketStaysRight",
			cases: []string{"later fragment", "no checksum"},
		},
		{
			name:  "a checksum of 0",
			old:   "return p->proto == NEXTHDR_UDP && !sum ? 0xffff : sum;",
			new:   "return sum;",
			test:  "TestFromContainer",
			cases: []string{"UDP whose checksum becomes 0"},
		},
		{
			name:  "no checksum",
			old:   "if (p->proto == NEXTHDR_UDP && !sum)",
			new:   "if (0)",
			test:  "TestFromContainer",
			cases: []string{"UDP without a checksum"},
		},
		{
			name: "segments of a tunnel without a checksum",
			old: `if (p->proto == NEXTHDR_UDP && !sum)
		return 0;`,
			new: `if (skb->gso_size && p->pending != p->l4)
		return csum_fold(csum_add(difference, sum));
	if (p->proto == NEXTHDR_UDP && !sum)
		return 0;`,
			test:  "TestTunnelOfContainers",
			cases: []string{"uplink that cuts", "uplink without checksums"},
		},
		{
			name:  "pending checksums",
			old:   "return p->pending && (p->pending == p->l4 || skb->gso_size);",
			new:   "return false;",
			test:  "TestChecksumsLeftToADevice",
			cases: []string{"TCP", "UDP", "UDP behind options"},
		},
		{
			name: "mark cleared",
			old: `	skb->mark = 0;
	skb->tstamp = 0;`,
			new:   "\tskb->tstamp = 0;",
			test:  "TestFromContainer",
			cases: []string{"a packet goes to a neighbour with mark 7 and time 0"},
		},
		{
			name: "timestamp cleared",
			old: `	skb->tstamp = 0;
`,
			test:  "TestFromContainer",
			cases: []string{"a packet goes to a neighbour with mark 0 and time 7"},
		},
	}
}

func flow() []mutation {
	const test = "TestCacheAnswersOnlyItsKey"
	return []mutation{
		{
			name:  "MAC of the container",
			old:   "	mac_of(device, f->dmac);",
			test:  "TestMACsSayNothing",
			cases: []string{"the answer's Ethernet header"},
		},
		{
			name:  "MAC of the gateway",
			old:   "	__builtin_memcpy(f->smac, gateway_mac, ETH_ALEN);",
			test:  "TestMACsSayNothing",
			cases: []string{"the answer's Ethernet header"},
		},
		{
			name:  "destination",
			old:   "same_addr(&f->key.dst, &key->dst) && ",
			test:  test,
			cases: []string{"another destination", "a node without a route, again"},
		},
		{
			name:  "source",
			old:   "same_addr(&f->key.src, &key->src) && ",
			test:  test,
			cases: []string{"another source"},
		},
		{
			name:  "device",
			old:   "f->key.device == key->device &&",
			test:  test,
			cases: []string{"another device"},
		},
		{
			name: "generation",
			old:  "f->key.generation == key->generation && ",
			test: test,
			cases: []string{
				"from a container that was removed", "from a tenant that was removed", "from before a change",
			},
		},
		{
			name:  "path",
			old:   "f->key.path == key->path && ",
			test:  test,
			cases: []string{"another path"},
		},
		{
			name: "no cache",
			old: `	if (no_flow_cache)
		return false;
`,
			test:  "TestNoCache",
			cases: []string{"the same packet without a cache"},
		},
		{
			name:  "unfinished cache entries",
			old:   "f->key.path == key->path && f->egress",
			new:   "f->key.path == key->path",
			test:  test,
			cases: []string{"an entry that was not finished", "a node without a route, again"},
		},
	}
}

func crypto() []mutation {
	return []mutation{
		{
			name:  "direction",
			old:   "err = op == ENCRYPT ?",
			new:   "err = op == DECRYPT ?",
			test:  "TestFromContainer",
			cases: []string{"the kernel's ecb(aes) turns fd70"},
		},
		{
			name: "keys",
			old: `if (!key || !scratch)
		return REASON_NO_KEY;`,
			new: `if (!key || !scratch)
		return 0;`,
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"without a key", "from the fabric without a key"},
		},
		{
			name: "slots without a key",
			old: `if (!ctx)
		return REASON_NO_KEY;`,
			new: `if (!ctx)
		return 0;`,
			test:  "TestCacheAnswersOnlyItsKey",
			cases: []string{"with a place for a key and none in it"},
		},
	}
}

func device() []mutation {
	return []mutation{
		{
			name: "MAC of its own",
			old:  "own ? own->mac : container_mac",
			new:  "own ? container_mac : container_mac",
			test: "TestContainerMAC",
			cases: []string{
				"an error, with MACs, a hit", "an error, with MACs, a miss",
				"from the fabric, with MACs, a hit", "from the fabric, with MACs, a miss",
				"from the node, with MACs, a hit", "from the node, with MACs, a miss",
				"on the same node, one of an older build, a hit", "on the same node, one of an older build, a miss",
				"on the same node, with MACs, a hit", "on the same node, with MACs, a miss",
			},
		},
		{
			name:  "direction of forwarded packets of a container",
			old:   "return !(device & ON_UPLINK) && skb->ingress_ifindex;",
			new:   "return skb->ingress_ifindex;",
			test:  "TestMacvlanForwards",
			cases: []string{"forwarded"},
		},
		{
			name: "mark cleared on the uplink",
			old: `	skb->mark = 0;
	return macvlan`,
			new:   "\treturn macvlan",
			test:  "TestToFabric",
			cases: []string{"a packet leaves with a mark"},
		},
	}
}

func macvlanBackstop() []mutation {
	return []mutation{
		{
			name:  "the node's ARP by its MAC",
			old:   "return !__builtin_memcmp(eth->h_source, own, sizeof(own));",
			new:   "return true;",
			test:  "TestMacvlanKeepsItsARP",
			cases: []string{"drops of the ARP of a container", "ARP on the wire"},
		},
		{
			name:  "backstop, to a container",
			old:   "return for_macvlan(skb) ? drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN) : TCX_NEXT;",
			new:   "return TCX_NEXT;",
			test:  "TestMacvlanHearsTheFabricOnlyThroughUs",
			cases: []string{"drops for no-program", "the container received"},
		},
		{
			name:  "backstop, from a container",
			old:   "return from_node_netns(skb) ? TCX_NEXT : drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_OUT);",
			new:   "return TCX_NEXT;",
			test:  "TestMacvlanWithoutItsJudge",
			cases: []string{"drops for no-program", "leaked"},
		},
	}
}
