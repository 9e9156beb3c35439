package mutation_test

// unreachable are places no packet gets to, and why they are there.
func unreachable() map[string]map[string]string {
	const (
		verifier = "the verifier asks for it"
		within   = "what is read or written lies inside the packet: its bounds were checked before"
		again    = "it could be read before, and nothing has taken it away since"
	)
	return map[string]map[string]string{
		"hooks/container.h": {
			"return drop_from_container(skb, &key, why);\n\th = eth_ip6_of(skb);\n\tif (!h)\n\t\treturn drop(skb, REASON_MALFORMED, HOOK_CONTAINER);": again,
			"if (!f)\n\t\treturn drop(skb, REASON_MALFORMED, HOOK_CONTAINER);":                                                                        verifier,
		},
		"net/netpila/resolve.h": {
			"if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)\n\t\treturn REASON_NO_ROUTE;": "without a route the FIB names no device, so the check of the device says the same",
		},
		"hooks/node.h": {
			"if (bpf_skb_load_bytes(skb, p->l4, &t.ipv6.sport, 2 * sizeof(t.ipv6.sport)))\n\t\treturn REASON_MALFORMED;": within,
			"if (bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags)))\n\t\t\treturn REASON_MALFORMED;":     within,
			"if (!h || !f)\n\t\treturn drop(skb, REASON_MALFORMED, HOOK_NODE);":                                          again,
		},
		"hooks/uplink.h": {
			"if (fix_checksum(skb, p, csum_diff_addr(source, &peer)) ||\n\t    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &peer, sizeof(peer), 0))\n\t\treturn REASON_MALFORMED;": within,
			"if (!h || !f)\n\t\treturn drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);":                                                                                                           again,
		},
		"common/packet.h": {
			"if (bpf_skb_load_bytes(skb, at, option, 1))\n\t\t\treturn REASON_MALFORMED;": within,
			"if (!p)\n\t\treturn REASON_MALFORMED;":                                       verifier,
		},
		"net/netpila/forward.h": {
			"if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)))\n\t\treturn REASON_MALFORMED;":       within,
			"if (bpf_skb_load_bytes(skb, field, &sum, sizeof(sum)))\n\t\t\treturn REASON_MALFORMED;":                               within,
			"bpf_skb_store_bytes(skb, field, &sum, sizeof(sum), 0) ? REASON_MALFORMED : 0":                                         within,
			"bpf_l4_csum_replace(skb, p->l4 + 2, 0, difference, 0) ? REASON_MALFORMED : 0":                                         within,
			"if (!p || !f)\n\t\treturn REASON_ICMP_QUOTE;":                                                                         verifier,
			"if (bpf_skb_store_bytes(skb, at, quoted, sizeof(quoted), 0))\n\t\treturn REASON_MALFORMED;":                           within,
			"return drop(skb, why, hook);\n\t\th = eth_ip6_of(skb);\n\t\tif (!h)\n\t\t\treturn drop(skb, REASON_MALFORMED, hook);": again,
			"return TC_ACT_SHOT;\n\t\th = eth_ip6_of(skb);\n\t\tif (!h)\n\t\t\treturn drop(skb, REASON_MALFORMED, hook);":          again,
			"if (fix_checksum(skb, p, f->checksum))\n\t\t\t\treturn drop(skb, REASON_MALFORMED, hook);":                            within,
			"BPF_F_RECOMPUTE_CSUM))\n\t\t\t\treturn drop(skb, REASON_MALFORMED, hook);":                                            within,
		},
		"policy/policy.h": {
			"if (!v || !d || !rule)\n\t\treturn REASON_SESSION_LIMIT;": verifier,
			"if (!v)\n\t\treturn REASON_SESSION_LIMIT;":                verifier,
		},
		"net/nimitz/stages.h": {
			"if (encap(skb, j, vtep))\n\t\treturn drop(skb, REASON_MALFORMED, j->hook);": "the kernel takes every key and policy of the right size",
			"|| set_both_macs(skb))\n\t\treturn drop(skb, REASON_MALFORMED, j->hook);":   within,
			"if (!own)\n\t\treturn drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);":       verifier,
		},
		"net/nimitz/gateway.h": {
			"if (set_both_macs(skb))\n\t\treturn drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);": within,
		},
		"net/nimitz/nat.h": {
			"if (h4->eth.h_proto != skb->protocol)\n\t\treturn REASON_NOT_IP6;": "the kernel reads itself what comes out of a veth or a tunnel; beside a netkit it is the sender's word",
		},
		"net/netpila/crypto.h": {
			"if (err)\n\t\treturn REASON_NO_KEY;": "one block under a key of the right length cannot fail",
		},
	}
}
