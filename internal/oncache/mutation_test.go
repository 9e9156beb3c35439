package oncache

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/bpftest"
)

// twice returns the names of a case in both directions.
func twice(names ...string) (all []string) {
	for _, name := range names {
		all = append(all, "out: "+name, "in: "+name)
	}
	return all
}

// everywhere is twice, and the same for the programs that learn.
func everywhere(names ...string) (all []string) {
	for _, name := range names {
		all = append(all, "learn out: "+name, "learn in: "+name)
	}
	return append(all, twice(names...)...)
}

// translated returns the cases in which conntrack finds a flow that it translates.
func translated(what string) []string {
	peers := "peer's " + what + " translated"
	own := what + " translated"
	return []string{"out: " + own, "learn out: " + own, "in: " + peers, "learn in: " + peers}
}

// learners returns the names of the cases in which a packet gets a learn mark.
func learners() (names []string) {
	for _, r := range refusals() {
		if r.learns {
			names = append(names, r.name)
		}
	}
	return names
}

// mutation is one whose cases fail in any world.
type mutation bpftest.Mutation

func mutations() []mutation {
	const track = "oncache/track.h"
	const main, inner, tables, learn, state = "oncache.bpf.c", "oncache/inner.h", "oncache/tables.h", "oncache/learn.h",
		"oncache/state.h"
	return []mutation{
		{state, "return now->time < once_lease;", "return true;",
			[]string{"in: no lease", "learn in: no lease", "learn out: no lease", "out: no lease"}},
		{state, "return now->generation.marks && ", "return ",
			[]string{"learn in: paused", "learn out: paused"}},
		{state, "(skb->mark & mark_mask) == mark_of(now->generation.marks, way)", "true",
			[]string{"learn in: marked before a change", "learn in: the other direction",
				"learn out: marked before a change", "learn out: the other direction"}},
		{state, "skb->mark = (skb->mark & ~mark_mask) | value;", "skb->mark = value;",
			append(learners(), twice("unknown, while learning is paused")...)},
		{main, "cause == CAUSE_TCP_FLAGS || ", "", twice("RST", "SYN")},
		{main, " || cause == CAUSE_ROUTE)\n", ")\n",
			[]string{"in: container has moved", "in: container unknown", "out: VTEP unknown",
				"out: destination unknown"}},
		{main, "cause >= CAUSE_SYN_ACK && ", "cause >= CAUSE_UNKNOWN && ",
			append(twice("SYN and ACK"), "in: unverified checksum")},
		{main, "now->generation.marks && may_mark(", "may_mark(",
			twice("unknown, while learning is paused")},
		{main, "if (v.device != skb->ifindex)", "if (0)",
			[]string{"out: another container", "out: let out, but claimed by another container"}},
		{main, "if (!routed && mac_of(p->macs) != mac_of(e.macs))", "if (0)",
			[]string{"out: another MAC, bridged"}},
		{main, "p->longest > e.mtu || ", "",
			[]string{"out: too long"}},
		{main, "if (!is_ip(skb) || is_encapsulated(skb))", "if (is_encapsulated(skb))",
			[]string{"out: ARP"}},
		{main, "if (changes_ecn(t->tos & ECN_MASK, p->ecn))", "if (0)",
			[]string{"in: ECT(1) around ECT(0)", "in: congestion",
				"in: congestion of a flow without ECN"}},
		{main, "if (!e || !same_addr(&e->vtep, &t->src))", "if (!e)",
			[]string{"in: from another node"}},
		{main, "cause == CAUSE_FIN || ", "",
			twice("FIN", "after a FIN")},
		{main, " || c.device != v.device", "",
			[]string{"in: container has moved"}},
		{main, "if (mac_of(p->macs) != (routed ? overlay_mac : mac_of(c.macs)))", "if (0)",
			[]string{"in: another MAC, bridged", "in: to another inner MAC"}},
		{main, "if (p->longest > c.mtu)", "if (0)",
			[]string{"in: too long"}},
		{main, "if (skb->pkt_type != PACKET_HOST)", "if (0)",
			[]string{"in: another's frame"}},
		{main, "	if (!(skb->mark & mark_mask) || !lease(&now))", "	if (!lease(&now))",
			[]string{"learn out: no mark"}},
		{main, "if (!is_ip(skb) || !(skb->mark & mark_mask) || ", "if (!is_ip(skb) || ",
			[]string{"learn in: no mark"}},
		{main, "may_learn(skb, &now, WAY_OUT) && is_encapsulated(skb)", "may_learn(skb, &now, WAY_OUT)",
			[]string{"learn out: not sent by a tunnel device"}},
		{main, "if (!teaches(tunnelled(skb, true, &t, &p)))", "if (tunnelled(skb, true, &t, &p) == CAUSES)",
			[]string{"learn out: SYN", "learn out: fragment"}},
		{main, "if (!teaches(read_inner(skb, 0, false, &p)))", "if (read_inner(skb, 0, false, &p) == CAUSES)",
			[]string{"learn in: FIN", "learn in: fragment"}},
		{tables, "if (v->generation != now->generation.filter)", "if (0)",
			twice("another generation")},
		{tables, "v->out > now->time && ", "",
			[]string{"in: never let out", "out: let in to another device before",
				"out: let in with other MACs before", "out: never let out", "out: void, then let in"}},
		{tables, " && v->in > now->time", "", []string{"in: never let in", "out: never let in",
			"out: void, then let out"}},
		{inner, "p->gso_size ? CAUSE_SEGMENTS : CAUSE_HIT", "CAUSE_HIT",
			twice("segments of UDP")},
		{inner, "if (p->for_kernel)", "if (0)",
			twice("segments of no kind")},
		{inner, "is_echo(p->proto, *(__u8 *)l4) ? CAUSE_HIT : CAUSE_PACKET", "CAUSE_HIT",
			twice("ICMP error")},
		{inner, "p->proto != NEXTHDR_TCP || ", "", twice("GRE")},
		{inner, "if (flags == (TCP_SYN | TCP_ACK))", "if (0)",
			twice("SYN and ACK", "last hop of SYN and ACK")},
		{inner, "if (flags != TCP_ACK)", "if (0)",
			append(twice("RST", "SYN", "no flags"), "learn out: SYN")},
		{inner, "if (flags == (TCP_FIN | TCP_ACK))", "if (0)", twice("FIN", "after a FIN")},
		{inner, "flags ? CAUSE_TCP_FLAGS : CAUSE_PACKET", "CAUSE_TCP_FLAGS",
			twice("no flags")},
		{inner, "h->version_length != 0x45 || ", "",
			twice("IPv4 options")},
		{inner, " || h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET)", "",
			[]string{"in: first fragment", "in: later fragment", "learn in: fragment",
				"learn out: fragment", "out: first fragment", "out: later fragment"}},
		{inner, "bpf_ntohs(h->length) != p->longest || ", "",
			twice("trailing byte")},
		{inner, " || !header4_sums_up(h)", "",
			twice("header checksum")},
		{inner, "start[0] >> 4 != 6 || ", "",
			twice("version")},
		{inner, " || IPV6_HLEN + bpf_ntohs(h->start.payload_len) != p->longest", "",
			twice("trailing byte")},
		{inner, "is_ip4_mapped(&p->flow.local) || ", "",
			[]string{"in: mapped destination", "out: mapped source"}},
		{inner, " || is_ip4_mapped(&p->flow.remote)", "",
			[]string{"in: mapped source", "out: mapped destination"}},
		{inner, "if (p->macs[0] & 1)", "if (0)",
			[]string{"out: multicast MAC"}},
		{inner, "else if (p->type == bpf_htons(ETH_P_IPV6))", "else if (1)",
			[]string{"in: no IP"}},
		{inner, " && p->hops <= 1", " && 0",
			twice("last hop", "last hop of SYN and ACK")},
		{inner, "(cause == CAUSE_HIT || cause == CAUSE_SYN_ACK) && p->hops", "cause == CAUSE_HIT && p->hops",
			twice("last hop of SYN and ACK")},
		{inner, " || skb->protocol != (ip4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6))", "",
			[]string{"in: other ethertype"}},
		{inner, "t->vni != tunnel_vni || ", "",
			[]string{"in: another network", "learn out: another network"}},
		{inner, " || !same_addr(out ? &t->src : &t->dst, &own)", "",
			[]string{"in: another node's", "learn out: another node's"}},
		{inner, "read4(data, skb->len, bpf_htons(tunnel_port), 0, t)",
			"(read4(data, skb->len, bpf_htons(tunnel_port), 0, t), 0)",
			[]string{"in: another length in UDP", "in: another port", "in: group policy",
				"in: outer TCP", "in: reserved byte"}},
		{inner, "read6(data, skb->len, bpf_htons(tunnel_port), 0, t)",
			"(read6(data, skb->len, bpf_htons(tunnel_port), 0, t), 0)",
			[]string{"in: another length in UDP", "in: another port", "in: group policy",
				"in: outer TCP", "in: reserved byte"}},
		{track, "if (!tracks)", "if (true)", everywhere("another flow", "no reply", "no reply to the peer",
			"source translated", "peer's source translated", "destination translated",
			"peer's destination translated")},
		{track, "if (status & (IPS_NAT | IPS_HELPER))", "if (0)",
			slices.Concat(translated("source"), translated("destination"))},
		{track, "(3 << 4)", "(1 << 4)", translated("destination")},
		{track, "(3 << 4)", "(2 << 4)", translated("source")},
		{track, "status & IPS_SEEN_REPLY ? CAUSE_HIT : CAUSE_UNREPLIED", "CAUSE_HIT",
			everywhere("no reply", "no reply to the peer")},
		{track, "return !why;", "return true;", twice("another flow", "no reply", "no reply to the peer",
			"source translated", "peer's source translated", "destination translated",
			"peer's destination translated")},
		{learn, "if (!sender || *sender != mac_of(p->macs))", "if (!sender)",
			[]string{"learn in: to another MAC"}},
		{learn, "if (!sender || *sender != mac_of(p->macs))", "if (sender && *sender != mac_of(p->macs))",
			[]string{"learn in: the container has sent nothing"}},
		{main, "if (differ(v.macs, p->macs, sizeof(v.macs)))", "if (0)",
			[]string{"out: from another MAC", "out: to another MAC"}},
		{main, "if (t->flags & TUNNEL_CSUM && !is_verified(skb))", "if (0)",
			[]string{"in: unverified checksum"}},
		{learn, "if (!ip4 && t->flags & TUNNEL_CSUM)", "if (0)",
			[]string{"learn out: outer checksum"}},
		{main, "(way == WAY_IN || claim(skb, now, p))",
			"(way == WAY_IN || claim(skb, now, p) || true)",
			[]string{"out: another container", "out: another container answers a SYN", "out: from another MAC",
				"out: to another MAC", "out: let out, but claimed by another container"}},
		{learn, "if (known && known->generation == now->generation.filter)", "if (known)",
			[]string{"out: another container, void", "out: void, then let out"}},
		{learn, "known->device == skb->ifindex && !differ(", "!differ(",
			[]string{"out: another container", "out: another container answers a SYN",
				"out: let out, but claimed by another container"}},
		{learn, " && !differ(known->macs, p->macs, sizeof(p->macs));", ";",
			[]string{"out: from another MAC", "out: to another MAC"}},
		{learn, "known && known->generation == new.generation && known->device == device",
			"known && known->device == device", []string{"out: void, then let in"}},
		{learn, "known->device == device &&\n	    !differ(", "!differ(",
			[]string{"out: let in to another device before", "out: let out for another container, then let in"}},
		{learn, " &&\n	    !differ(known->macs, new.macs, sizeof(new.macs)))", ")",
			[]string{"out: let in with other MACs before"}},
	}
}

// TestEveryCheckHasItsPacket: without a check, the cases for it fail, and no others.
func TestEveryCheckHasItsPacket(t *testing.T) {
	var all []bpftest.Mutation
	for _, m := range mutations() {
		all = append(all, bpftest.Mutation(m))
	}
	programs := bpftest.Mutations{Root: "../../bpf", Source: "oncache.bpf.c", Headers: "oncache", All: all}
	programs.Each(t, func(t *testing.T, m bpftest.Mutation, spec *ebpf.CollectionSpec) (failed []string) {
		for _, w := range worlds {
			if m.File == "oncache/track.h" {
				failed = append(failed, newBenchOf(t, spec, w, tracking).trackFaults(t)...)
				continue
			}
			b := newBenchOf(t, spec, w)
			casesOf(w, func(name string, c faultOf) {
				if fault := c.fault(t, b); fault != "" {
					t.Logf("%v: %s: %s", w, name, fault)
					failed = append(failed, name)
				}
			})
		}
		return failed
	})
}
