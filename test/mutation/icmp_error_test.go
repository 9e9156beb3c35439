package mutation_test

func icmpError() []mutation {
	const test = "TestAnswers"
	tooBig := []string{"1,401 bytes, by a narrow route", "1,401 bytes, from the cache", "1,501 bytes"}
	return []mutation{
		{
			name: "rate limit",
			old: `if (due - now > ICMP_ERROR_BURST * ICMP_ERROR_INTERVAL)
		return false;`,
			test:  "TestAnswersAreFew",
			cases: []string{"after too many"},
		},
		{
			name:  "errors",
			old:   "is_error(p) || ",
			test:  test,
			cases: []string{"an error"},
		},
		{
			name:  "fragments of errors",
			old:   " || (p->proto == NEXTHDR_ICMP && !p->l4)",
			test:  test,
			cases: []string{"a later fragment, perhaps of an error"},
		},
		{
			name:  "broadcast",
			old:   "skb->pkt_type != PACKET_BROADCAST && ",
			test:  test,
			cases: []string{"to all stations"},
		},
		{
			name:  "multicast",
			old:   " && skb->pkt_type != PACKET_MULTICAST",
			test:  test,
			cases: []string{"to a group of stations"},
		},
		{
			name: "length of the quote",
			old: `if (length > most)
		length = most;`,
			test:  test,
			cases: append([]string{"1,501 bytes and a hop limit of 1"}, tooBig...),
		},
		{
			name: "type",
			old: `if (reason == REASON_TOO_BIG) {
		a.type = ICMPV6_TOO_BIG;`,
			new:   "if (reason == REASON_TOO_BIG) {",
			test:  test,
			cases: tooBig,
		},
		{
			name:  "MTU",
			old:   "a.mtu = bpf_htonl(f->mtu);",
			test:  test,
			cases: tooBig,
		},
	}
}
