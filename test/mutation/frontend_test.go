package mutation_test

// frontends returns mutations of the checks of messages between frontends and backends.
func frontends() []mutation {
	const messages, drops = "TestFrontendMessages", "TestFrontendDrops"
	return []mutation{
		{
			name: "class", old: "m->class != bpf_htons(NSH_CLASS) || ", test: messages,
			cases: []string{"of another class"},
		},
		{name: "type", old: "m->type != NSH_TYPE || ", test: messages, cases: []string{"of another type"}},
		{
			name: "length", old: "m->length != sizeof(*m) - 4 ||", test: messages,
			cases: []string{"of another length"},
		},
		{
			name: "version", old: "m->version != OFFLOAD_VERSION || ", test: messages,
			cases: []string{"of another version"},
		},
		{name: "no kind", old: "!m->kind || ", test: messages, cases: []string{"of no kind"}},
		{
			name: "unknown kind", old: "m->kind >= OFFLOAD_KINDS ||", test: messages,
			cases: []string{"of an unknown kind"},
		},
		{
			name: "index", old: `index != (to_frontend ? INDEX_TO_FRONTEND : INDEX_TO_BACKEND))
		return REASON_NSH_MALFORMED;`,
			new: `0)
		return REASON_NSH_MALFORMED;`,
			test: messages,
			cases: []string{
				"a question among pre-actions", "a question with pre-actions' index", "another index",
			},
		},
		{
			name: "hosts", old: "s->outer.src.lo != VTEP_HOST || ", test: messages,
			cases: []string{"pre-actions of a host"},
		},
		{
			name: "tenant",
			old: ` || s->outer.vni != o->vni)
		return REASON_NSH_FORGED;`,
			new: `)
		return REASON_NSH_FORGED;`,
			test: messages, cases: []string{"of another tenant"},
		},
		{
			name: "role of a frontend", old: "!o->fronts || ", test: messages,
			cases: []string{"a question to a node that is no frontend"},
		},
		{
			name: "backend", old: "!o->fronts || s->outer.src.hi != o->backend", new: "!o->fronts", test: messages,
			cases: []string{"a question of a node that is no backend"},
		},
		{
			name: "role of a backend", old: "o->backend != own_node || ", test: messages,
			cases: []string{"pre-actions to a frontend"},
		},
		{
			name: "frontend",
			old: ` || !is_frontend(o, s->outer.src.hi))
		return REASON_NSH_FORGED;`,
			new: `)
		return REASON_NSH_FORGED;`,
			test:  messages,
			cases: []string{"pre-actions of a node that is no frontend"},
		},
		{
			name: "activation", old: "bpf_ntohl(m->epoch) == o->epoch ? 0 : REASON_NSH_STALE", new: "0", test: messages,
			cases: []string{"a question of another activation", "of another activation"},
		},
		{
			name: "length of the NSH",
			old: `t->nsh != NSH_BYTES ||
	    bpf_skb_load_bytes(skb, MSG_AT, &s->msg, sizeof(s->msg)))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);`,
			new: `bpf_skb_load_bytes(skb, MSG_AT, &s->msg, sizeof(s->msg)))
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);`,
			test: messages, cases: []string{"of a shorter NSH"},
		},
		{
			name: "sender of an answer's packet",
			old: `if (why || j.vni != vni)
			return drop(skb, REASON_NSH_FORGED, HOOK_TUNNEL);`,
			new:   "",
			test:  messages,
			cases: []string{"an answer for another container"},
		},
		{
			name: "port of an answer's packet",
			old: `} else if (j.from != PORT_VXLAN) {
		return drop(skb, REASON_NSH_MALFORMED, HOOK_TUNNEL);`,
			new:  "} else if (0) {",
			test: messages, cases: []string{"an answer for no port"},
		},
		{
			name: "app of a packet that is not parsed",
			old:  " || (receiver->identity & GBP_IDENTITY) != d->carried.app", test: messages,
			cases: []string{"pre-actions for another app"},
		},
		{
			name: "pre-actions of a cached verdict", old: ` &&
		same_pre(&v->pre, &d->carried.pre)`, test: messages,
			cases: []string{"which the rules deny now"},
		},
		{
			name: "cached verdicts of frontends", old: "(over_ipv4 || !v->from_packet || d->mode == ENFORCE_REMOTE)",
			new: "1", test: messages,
			cases: []string{"without pre-actions, at a backend with rules"},
		},
		{
			name: "rules of a frontend",
			old: ` || !has_policies(j->vni))
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);`,
			new: `)
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);`,
			test:  drops,
			cases: []string{"at frontends without rules"},
		},
		{
			name:  "containers of other offloads",
			old:   "if (!e || e->offload != j->offload)\n\t\treturn offload_pass_on(skb, s, o);",
			new:   "if (!e)\n\t\treturn offload_pass_on(skb, s, o);",
			test:  "TestFrontendsMoved",
			cases: []string{"of another offload", "backend and frontend return it as it is"},
		},
		{
			name:  "packets that the backend passed on",
			old:   "j.relayed = bpf_ntohs(s->msg.relayed);",
			new:   "",
			test:  "TestFrontendsMoved",
			cases: []string{"the frontend returns it with pre-actions"},
		},
		{
			name:  "packets that the frontend passes on",
			old:   "may_relay(&s->j) ? check_egress(skb, &s->j, node->vxlan) : REASON_NO_ROUTE;",
			new:   "check_egress(skb, &s->j, node->vxlan);",
			test:  "TestFrontendsMoved",
			cases: []string{"backend and frontend return it as it is"},
		},
		{
			name: "rules of who is asked",
			old: ` || !has_policies(o->vni))
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);`,
			new: `)
		return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);`,
			test:  drops,
			cases: []string{"asking frontends without rules"},
		},
		{
			name: "offload",
			old: `return drop(skb, REASON_NSH_UNKNOWN, HOOK_TUNNEL);
	why = check_msg`,
			new: `return TCX_NEXT;
	why = check_msg`,
			test: messages, cases: []string{"of another offload"},
		},
		{
			name: "no node to ask",
			old:  "drop(skb, REASON_NO_FRONTEND, s->j.hook)",
			new:  "TC_ACT_SHOT",
			test: drops, cases: []string{"asking no node"},
		},
		{
			name: "no route",
			old:  "return drop(skb, why, HOOK_TUNNEL);\n\tcount_sent",
			new:  "return TC_ACT_SHOT;\n\tcount_sent",
			test: drops, cases: []string{"asking who has no route"},
		},
	}
}
