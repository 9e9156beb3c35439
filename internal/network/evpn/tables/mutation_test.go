package tables

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/bpftest"
)

// TestMutations: without any of these checks, the named cases of the tests of packets fail. MUTATION=all tries all.
func TestMutations(t *testing.T) {
	const (
		stages, nimitz        = "net/evpn/stages.h", "net/nimitz/stages.h"
		neighbours, replicate = "net/evpn/neighbours.h", "net/evpn/replicate.h"
	)
	type mutation bpftest.Mutation // a literal without the names of the fields
	var all []bpftest.Mutation
	for _, m := range []mutation{
		{nimitz, "if (to != (j->bridged ? mac_to(r) : router_mac(own_vtep4)))", "if (0)",
			[]string{"in, bridged, for the router", "in, of a node, for another router",
				"in, of a node, for the container's MAC", "in, routed, for the container's MAC"}},
		{stages, "if ((from & vtep4_mask) != vtep4_prefix)", "if (0)",
			[]string{"in, bridged, for the router", "in, bridged, from behind a router", "in, bridged, on its last hop",
				"in, from a container, by another speaker", "in, from another speaker's VTEP without routes",
				"in, in another tenant's VNI", "in, of another speaker, bridged",
				"asked by tunnel, an answer", "asked by tunnel, an answer for a container",
				"asked by tunnel, an answer for a known host elsewhere",
				"asked by tunnel, an answer of a known host", "asked by tunnel, an answer, IPv6",
				"asked by tunnel, for the container", "asked by tunnel, for the container, IPv6",
				"asked by tunnel, of a host that looks for duplicates",
				"asked by tunnel, of a host that looks for duplicates, IPv6",
				"asked by tunnel, of a host without routes", "asked by tunnel, of another VTEP",
				"asked by tunnel, of another tenant's segment"}},
		{nimitz, "return j->bridged ? 0 : dec_ttl(skb, j);\n}\n\n/* tunnel_xmit", "return 0;\n}\n\n/* tunnel_xmit",
			[]string{"in, of a node", "in, of a node, IPv6", "in, of a node, on its last hop",
				"in, of another speaker's host, routed", "in, of another speaker, routed"}},
		{nimitz, "(own_vtep4 || in_base(&r->vtep) == !j->remote_edge)", "(in_base(&r->vtep) == !j->remote_edge)",
			[]string{"in, of a node, to an address elsewhere", "out, to a node", "out, to a node, IPv6",
				"out, to another speaker's router", "out, to a host in the segment",
				"out, to a host in the segment, on its last hop", "out, with another source"}},
		{nimitz, "if (r->outside) /*", "if (0) /*",
			[]string{"out, to a host in the segment", "out, to a host in the segment, on its last hop",
				"out, to another speaker's router"}},
		{nimitz, "j->bridged = wire != j->vni;", "j->bridged = 0;",
			[]string{"in, bridged, for the router", "in, bridged, on its last hop", "in, of another speaker, bridged"}},
		{neighbours, " || same_addr(&n->sender, &n->target)", "", []string{"asked, about itself"}},
		{neighbours, "return !n->answer && ", "return ", []string{"asked, an answer", "asked, an answer, IPv6"}},
		{neighbours, " && !is_unspecified(n, &n->sender);", ";", []string{"asked, without a source"}},
		{neighbours, "if (!from || wire == vni)", "if (!from)", []string{"asked by tunnel, in the L3 VNI"}},
		{neighbours, "if (!from || wire == vni)", "if (wire == vni)", []string{"asked by tunnel, of a node"}},
		{neighbours, "if (!replicates_to(vni, from))", "if (0)",
			[]string{"asked by tunnel, of another VTEP", "asked by tunnel, of another tenant's segment"}},
		{neighbours, "r->port >= FIRST_DEVICE || ", "", []string{"asked by tunnel, for a container elsewhere"}},
		{neighbours, "asked != mac_to(to) || ", "", []string{"asked by tunnel, an answer to another MAC"}},
		{neighbours, "if (r->port != PORT_NONE &&", "if (0 &&",
			[]string{"asked by tunnel, an answer for a container",
				"asked by tunnel, an answer for a known host elsewhere"}},
		{neighbours, " || f.ip.hop_limit != ND_HOP_LIMIT", "", []string{"asked by tunnel, from beyond a router"}},
		{neighbours, "return is_unicast_mac(n->from);\n}\n\nstatic __always_inline bool read_nd",
			"return true;\n}\n\nstatic __always_inline bool read_nd",
			[]string{"asked by tunnel, with a multicast MAC"}},
		{neighbours, "f.hardware != bpf_htons(ARPHRD_ETHER) || ", "", []string{"asked, of another hardware"}},
		{neighbours, "f.protocol != bpf_htons(ETH_P_IP) ||", "", []string{"asked, of another protocol"}},
		{neighbours, "n->from = 0;\n\tmac_of(device, (__u8 *)&n->from);", "", []string{"asked, with another MAC"}},
		{neighbours, "skb->vlan_present || ", "", []string{"asked, in a VLAN"}},
		{neighbours, " || BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL", "",
			[]string{"asked, with a pending checksum"}},
		{stages, "if (!why && (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST))", "if (0)",
			[]string{"asked by tunnel, a broadcast", "asked by tunnel, from beyond a router",
				"asked by tunnel, with a multicast MAC"}},
		{nimitz, "over_ipv4 ? REASON_NOT_REPLICATED : REASON_MULTICAST", "REASON_MULTICAST",
			[]string{"asked, a broadcast", "asked, a multicast, IPv6"}},
		{replicate, "if (due - now > (REPLICATION_BURST - 1) * REPLICATION_INTERVAL)", "if (0)",
			[]string{"too many questions"}},
		{replicate, "i < MAX_REPLICAS; i++) {\n\t\tif (i >= to->count)\n\t\t\tbreak;\n\t\tif (!set_vtep",
			"i < 2; i++) {\n\t\tif (i >= to->count)\n\t\t\tbreak;\n\t\tif (!set_vtep",
			[]string{"many VTEPs"}},
	} {
		all = append(all, bpftest.Mutation(m))
	}
	bpftest.Mutations{
		Root: "../../../../bpf", Source: "evpn.bpf.c", Headers: "net", All: all,
	}.Each(t, func(t *testing.T, _ bpftest.Mutation, spec *ebpf.CollectionSpec) []string {
		b := newBed(t, spec)
		return slices.Concat(b.wrong(t), b.misunderstood(t), b.overrun(t))
	})
}
