package mutation_test

func event() []mutation {
	const (
		sums   = "TestEventsAddUp"
		losses = "TestEventsAreLost"
		words  = "TestEventsSayWhich"
		others = "TestEventsOfOtherFrames"
	)
	return []mutation{
		{
			name:  "rules",
			old:   "event->rule = rule;",
			new:   `asm volatile("" :: "r"(rule));`,
			test:  "TestEventsNameTheRule",
			cases: []string{"by policy"},
		},
		{
			name:  "drops",
			old:   "state->packets++;",
			test:  sums,
			cases: []string{"counters"},
		},
		{
			name:  "drops per event",
			old:   "state->pending++;",
			test:  sums,
			cases: []string{"sum"},
		},
		{
			name:  "pending drops reset",
			old:   "state->pending = 0;",
			test:  sums,
			cases: []string{"sum"},
		},
		{
			name:  "rate limit",
			old:   "state->pace += EVENT_INTERVAL;",
			test:  sums,
			cases: []string{"pace"},
		},
		{
			name:  "burst",
			old:   "EVENT_BURST * EVENT_INTERVAL",
			new:   "0",
			test:  sums,
			cases: []string{"pace"},
		},
		{
			name:  "lost events",
			old:   "state->lost++;",
			test:  losses,
			cases: []string{"lost"},
		},
		{
			name:  "lost events reported",
			old:   "event->lost = state->lost;",
			new:   "event->lost = 0;",
			test:  losses,
			cases: []string{"lost"},
		},
		{
			name:  "other protocols",
			old:   " && header.eth.h_proto == bpf_htons(ETH_P_IPV6)",
			test:  others,
			cases: []string{"ARP", "IPv4", "tagged"},
		},
		{
			name:  "frame claimed as IPv4",
			old:   " && h4->version_length >> 4 == 4",
			test:  others,
			cases: []string{"IPv4"},
		},
		{
			name:  "IPv4 frame claimed as something else",
			old:   "h4->eth.h_proto == bpf_htons(ETH_P_IP) && h4->version_length >> 4 == 4",
			new:   "h4->version_length >> 4 == 6",
			test:  others,
			cases: []string{"ARP", "IPv4"},
		},
		{
			name:  "ports of TCP",
			old:   "event->proto == NEXTHDR_TCP || ",
			test:  words,
			cases: []string{"TCP"},
		},
		{
			name:  "ports of UDP",
			old:   " || event->proto == NEXTHDR_UDP",
			test:  words,
			cases: []string{"UDP"},
		},
		{
			name:  "ports of others",
			old:   "l4 && (event->proto == NEXTHDR_TCP || event->proto == NEXTHDR_UDP)",
			new:   "l4",
			test:  words,
			cases: []string{"ICMPv6"},
		},
		{
			name:  "ports of later fragments",
			old:   "if (!(h4->fragment & bpf_htons(IP4_FRAGMENT_OFFSET)))",
			test:  "TestEventsOfIPv4",
			cases: []string{"a later fragment of IPv4"},
		},
	}
}
