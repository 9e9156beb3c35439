package tables

import (
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/bpftest"
)

// TestMutations: without any of these checks, the named cases of TestPackets fail. MUTATION=all tries all.
func TestMutations(t *testing.T) {
	const stages, forward, address = "net/ila/stages.h", "net/ila/forward.h", "net/ila/address.h"
	const miss = "net/ila/miss.h"
	type mutation bpftest.Mutation // a literal without the names of the fields
	var all []bpftest.Mutation
	for _, m := range []mutation{
		{stages, "if (!source_stays && !ila_check_locator(peer, local, key->src.hi))", "if (0)",
			[]string{"in, from another node's locator", "in, from a former locator later",
				"in, error of a router about a packet to the wrong node",
				"in, to a container that came, from a third node",
				"in, forwarded by the receiver's former node later"}},
		{stages, " || from->ifindex != key->device", "",
			[]string{"out, source of another container here", "out, source of another tenant's container here"}},
		{stages, "key->src.hi != sir_prefix || ", "", []string{"out, own identifier of another prefix"}},
		{stages, "if (key->dst.hi != sir_prefix)", "if (0)",
			[]string{"out, to the fabric's address", "out, to an outside address"}},
		{stages, "if (identifier_vnid(id) != identifier_vnid(key->src.lo))", "if (0)",
			[]string{"out, to another tenant here", "out, to another tenant elsewhere"}},
		{stages, "h && h->hop_limit <= 1 ? REASON_HOP_LIMIT : why", "why",
			[]string{"out, too long on its last hop, without a flow"}},
		{stages, "if (key.src.hi == own_locator)", "if (0)", []string{"in, from a container here"}},
		{stages, "is_error(&p) && !claims_tenant(&key.src)", "is_error(&p)",
			[]string{"in, a router's smaller MTU, forwarded by the receiver's former node",
				"in, to a container that has moved, an error",
				"in, to a container that has moved, an error of a container about another's packet",
				"in, error of a container",
				"in, error of a container about another's packet",
				"in, error of a container about a packet to another",
				"in, error of a container about a packet to another on the fabric"}},
		{stages, "if (identifier_vnid(from) != identifier_vnid(to))", "if (0)",
			[]string{"in, from a host", "in, from a node", "in, from a netpila container",
				"in, from another tenant", "in, source without the C bit",
				"in, from an address that containers see",
				"in, from a host with a container's identifier",
				"in, from another tenant by the receiver's former node"}},
		{stages, "(peer->former == locator && bpf_ktime_get_ns() < peer->until) ||", "",
			[]string{"in, from a former locator"}},
		{stages, " ||\n	       (local->former == locator && bpf_ktime_get_ns() < local->until)", "",
			[]string{"in, a router's smaller MTU, forwarded by the receiver's former node",
				"in, forwarded by the receiver's former node"}},
		{stages, "local->former == locator && ", "",
			[]string{"in, to a container that came, from a third node"}},
		{stages, " && bpf_ktime_get_ns() < local->until", "",
			[]string{"in, forwarded by the receiver's former node later"}},
		{stages, "if (!local && identifier_vnid(from) == identifier_vnid(to))", "if (!local)",
			[]string{"in, to a container that has moved, from another tenant"}},
		{stages, "!moved || moved->former != own_locator || ", "!moved || ",
			[]string{"in, to a container that moved between other nodes"}},
		{stages, " || bpf_ktime_get_ns() >= moved->until)", ")", []string{"in, to a container that has moved, later"}},
		{stages, "is_error(p) ? ila_check_quote(skb, p, f, HOOK_UPLINK_IN) : 0", "0",
			[]string{"in, to a container that has moved, a router's error",
				"in, to a container that has moved, a router's error about another's packet",
				"in, to a container that has moved, a router's smaller MTU",
				"in, to a container that has moved, an error of a container about another's packet"}},
		{stages, "if (!source_stays && peer->locator != key->src.hi)\n		return drop",
			"if (0)\n		return drop",
			[]string{"in, to a container that has moved, a router's error about a packet to another",
				"in, to a container that has moved, forwarded already",
				"in, to a container that has moved, from the sender's former node"}},
		{stages, "	/* The next packet is checked anew. */\n	f->egress = 0;\n", "",
			[]string{"in, to a container that has moved, a router's smaller MTU",
				"in, to a container that has moved, a router's error",
				"in, TCP to a container that has moved", "in, to a container that has moved, an error",
				"in, to a container that has moved, later", "in, to a container that has moved, on its last hop"}},
		{forward, "hook == HOOK_CONTAINER ? ila_error_send(skb, p, f, why) : drop(skb, why, hook)",
			"ila_error_send(skb, p, f, why)", []string{"in, to a container that has moved, on its last hop"}},
		{stages, " && bpf_ktime_get_ns() < peer->until) ||", ") ||", []string{"in, from a former locator later"}},
		{stages, "	if (!source_stays && peer->locator != key->src.hi)\n		f->egress",
			"	if (0)\n		f->egress",
			[]string{"in, from a former locator later",
				"in, forwarded by the receiver's former node later"}},
		{address, "!in_ila(a) || ", "", []string{"in, from a host with a container's identifier"}},
		{address, " || !*last_16(&identifier)", "", []string{"in, to 0 instead of 0xffff"}},
		{address, "(identifier & IDENTIFIER_FORM) != (IDENTIFIER_TYPE | neutral_bit) || ", "",
			[]string{"in, with the C bit cleared", "in, from an address that containers see",
				"in, source without the C bit"}},
		{forward, "	if (is_error(p))\n		why = ila_check_quote(skb, p, f, hook);\n", "",
			[]string{"in, error of a container about a packet to another",
				"in, error of a container about a packet to another on the fabric",
				"in, error of a container about another's packet",
				"in, error of a container about the packet on the fabric", "in, error of a router",
				"in, error of a router about a fragment", "in, error of a router about another's packet",
				"out, error about a packet on the fabric", "out, error about a packet to another",
				"out, error about another's packet", "out, error with half a quote"}},
		{forward, "same_addr(&quoted[0], seen_end(f, false, hook)) && ", "",
			[]string{"in, to a container that has moved, an error of a container about another's packet",
				"in, error of a container about another's packet", "out, error about a packet to another"}},
		{forward, " && same_addr(&quoted[1], seen_end(f, true, hook))", "",
			[]string{"in, error of a container about a packet to another", "out, error about another's packet"}},
		{forward, "!same_addr(&quoted[0], &f->key.dst) || ", "",
			[]string{"in, to a container that has moved, a router's error about another's packet",
				"in, error of a router about another's packet", "out, error about a packet to another"}},
		{forward, " || !same_addr(&quoted[1], &f->key.src)", "",
			[]string{"in, error of a container about a packet to another on the fabric",
				"out, error about another's packet"}},
		{forward, "at + sizeof(quoted) > p->end || ", "", []string{"out, error with half a quote"}},
		{address, "if (source_stays)", "if (0)", []string{"sir, UDP", "sir, UDP again, by a known flow",
			"sir, error of a container", "sir, from a locator", "sir, from a container here",
			"sir, from an unknown container"}},
		{address, "a->hi == sir_prefix ? a->lo : 0", "a->lo",
			[]string{"sir, from an identifier of another prefix", "sir, from a locator"}},
		{stages, "source_stays ? key->src : to_wire(key->src.lo", "0 ? key->src : to_wire(key->src.lo",
			[]string{"sir, to the fabric"}},
		{stages, "!source_stays && !ila_check", "!ila_check", []string{"sir, UDP",
			"sir, UDP again, by a known flow", "sir, error of a container"}},
		{miss, "if (*pace - now >= MISS_BURST * MISS_INTERVAL)", "if (0)",
			[]string{"pull, many forged senders", "pull, many identifiers"}},
		{miss, "if (*pace < now)", "if (0)", []string{"pull, to a container that has moved",
			"pull, while senders are forged"}},
		{miss, "*pace += MISS_INTERVAL;", "", []string{"pull, pace"}},
		{miss, ".hook = hook", ".hook = 1",
			[]string{"pull, many forged senders"}},
		{miss, ".vnid = identifier_vnid(identifier)", ".vnid = 0",
			[]string{"pull, many forged senders", "pull, many identifiers", "pull, pace"}},
		{miss, "peer->used = now;", ";", []string{"pull, use to the fabric", "pull, use from the fabric",
			"pull, use by a packet to a container that has moved"}},
		{miss, "if (mappings_pulled)\n		ila_report_miss(identifier, hook);", "", []string{
			"pull, from a container", "pull, from the fabric", "pull, to a container that has moved", "pull, pace",
			"pull, while senders are forged", "pull, of another tenant meanwhile"}},
	} {
		all = append(all, bpftest.Mutation(m))
	}
	bpftest.Mutations{
		Root: "../../../../bpf", Source: "ila.bpf.c", Headers: "net/ila", All: all,
	}.Each(t, func(t *testing.T, m bpftest.Mutation, spec *ebpf.CollectionSpec) []string {
		of := func(form string) bool {
			return slices.ContainsFunc(m.Cases, func(name string) bool { return strings.HasPrefix(name, form) })
		}
		if of("sir, ") {
			return newBedWith(t, spec, sirConfig()).wrongSIR(t)
		}
		if of("pull, ") {
			return newBedWith(t, spec, pullConfig()).wrongPull(t)
		}
		return newBed(t, spec).wrong(t)
	})
}
