package mutation_test

func event() []mutation {
	const sums, losses, words = "TestEventsAddUp", "TestEventsAreLost", "TestEventsSayWhich"
	return []mutation{
		{name: "drops", old: "state->packets++;", test: sums, cases: []string{"counters"}},
		{name: "drops an event stands for", old: "state->pending++;", test: sums, cases: []string{"sum"}},
		{name: "drops told", old: "state->pending = 0;", test: sums, cases: []string{"sum"}},
		{name: "pace", old: "state->pace += EVENT_INTERVAL;", test: sums, cases: []string{"pace"}},
		{name: "burst", old: "EVENT_BURST * EVENT_INTERVAL", new: "0", test: sums, cases: []string{"pace"}},
		{name: "lost events", old: "state->lost++;", test: losses, cases: []string{"lost"}},
		{name: "lost events told", old: "event->lost = state->lost;", new: "event->lost = 0;", test: losses, cases: []string{"lost"}},
		{name: "other protocols", old: " || header.eth.h_proto != bpf_htons(ETH_P_IPV6)", test: "TestEventsOfOtherFrames", cases: []string{"ARP", "IPv4", "tagged"}},
		{name: "ports of TCP", old: "header.nexthdr == NEXTHDR_TCP || ", test: words, cases: []string{"TCP"}},
		{name: "ports of UDP", old: " || header.nexthdr == NEXTHDR_UDP", test: words, cases: []string{"UDP"}},
		{
			name:  "ports of others",
			old:   "if (header.nexthdr == NEXTHDR_TCP || header.nexthdr == NEXTHDR_UDP) {",
			new:   "{",
			test:  words,
			cases: []string{"ICMPv6"},
		},
	}
}
