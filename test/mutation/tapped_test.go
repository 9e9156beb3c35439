package mutation_test

import "slices"

func nimitzTapped() []mutation {
	const test = "TestTapped"
	toBoth := func(names ...string) (all []string) {
		for _, n := range names {
			all = append(all, n, n+" to the gateway")
		}
		return all
	}
	broken := toBoth("a routing header", "options", "half a TCP header, IPv4", "half a UDP header, IPv6", "half an ICMP header, IPv6", "longer than it is")
	quotes := toBoth("an error about somebody else's packet, IPv4", "an error about a packet for somebody else, IPv6", "an error that quotes nothing, IPv6",
		"to netpila", "from netpila")
	return []mutation{
		{
			name: "what is behind the fixed headers",
			old: `if (!why)
		return TCX_NEXT;`,
			new: `if (why != REASON_ICMP_QUOTE)
		return TCX_NEXT;`,
			test:  test,
			cases: broken,
		},
		{
			name: "quotes",
			old: `if (!why && is_any_error(&p, j.family) && !quote_matches(skb, &p, &j, &j.src))
		why = REASON_ICMP_QUOTE;`,
			test:  test,
			cases: quotes,
		},
		{
			name: "netpila's own",
			old: `if (is_netpila(&j))
		return TCX_NEXT;`,
			test:  test,
			cases: toBoth("netpila's", "netpila's the other way"),
		},
		{
			name: "to netpila",
			old: `(in_private(&j->src) || in_base(&j->src)) &&
	       `,
			test:  test,
			cases: toBoth("to netpila"),
		},
		{
			name: "from netpila",
			old: ` &&
	       (in_private(&j->dst) || in_base(&j->dst))`,
			test:  test,
			cases: toBoth("from netpila"),
		},
		{
			name:  "a quiet drop",
			old:   "return TC_ACT_STOLEN;",
			new:   "return TC_ACT_SHOT;",
			test:  test,
			cases: slices.Concat(broken, quotes),
		},
	}
}
