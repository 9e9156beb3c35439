package mutation_test

// unreachable returns the drops in each file that no packet can reach, and the reason why the code has them.
func unreachable() map[string]map[string]string {
	const (
		verifier = "the verifier requires it"
		within   = "the read or write is inside the packet: its bounds were checked before"
		again    = "the headers were readable before, and no helper has moved them since"
	)
	return map[string]map[string]string{
		"hooks/container.h": {
			`return drop_from_container(skb, &key, why);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: again,
			`if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: verifier,
		},
		"net/netpila/tables.h": {
			"return id != 0;": "both callers decide about tenant id 0, the nodes, before",
		},
		"net/netpila/identify.h": {
			"return m->own ? 0 : REASON_NO_KEY;": verifier,
		},
		"net/netpila/alias.h": {
			"struct alias_search s = {.tenant = tenant, .why = REASON_NO_KEY};": "that many tries find no alias once " +
				"in 2^90; an error of the cipher replaces this reason",
		},
		"net/netpila/egress_stages.h": {
			`if (!p || !key || !f || !way)
		return REASON_MALFORMED;`: verifier,
			`keep_outside_flow(f);
	h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, hook);`: again,
			`if (!d)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: verifier,
			`if (!key || !f)
		return REASON_MALFORMED;`: verifier,
			`if (!h || !d)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	router`: "the program of the uplink has read the headers",
			`show_router(skb, &p, &key.src, &router))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: within,
		},
		"net/netpila/gateway.h": {
			`if (!h) {
		*verdict = drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: again,
			`if (f->translate && write_addresses(skb, h, p, f)) {
		*verdict = drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: within,
			`if (!h)
		return REASON_MALFORMED;
	o.priority_version`: again,
			`bpf_skb_store_bytes(skb, ETH_HLEN, &o.priority_version, IPV6_HLEN, 0))
		return REASON_MALFORMED;`: "the packet is IPv6, and the write is in the room that was made",
		},
		"net/netpila/gateway_nat.h": {
			`if (read_ports(skb, p->proto, p->l4, ports))
		return REASON_MALFORMED;`: within,
			`if (!connections || !d)
		return REASON_GATEWAY_FULL;`: verifier,
			"return bpf_map_update_elem(connections, &d->out, &d->entry, BPF_ANY) ? REASON_GATEWAY_FULL : 0;": "" +
				"a full LRU table evicts an entry",
			`if (fix_checksum(skb, p, difference))
		return REASON_MALFORMED;`: within,
			`if (write_port(skb, p, answer, is->port))
		return REASON_MALFORMED;`: within,
			`		       ? REASON_MALFORMED
		       : 0;`: within,
			`if (bpf_skb_store_bytes(skb, p->l4 + s.at + 2, &is, sizeof(is), 0))
		return REASON_MALFORMED;`: within,
			"return fix_checksum(skb, p, csum_add((__u16)~s.mss, is)) ? REASON_MALFORMED : 0;": within,
		},
		"net/netpila/gateway_stages.h": {
			`if (!h || !d || !own)
		return drop(skb, REASON_MALFORMED, hook);`: verifier,
			"return drop(skb, REASON_NO_PROGRAM, HOOK_UPLINK_IN);": "this program calls itself",
			`if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)))
		return REASON_MALFORMED;
	if (find_transport(skb, &q) || !q.l4)
		return REASON_ICMP_QUOTE;
	h = eth_ip6_of(skb);
	if (!h)
		return REASON_MALFORMED;`: "read_nat_quote has read the same quote",
			`if (!h || !p || !d)
		return REASON_MALFORMED;`: again,
			`bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, dst), &to, sizeof(to), 0))
		return REASON_MALFORMED;`: within,
			`if (!h || !d || !connections)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: verifier,
			`if (!h || !key)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: again,
			`BPF_F_RECOMPUTE_CSUM))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: within,
			`if (ip6ip6_pull(skb))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: "a packet with both headers can lose the outer one",
			`if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	key.src`: "the program of the uplink has read the headers",
			`if (!connections)
		return drop(skb, REASON_NO_ENDPOINT, HOOK_UPLINK_IN);`: "only if the gateway ends after the caller has " +
				"found its table",
		},
		"net/netpila/next_hop.h": {
			`if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return REASON_NO_ROUTE;`: "without a route the FIB names no device, so the check of the device says the same",
		},
		"hooks/node.h": {
			`if (bpf_skb_load_bytes(skb, p->l4, &t.ipv6.sport, 2 * sizeof(t.ipv6.sport)))
		return REASON_MALFORMED;`: within,
			`if (bpf_skb_load_bytes(skb, p->l4 + TCP_FLAGS, &flags, sizeof(flags)))
			return REASON_MALFORMED;`: within,
			`if (!h || !f)
		return drop(skb, REASON_MALFORMED, HOOK_NODE);`: again,
		},
		"common/icmp_source.h": {
			`if (fix_checksum(skb, p, csum_diff_addr(source, &peer)) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &peer, sizeof(peer), 0))
		return REASON_MALFORMED;`: within,
		},
		"hooks/uplink.h": {
			`if (!h || !f)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: again,
		},
		"common/packet.h": {
			`if (bpf_skb_load_bytes(skb, at, option, 1))
			return REASON_MALFORMED;`: within,
			`if (!p)
		return REASON_MALFORMED;`: verifier,
		},
		"net/netpila/forward.h": {
			`if (bpf_skb_load_bytes(skb, p->l4 + ICMPV6_HLEN + 6, &q.proto, sizeof(q.proto)))
		return REASON_MALFORMED;`: within,
			`if (bpf_skb_load_bytes(skb, field, &sum, sizeof(sum)))
			return REASON_MALFORMED;`: within,
			"bpf_skb_store_bytes(skb, field, &sum, sizeof(sum), 0) ? REASON_MALFORMED : 0": within,
			"bpf_l4_csum_replace(skb, p->l4 + 2, 0, difference, 0) ? REASON_MALFORMED : 0": within,
			`if (!p || !f)
		return REASON_ICMP_QUOTE;`: verifier,
			`if (bpf_skb_store_bytes(skb, at, quoted, sizeof(quoted), 0))
		return REASON_MALFORMED;`: within,
			`return drop(skb, why, hook);
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);`: again,
			`return TC_ACT_SHOT;
		h = eth_ip6_of(skb);
		if (!h)
			return drop(skb, REASON_MALFORMED, hook);`: again,
			"return fix_checksum(skb, p, f->checksum) ? REASON_MALFORMED : 0;": within,
			`BPF_F_RECOMPUTE_CSUM)
			       ? REASON_MALFORMED`: within,
			`if (f->translate & TRANSLATE && write_addresses(skb, h, p, f))
		return drop(skb, REASON_MALFORMED, hook);`: within,
		},
		"net/netpila/exposed_nat.h": {
			`if (!connections || !d || !s)
		return REASON_NO_BACKEND;`: verifier,
			"return bpf_map_update_elem(connections, &d->back, &d->entry, BPF_ANY) ? REASON_GATEWAY_FULL : 0;": "" +
				"a full LRU table evicts an entry",
			`if (!p || !d || !w)
		return REASON_MALFORMED;`: verifier,
			"if (why == REASON_NO_BACKEND) {": "only if the agent replaces the table between two lookups",
			`if (!connections)
		return REASON_NO_SERVICE;`: "only if the tenant's last exposed port ends after the caller has found it",
		},
		"net/netpila/exposed_stages.h": {
			`if (!h || !p || !d)
		return REASON_MALFORMED;`: again,
			`if (!h || !d || !w)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: "the program of the uplink has read the headers",
			`if (!h || !key || !d)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: again,
			`if (bpf_skb_load_bytes(skb, p.l4, ports, sizeof(ports)))
			return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: within,
			`h = eth_ip6_of(skb);
	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);
	return forward_allowed`: again,
			`if (!h || !d)
		return drop(skb, REASON_MALFORMED, hook);`: again,
			`struct addr ends[2];
	__u64 node;

	if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: "the program of the uplink has read the headers",
			`if (ip6ip6_pull(skb))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: "a packet with both headers can lose the outer one",
			"return drop(skb, why ? why : REASON_MALFORMED, HOOK_CONTAINER);": "is_exposed_answer has read the same " +
				"packet, and found its source",
		},
		"net/netpila/service_stages.h": {
			`if (bpf_skb_load_bytes(skb, p->l4, ports, sizeof(ports)))
			return REASON_MALFORMED;`: within,
			`if (!p || !was || !is)
		return REASON_MALFORMED;`: verifier,
			`		       ? REASON_MALFORMED
			       : 0;`: within,
			`if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	mac_of`: again,
			`if (!f)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: verifier,
			`if (!h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);
	/* An error quotes`: again,
			`if (why || !h)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: within,
			`if (!w)
		return drop(skb, REASON_MALFORMED, HOOK_CONTAINER);`: verifier,
		},
		"net/netpila/service_answers.h": {
			`bpf_skb_store_bytes(skb, offsetof(struct eth_ip6, src), &w->front.address, sizeof(struct addr), 0))
			return REASON_MALFORMED;`: within,
			`bpf_skb_store_bytes(skb, q.l4 + 2, &w->front.port, sizeof(w->front.port), 0))
		return REASON_MALFORMED;`: within,
			`if (!h || !w)
		return drop(skb, REASON_MALFORMED, hook);`: again,
			`if (!client)
			return drop(skb, REASON_NO_ENDPOINT, hook);`: "only if the container has left since its flow was found",
		},
		"policy/policy.h": {
			`if (!v || !d || !rule)
		return REASON_SESSION_LIMIT;`: verifier,
			`if (!v)
		return REASON_SESSION_LIMIT;`: verifier,
			`} else if (read_ports(skb, p->proto, p->l4, ports)) {
		return REASON_MALFORMED;`: within,
		},
		"net/nimitz/direct.h": {
			`return verdict == TC_ACT_SHOT ? drop(skb, REASON_MALFORMED, j->hook) : verdict;`: within,
			`return tunnel_pull(skb, t) ? REASON_MALFORMED : 0;`:                              within,
		},
		"hooks/uplink_class.h": {
			`		return drop(skb, REASON_OWN_SOURCE, HOOK_UPLINK_IN);`: "see internal/network/evpn/tables",
		},
		"net/nimitz/stages.h": {
			`if (encap(skb, j, vtep))
		return drop(skb, REASON_MALFORMED, j->hook);`: "the kernel takes every key and policy of the right size",
			`|| set_route_macs(skb, j, r))
		return drop(skb, REASON_MALFORMED, j->hook);`: within,
			`if (bpf_skb_load_bytes(skb, 0, &to, ETH_ALEN))
		return REASON_MALFORMED;`: within,
			`		return REASON_MAC_MISMATCH;`: "only with tunnels over IPv4; see internal/network/evpn/tables",
			`		return drop(skb, REASON_PEER_UNKNOWN, HOOK_TUNNEL); /* no network has tunnels over IPv4 */`: "a " +
				"node without network evpn has no such prefix",
			`if (!own)
		return drop(skb, REASON_SRC_NOT_OWN, HOOK_CONTAINER);`: verifier,
		},
		"net/nimitz/offload.h": {
			"return drop(skb, REASON_NO_PROGRAM, j->hook);": "the agent attaches the program before the first offload",
		},
		"net/nimitz/offload_nsh.h": {
			`if (!v)
		return drop(skb, REASON_SESSION_LIMIT, HOOK_TUNNEL);`: verifier,
			`if (set_both_macs(skb, mac_to(r)))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);`: within,
			`if (tunnel_push(skb, t, &s->msg, sizeof(s->msg)))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);`: "the packet is IP and in no tunnel",
			`if (!o)
		return drop(skb, REASON_NSH_UNKNOWN, s->j.hook);`: "only while the offload ends: the stages have found it",
			`bpf_skb_store_bytes(skb, MSG_AT, m, sizeof(*m), BPF_F_RECOMPUTE_CSUM))
		return drop(skb, REASON_MALFORMED, HOOK_TUNNEL);`: within,
			`if (tunnel_pull(skb, &s->outer))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);`: within,
			`return drop(skb, REASON_NSH_SEGMENTS, HOOK_TUNNEL);`: "the uplink of a frontend cuts such packets",
		},
		"net/nimitz/gateway.h": {
			`if (set_both_macs(skb, mac_word(container_mac)))
		return drop(skb, REASON_MALFORMED, HOOK_UPLINK_IN);`: within,
		},
		"net/nimitz/nat.h": {
			`if (h4->eth.h_proto != skb->protocol)
		return REASON_NOT_IP6;`: "only behind a netkit may the sender choose the protocol of a frame",
		},
		"net/netpila/crypto.h": {
			`if (err)
		return REASON_NO_KEY;`: "one block under a key of the right length cannot fail",
		},
	}
}
