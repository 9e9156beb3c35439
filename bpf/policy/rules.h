/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Policy rules: finds the pre-actions of a session by the apps of both ends. The cost is a fixed number of lookups,
 * however many rules there are. internal/policy compiles the tables. Names of sets and tables are hashes of their
 * content, so no entry ever changes its meaning. */
#pragma once
#include "common/proto.h"
#include "policy/ct.h"

#define APP_ANY	    0xffff /* apps that this node does not know */
#define APP_OUTSIDE 0	   /* a peer that is no container of the tenant */

/* The containers that policies select. */
struct pol_target_key {
	__u32 tenant; /* id or VNI */
	__u32 app;
};

struct pol_target {
	__u64 sets[2];	 /* rule sets by direction: TX is egress; 0: no restriction */
	__u64 audits[2]; /* the rule sets if policies in audit mode were enforced; 0: the same */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pol_target_key);
	__type(value, struct pol_target);
	__uint(max_entries, 1); /* set at load */
} pol_subjects_v1 SEC(".maps");

/* The rules of a set for a peer with an app. */
struct app_key {
	__u64 set;
	__u32 app;
	__u32 zero;
};

struct app_rules {
	__u64 table;
	__u32 cidrs; /* 1: the set also has rules for address prefixes */
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct app_key);
	__type(value, struct app_rules);
	__uint(max_entries, 1); /* set at load */
} pol_apps_v1 SEC(".maps");

/* The rules of a set for a peer's address, IPv4-mapped for IPv4. The value begins with the length of the prefix that
 * was found. */
struct cidr_key {
	__u32 bits; /* prefix length, set included */
	__u64 set;
	struct addr address;
} __attribute__((packed));

struct cidr_rules {
	__u32 bits;
	__u32 zero;
	__u64 table;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_key);
	__type(value, struct cidr_rules);
	__uint(max_entries, 1); /* set at load */
} pol_blocks_v1 SEC(".maps");

/* A verdict has one word per tier: the action in the upper two bits, the rule number below. The outer tiers also have
 * the rank of the rule. */
enum tier {
	TIER_ADMIN,
	TIER_NETWORK,
	TIER_BASELINE,
	TIERS
};

enum rule_action {
	RULE_NONE,
	RULE_ACCEPT,
	RULE_DENY,
	RULE_PASS
};

#define RULE_NUMBER   0x3fffffffu
#define RULE_DENY_ALL ((__u32)RULE_DENY << 30) /* by no rule */

struct rule_verdict {
	__u32 rules[TIERS];
	__u16 ranks[2]; /* of Admin and Baseline; the lower comes first */
};
_Static_assert(sizeof(struct rule_verdict) == 16, "no implicit padding");

enum port_scope {
	SCOPE_PORT,	/* this port */
	SCOPE_PROTOCOL, /* any other port of the protocol */
	SCOPE_ALL	/* any other protocol */
};

struct port_key {
	__u64 table;
	__be16 port;
	__u8 proto;
	__u8 scope;
	__u32 zero;
};

struct port_rules {
	struct rule_verdict verdict;
	__u32 ranges; /* 1: of SCOPE_PROTOCOL, there are also port ranges */
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct port_key);
	__type(value, struct port_rules);
	__uint(max_entries, 1); /* set at load */
} pol_ports_v1 SEC(".maps");

struct range_key {
	__u32 bits; /* prefix length, table and protocol included */
	__u64 table;
	__u8 proto;
	__be16 port;
} __attribute__((packed));

struct range_rules {
	__u32 bits;
	struct rule_verdict verdict;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range_key);
	__type(value, struct range_rules);
	__uint(max_entries, 1); /* set at load */
} pol_ranges_v1 SEC(".maps");

/* Containers whose app has changed since their address was allocated. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);	/* app */
	__uint(max_entries, 1); /* set at load */
} pol_overrides_v1 SEC(".maps");

/* Packets that a rule has denied, or would have if its policy were not in audit mode. The agent creates the entries. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* rule */
	__type(value, __u64);
	__uint(max_entries, 1); /* set at load */
} pol_hits_v1 SEC(".maps");

/* Counts changes of the tables above, as pil_generation_v1 does for the other tables. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} pol_generation_v1 SEC(".maps");

static __always_inline __u32 policy_generation(void)
{
	__u32 zero = 0, *g = bpf_map_lookup_elem(&pol_generation_v1, &zero);

	return g ? *(volatile __u32 *)g : 0;
}

static __always_inline bool has_policies(__u32 tenant)
{
	struct pol_target_key key = {tenant, APP_ANY};

	return bpf_map_lookup_elem(&pol_subjects_v1, &key);
}

/* current_app returns the current app of an address; app is the one that the address contains. */
static __always_inline __u32 current_app(const struct addr *a, __u32 app)
{
	struct addr key = *a;
	__u32 *other = bpf_map_lookup_elem(&pol_overrides_v1, &key);

	return other ? *other : app;
}

/* Both ends of a session, as the rules see them. */
struct flow_tuple {
	struct addr local, remote;
	__u32 tenant;
	__u32 local_app, remote_app;
	__be16 local_port, remote_port;
	__u8 proto;
	__u8 zero[7];
};

static __noinline struct rule_verdict *lookup_port_rules(__u64 table, __u8 proto, __be16 port)
{
	struct port_key key = {.table = table, .port = port, .proto = proto, .scope = SCOPE_PORT};
	struct port_rules *found = bpf_map_lookup_elem(&pol_ports_v1, &key);

	if (found)
		return &found->verdict;
	key.port = 0;
	key.scope = SCOPE_PROTOCOL;
	found = bpf_map_lookup_elem(&pol_ports_v1, &key);
	if (found) {
		struct range_key range = {.bits = 64 + 8 + 16, .table = table, .proto = proto, .port = port};
		struct range_rules *in;

		if (!found->ranges)
			return &found->verdict;
		in = bpf_map_lookup_elem(&pol_ranges_v1, &range);
		return in ? &in->verdict : &found->verdict;
	}
	key.proto = 0;
	key.scope = SCOPE_ALL;
	found = bpf_map_lookup_elem(&pol_ports_v1, &key);
	return found ? &found->verdict : NULL;
}

static __always_inline bool is_final(__u32 rule)
{
	return rule >> 30 == RULE_ACCEPT || rule >> 30 == RULE_DENY;
}

/* first_match returns the rule of an outer tier with the lower rank, of those for the peer's app and for its address.
 */
static __always_inline __u32 first_match(const struct rule_verdict *app, const struct rule_verdict *cidr,
					 enum tier tier)
{
	int i = tier == TIER_BASELINE;

	if (!cidr || !(cidr->rules[tier] >> 30))
		return app->rules[tier];
	if (!(app->rules[tier] >> 30))
		return cidr->rules[tier];
	return cidr->ranks[i] < app->ranks[i] ? cidr->rules[tier] : app->rules[tier];
}

/* evaluate_tiers returns the rule that decides, with its action. Rules of the middle tier only accept, so one match for
 * app or address is enough there. */
static __always_inline __u32 evaluate_tiers(const struct rule_verdict *app, const struct rule_verdict *cidr)
{
	__u32 rule = first_match(app, cidr, TIER_ADMIN);

	if (is_final(rule))
		return rule;
	rule = app->rules[TIER_NETWORK];
	if (cidr && cidr->rules[TIER_NETWORK] >> 30 == RULE_ACCEPT)
		rule = cidr->rules[TIER_NETWORK];
	if (is_final(rule))
		return rule;
	rule = first_match(app, cidr, TIER_BASELINE);
	return is_final(rule) ? rule : RULE_ACCEPT << 30;
}

static __noinline struct cidr_rules *lookup_cidr(__u64 set, const struct addr *address)
{
	struct cidr_key prefix = {.bits = 64 + 128, .set = set, .address = *address};

	return bpf_map_lookup_elem(&pol_blocks_v1, &prefix);
}

/* policy_lookup_set evaluates a rule set for the peer. A missing table denies: the tables are being changed, or are
 * damaged. */
static __noinline __u32 policy_lookup_set(__u64 set, const struct flow_tuple *e, __be16 port)
{
	struct app_key key = {.set = set, .app = e->remote_app < FIRST_RESERVED_APP ? e->remote_app : APP_OUTSIDE};
	struct app_rules *by_app = bpf_map_lookup_elem(&pol_apps_v1, &key);
	struct rule_verdict *app, *cidr = NULL;

	if (!by_app) {
		key.app = APP_ANY;
		by_app = bpf_map_lookup_elem(&pol_apps_v1, &key);
	}
	if (!by_app)
		return RULE_DENY_ALL;
	app = lookup_port_rules(by_app->table, e->proto, port);
	if (!app)
		return RULE_DENY_ALL;
	if (by_app->cidrs) {
		struct cidr_rules *by_cidr = lookup_cidr(set, &e->remote);

		if (by_cidr) {
			cidr = lookup_port_rules(by_cidr->table, e->proto, port);
			if (!cidr)
				return RULE_DENY_ALL;
		}
	}
	return evaluate_tiers(app, cidr);
}

static __always_inline struct pol_target *lookup_target(__u32 tenant, __u32 app)
{
	struct pol_target_key key = {tenant, app};
	struct pol_target *s = bpf_map_lookup_elem(&pol_subjects_v1, &key);

	if (s)
		return s;
	key.app = APP_ANY;
	return bpf_map_lookup_elem(&pol_subjects_v1, &key);
}

/* policy_lookup finds the pre-actions of a session. It returns 0, or -1 for a bad argument. */
__noinline int policy_lookup(const struct flow_tuple *e, struct pre_actions *pre)
{
	struct pol_target *s;

	if (!e || !pre)
		return -1;
	__builtin_memset(pre, 0, sizeof(*pre));
	pre->version = PRE_ACTIONS_VERSION;
	s = lookup_target(e->tenant, e->local_app);
	for (int dir = TX; dir <= RX; dir++) {
		__be16 port = dir == TX ? e->remote_port : e->local_port; /* the port that the session is opened to */
		__u32 rule = RULE_ACCEPT << 30;

		if (s && s->sets[dir])
			rule = policy_lookup_set(s->sets[dir], e, port);
		pre->verdicts[dir] = rule >> 30 == RULE_ACCEPT ? ACCEPT : DENY;
		pre->rules[dir] = bpf_htonl(rule & RULE_NUMBER);
		if (s && s->audits[dir] && pre->verdicts[dir] == ACCEPT) {
			rule = policy_lookup_set(s->audits[dir], e, port);
			if (rule >> 30 == RULE_DENY)
				pre->audits[dir] = bpf_htonl(rule & RULE_NUMBER);
		}
	}
	return 0;
}
