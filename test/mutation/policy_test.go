package mutation_test

func policyCheck() []mutation {
	const test = "TestPolice"
	return []mutation{
		{
			name: "room in the session table",
			old: `if (!ct_update(&d->ct, &d->pre))
		return REASON_SESSION_LIMIT;`,
			new:   "ct_update(&d->ct, &d->pre);",
			test:  "TestSessionsAge",
			cases: []string{"port 2000"},
		},
		{
			name: "denied by a rule",
			old: `count_rule(*rule);
		return REASON_POLICY_DENIED;`,
			new:  "count_rule(*rule);",
			test: test,
			cases: []string{
				"to another port", "of the middle of nothing", "datagram", "echo", "from another port",
				"another echo's answer", "mail", "an error about what was not", "which begins nothing",
				"a first fragment that may not", "what follows it", "to the port that was open", "its answer",
			},
		},
		{
			name: "quotes that cannot be parsed",
			old: `if (quoted < 0)
			return REASON_ICMP_QUOTE;`,
			test:  test,
			cases: []string{"an error whose quote leads nowhere", "an error that does not say about what"},
		},
		{
			name: "fragments",
			old:  "return d->mode == ENFORCE_ASK ? POLICY_ASK : REASON_FRAGMENT_UNKNOWN;",
			new:  "return 0;",
			test: test,
			cases: []string{
				"a later fragment before the first", "of another packet", "what follows it",
				"an error about a rest of nothing", "an error about a rest of nothing, 0",
			},
		},
		{
			name: "identification of fragments",
			old:  "id = p->l4 ? d->quoted_fragment : p->fragment;",
			new:  "id = 1;",
			test: test,
			cases: []string{
				"a later fragment", "its rest", "an error about its rest", "its rest, 0", "an error about its rest, 0",
			},
		},
		{
			name:  "identification of quoted fragments",
			old:   "d->quoted_fragment = q.fragment;",
			test:  test,
			cases: []string{"an error about its rest"},
		},
		{
			name: "quoted fragments",
			old:  "d->quotes_fragment = 1;",
			test: test,
			cases: []string{
				"an error about its rest", "an error about a rest of nothing", "an error about its rest, 0",
				"an error about a rest of nothing, 0",
			},
		},
		{
			name:  "first fragments",
			old:   "if (p->parts & HAS_FRAGMENT && p->l4",
			new:   "if (p->fragment && p->l4",
			test:  test,
			cases: []string{"its rest, 0", "an error about its rest, 0"},
		},
		{
			name:  "fragments of a cached session",
			old:   "p->parts & HAS_FRAGMENT || ",
			test:  "TestNimitzPolice",
			cases: []string{"an error about its rest, IPv4"},
		},
		{
			name:  "quotes without a transport header",
			old:   "q.l4 + TRANSPORT_MIN > q.end || ",
			test:  test,
			cases: []string{"an error that does not say about what"},
		},
		{
			name:  "session of an error",
			old:   "m->error = 1;",
			new:   "m->error = 0;",
			test:  test,
			cases: []string{"which begins nothing"},
		},
		{
			name:  "changes of rules",
			old:   "bool known = v->generation == generation && ",
			new:   "bool known = ",
			test:  test,
			cases: []string{"to the port that was open", "its answer"},
		},
		{
			name: "counts of audits",
			old: `if (audit)
		count_rule(audit);`,
			new: `if (audit)
		asm volatile("");`,
			test:  "TestAudit",
			cases: []string{"0 would-be drops were counted, want 6"},
		},
	}
}

func rules() []mutation {
	const missing = "TestMissingRulesDeny"
	return []mutation{
		{
			name: "a missing set",
			old: `if (!by_app)
		return RULE_DENY_ALL;`,
			new: `if (!by_app)
		return RULE_ACCEPT << 30;`,
			test:  missing,
			cases: []string{"a set"},
		},
		{
			name: "a missing table",
			old: `if (!app)
		return RULE_DENY_ALL;`,
			new: `if (!app)
		return RULE_ACCEPT << 30;`,
			test:  missing,
			cases: []string{"a table"},
		},
		{
			name: "a missing table of prefixes",
			old: `if (!cidr)
				return RULE_DENY_ALL;`,
			new: `if (!cidr)
				return RULE_ACCEPT << 30;`,
			test:  missing,
			cases: []string{"a table of blocks"},
		},
	}
}

func conntrack() []mutation {
	const test = "TestAction"
	return []mutation{
		{
			name:  "version of pre-actions",
			old:   "pre->version != PRE_ACTIONS_VERSION || ",
			new:   "",
			test:  "TestActionVersions",
			cases: []string{"newer pre-actions", "pre-actions without a version"},
		},
		{
			name:  "version of a state",
			old:   " || (state->version && !known))",
			new:   ")",
			test:  "TestActionVersions",
			cases: []string{"a newer state"},
		},
		{
			name: "errors",
			old: `if (m->error)
		return o;`,
			test:  test,
			cases: []string{"an error about it, packet 3"},
		},
		{
			name: "pickup",
			old:  "m->pickup && is_midstream(m)",
			new:  "m->pickup",
			test: "TestActionAdopts",
			cases: []string{
				"a connection is begun", "a datagram", "an error about nothing", "an end of it",
				"an answer to what was begun before", "answered", "neither may begin", "none may begin it now",
				"the other's may begin it now", "a new one in its place, which may not",
			},
		},
		{
			name:  "SYN on a picked-up session",
			old:   " || state->seen & PICKED_UP))",
			new:   "))",
			test:  "TestActionAdopts",
			cases: []string{"a new one in its place, which may not"},
		},
		{
			name: "FIN and RST create no session",
			old: `if (fresh && m->proto == NEXTHDR_TCP && m->flags & (TCP_RST | TCP_FIN))
		return o;`,
			test: test,
			cases: []string{
				"an end of nothing begins nothing, packet 0", "an end of nothing begins nothing, packet 1",
				"an end of nothing begins nothing, packet 2",
			},
		},
		{
			name: "live session on SYN",
			old:  " || (fresh && known && !is_closed(state))",
			test: test,
			cases: []string{
				"another SYN from there ends nothing, packet 3", "another SYN from there ends nothing, packet 4",
			},
		},
		{
			name: "end of the handshake",
			old: `&& seen & SEEN_RESPONDER)
		seen |= ESTABLISHED;`,
			new: `)
		seen |= ESTABLISHED;`,
			test:  test,
			cases: []string{"of the middle, by its own way, packet 1", "of the middle, by its own way, packet 2"},
		},
		{
			name:  "reused ports",
			old:   "is_closed(state) || m->dir",
			new:   "m->dir",
			test:  test,
			cases: []string{"its ports are used again from here, packet 4"},
		},
	}
}

func conntrackTable() []mutation {
	return []mutation{
		{
			name: "sessions that move twice",
			old: `	if (ct_has(t, t->slot.first) || ct_has(t, t->slot.second))
		return true;
`,
			test:  "TestKeepSessions",
			cases: []string{"a session that is known is added again", "16 sessions are counted, want 8"},
		},
		{
			name: "time",
			old: `b->entries[i].until > t->now &&
		    `,
			test:  "TestSessionsAge",
			cases: []string{"a session is found after it expired"},
		},
		{
			name:  "established sessions",
			old:   "return s->state.seen & ESTABLISHED && !is_closed(&s->state) ? EVICT_ESTABLISHED : EVICT_CHEAP;",
			new:   "return EVICT_CHEAP;",
			test:  "TestSessionsAge",
			cases: []string{"nothing is refused by a full table"},
		},
		{
			name:  "endpoints with twice as many",
			old:   "v->usage.endpoint > 2 * t->usage.endpoint",
			new:   "v->usage.endpoint > t->usage.endpoint",
			test:  "TestFairShares",
			cases: []string{"two containers"},
		},
		{
			name:  "tenants with twice as many",
			old:   "v->usage.tenant > 2 * t->usage.tenant",
			new:   "v->usage.tenant > t->usage.tenant",
			test:  "TestVictims",
			cases: []string{"half open, of a tenant that has not twice as many"},
		},
		{
			name:  "half-open sessions of smaller endpoints",
			old:   "v->class == EVICT_CHEAP ? v->usage.endpoint >= t->usage.endpoint",
			new:   "v->class == EVICT_CHEAP ? true",
			test:  "TestVictims",
			cases: []string{"half open, of a smaller endpoint"},
		},
		{
			name: "tenant first",
			old: `if (v->distance == EVICT_FOREIGN)
		return v->usage.tenant > 2 * t->usage.tenant;`,
			test:  "TestFairShares",
			cases: []string{"another tenant"},
		},
		{
			name:  "cheapest first",
			old:   "return a->class < b->class;",
			new:   "return b->class == EVICT_NONE;",
			test:  "TestEvictCheapFirst",
			cases: []string{"an established session"},
		},
		{
			name: "own half-open sessions first",
			old: `if (a->class == EVICT_CHEAP && a->distance != b->distance)
		return a->distance < b->distance;`,
			test:  "TestVictims",
			cases: []string{"half open, of the endpoint itself first", "half open, of the tenant before others"},
		},
		{
			name:  "the largest tenant",
			old:   "return a->usage.tenant > b->usage.tenant;",
			new:   "return a->usage.tenant < b->usage.tenant;",
			test:  "TestVictims",
			cases: []string{"of the largest tenant"},
		},
		{
			name: "the largest endpoint",
			old: `if (a->usage.endpoint != b->usage.endpoint)
		return a->usage.endpoint > b->usage.endpoint;`,
			test:  "TestVictims",
			cases: []string{"of the largest endpoint of a tenant"},
		},
		{
			name:  "idle time",
			old:   "candidate.updated = s->until - ct_timeout(&s->state) * 1000000000ULL;",
			new:   "candidate.updated = s->until;",
			test:  "TestVictims",
			cases: []string{"idle for longest"},
		},
		{
			name:  "counts below 0",
			old:   "u->tenant = tenant && *tenant > 0 ? *tenant : 0;",
			new:   "u->tenant = tenant ? *tenant : 0;",
			test:  "TestNegativeUsage",
			cases: []string{"a tenant with a count below 0 evicted a session of one with a count of 0"},
		},
		{
			name: "changes before a bucket is counted",
			old: `if (!t->counted)
		return;`,
			test:  "TestRecountUnderTraffic",
			cases: []string{"under traffic"},
		},
		{
			name:  "buckets that are not counted",
			old:   "freed == counted",
			new:   "freed",
			test:  "TestUsageIsRecounted",
			cases: []string{"after a start"},
		},
		{
			name:  "usage after an eviction",
			old:   "add_usage(&t->evicted, -1);",
			new:   ";",
			test:  "TestFairShares",
			cases: []string{"usage", "two containers", "two tenants"},
		},
		{
			name:  "sessions of a deleted endpoint",
			old:   "(b->entries[i].until <= w->now || b->entries[i].key.endpoint == w->endpoint)",
			new:   "b->entries[i].until <= w->now",
			test:  "TestSessionsOfDeletedEndpoint",
			cases: []string{"the endpoint", "another endpoint", "the table", "counted tenants"},
		},
		{
			name:  "sessions of other endpoints",
			old:   "(b->entries[i].until <= w->now || b->entries[i].key.endpoint == w->endpoint)",
			new:   "true",
			test:  "TestSessionsOfDeletedEndpoint",
			cases: []string{"another endpoint", "the table"},
		},
		{
			name:  "end of pickup",
			old:   "return until && *until > t->now;",
			new:   "return until;",
			test:  "TestAdoption",
			cases: []string{"later"},
		},
	}
}

func nimitzPolicy() []mutation {
	const test = "TestNimitzPolice"
	return []mutation{
		{
			name: "initiator",
			old:  "if (j->from < FIRST_DEVICE && has_policies(vni)) {",
			new:  "if (j->from < FIRST_DEVICE && has_policies(vni) && (r->port == PORT_GATEWAY || r->outside)) {",
			test: test,
			cases: both(
				"a first fragment", "a later fragment", "an error about what was asked", "an error about its rest",
				"answered as before", "answered by who may begin nothing", "answered by who may not be asked",
				"answered from there", "echoed", "mail's answer",
			),
		},
		{
			name:  "transit",
			old:   "if (j->from < FIRST_DEVICE && has_policies(vni)) {",
			new:   "if ((j->from < FIRST_DEVICE || r->port >= FIRST_DEVICE) && has_policies(vni)) {",
			test:  test,
			cases: append(both("another node's outside", "another node's, to another region"), "IPv4", "IPv6"),
		},
		{
			name:  "egress by another node's gateway",
			old:   "bool leaves = r->port == PORT_GATEWAY || r->outside;",
			new:   "bool leaves = r->port == PORT_GATEWAY;",
			test:  test,
			cases: both("mail outside by another node", "mail to another region"),
		},
		{
			name:  "egress by this node's gateway",
			old:   "bool leaves = r->port == PORT_GATEWAY || r->outside;",
			new:   "bool leaves = r->outside;",
			test:  test,
			cases: both("mail to the service"),
		},
		{
			name:  "app of carried rules",
			old:   " && d->carried.app == app",
			test:  "TestFrontendMessages",
			cases: []string{"an answer for another app", "pre-actions for another app"},
		},
		{
			name:  "what a frontend cannot be asked again",
			old:   "return drop(skb, REASON_NSH_STALE, j->hook);",
			new:   "return TC_ACT_SHOT;",
			test:  "TestFrontendMessages",
			cases: []string{"an answer for another app", "pre-actions for another app"},
		},
		{
			name:  "endpoint being added",
			old:   "return drop(skb, REASON_NO_ENDPOINT, j->hook);",
			new:   "return 0;",
			test:  test,
			cases: both("to who is just going"),
		},
	}
}
