package tables

import (
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/bpftest"
)

// TestMutations: without any of these checks, the named cases of TestPackets fail. MUTATION=all tries all.
func TestMutations(t *testing.T) {
	const stages, nimitz = "net/evpn/stages.h", "net/nimitz/stages.h"
	type mutation bpftest.Mutation // a literal without the names of the fields
	var all []bpftest.Mutation
	for _, m := range []mutation{
		{nimitz, "if (to != (j->bridged ? mac_to(r) : router_mac(own_vtep4)))", "if (0)",
			[]string{"in, bridged, for the router", "in, of a node, for another router",
				"in, of a node, for the container's MAC", "in, routed, for the container's MAC"}},
		{stages, "if ((from & vtep4_mask) != vtep4_prefix)", "if (0)",
			[]string{"in, bridged, for the router", "in, bridged, from behind a router", "in, bridged, on its last hop",
				"in, from a container, by another speaker", "in, from another speaker's VTEP without routes",
				"in, in another tenant's VNI", "in, of another speaker, bridged"}},
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
	} {
		all = append(all, bpftest.Mutation(m))
	}
	bpftest.Mutations{
		Root: "../../../../bpf", Source: "evpn.bpf.c", Headers: "net", All: all,
	}.Each(t, func(t *testing.T, _ bpftest.Mutation, spec *ebpf.CollectionSpec) []string {
		return newBed(t, spec).wrong(t)
	})
}
