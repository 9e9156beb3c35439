package mutation_test

import "slices"

func nimitzOVSPort() []mutation {
	const test = "TestTapped"
	toBoth := func(names ...string) (all []string) {
		for _, n := range names {
			all = append(all, n, n+" to the gateway")
		}
		return all
	}
	broken := toBoth(
		"a routing header", "options", "half a TCP header, IPv4", "half a UDP header, IPv6",
		"half an ICMP header, IPv6", "longer than it is",
	)
	quotes := toBoth(
		"an error about another sender's packet, IPv4", "an error about a packet for another receiver, IPv6",
		"an error that quotes nothing, IPv6", "to netpila", "from netpila",
	)
	return []mutation{
		{
			name: "extension headers",
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
			name: "addresses of NETPILA",
			old: `if (is_netpila(&j))
		return TCX_NEXT;`,
			test:  test,
			cases: toBoth("netpila's", "netpila's the other way"),
		},
		{
			name: "destination of NETPILA",
			old: `(in_private(&j->src) || in_base(&j->src)) &&
	       `,
			test:  test,
			cases: toBoth("to netpila"),
		},
		{
			name: "source of NETPILA",
			old: ` &&
	       (in_private(&j->dst) || in_base(&j->dst))`,
			test:  test,
			cases: toBoth("from netpila"),
		},
		{
			name:  "drop without an event",
			old:   "return TC_ACT_STOLEN;",
			new:   "return TC_ACT_SHOT;",
			test:  test,
			cases: slices.Concat(broken, quotes),
		},
	}
}
