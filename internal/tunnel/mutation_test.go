package tunnel

import (
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/bpftest"
)

// mutation is one whose cases are refusals.
type mutation bpftest.Mutation

var mutations = []mutation{
	{"tunnel/headers.h", "h->version_length >> 4 != 4 || ", "", []string{"version 5 as IPv4"}},
	{"tunnel/headers.h", "(h->version_length & 15) < 5", "0", []string{"header of 16 bytes, IPv4"}},
	{"tunnel/headers.h", "if (h->proto != NEXTHDR_UDP)", "if (0)", []string{"TCP, IPv4"}},
	{"tunnel/headers.h", "h->version_length != 0x45 || ", "", []string{"IPv4 options"}},
	{"tunnel/headers.h", " || h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET)", "",
		[]string{"first fragment, IPv4", "later fragment, IPv4"}},
	{"tunnel/headers.h", "ETH_HLEN + bpf_ntohs(h->length) != length || ", "",
		[]string{"another length in IPv4"}},
	{"tunnel/headers.h", "ip4_checksum(h) ||", "", []string{"header checksum"}},
	{"tunnel/headers.h", "ip4_checksum(h) ||\n\t    offsetof(struct outer4, udp) + bpf_ntohs(h->udp.len) != length",
		"ip4_checksum(h)", []string{"another length in UDP, IPv4"}},
	{"tunnel/headers.h", "if (first >> 28 != 6)", "if (0)", []string{"version 4 as IPv6"}},
	{"tunnel/headers.h", "is_extension(h->nexthdr) ? TUNNEL_OPTIONS : TUNNEL_OTHER", "TUNNEL_OTHER",
		[]string{"fragment, IPv6", "hop-by-hop options, IPv6", "routing header, IPv6", "destination options, IPv6",
			"authentication header, IPv6"}},
	{"tunnel/headers.h", " || h->udp.len != h->payload_len", "", []string{"another length in UDP, IPv6"}},
	{"tunnel/headers.h", "offsetof(struct outer6, udp) + bpf_ntohs(h->payload_len) != length || ", "",
		[]string{"shorter than it says, IPv6", "longer than it says, IPv6"}},
	{"tunnel/pull.h", "is_ip4_mapped(&t->src) || ", "", []string{"mapped source"}},
	{"tunnel/pull.h", " || is_ip4_mapped(&t->dst)", "", []string{"mapped destination"}},
	{"tunnel/headers.h", "if (vni & VXLAN_RESERVED_VNI)", "if (0)", []string{"reserved byte behind the VNI"}},
	{"tunnel/headers.h", "flags ^= VXLAN_HAS_VNI;", "flags &= ~VXLAN_HAS_VNI;", []string{"no VNI"}},
	{"tunnel/headers.h", "return flags ? TUNNEL_BAD_FLAGS : TUNNEL_OK;", "return TUNNEL_OK;",
		[]string{"no VNI", "reserved flag", "reserved bytes", "group where none is accepted",
			"GPE where none is accepted", "GPE and group", "OAM of GPE", "version of GPE"}},
	{"tunnel/headers.h", "accept & TUNNEL_GPE && ", "", []string{"GPE where none is accepted"}},
	{"tunnel/headers.h", "accept & TUNNEL_GROUP && ", "", []string{"group where none is accepted"}},
	{"tunnel/headers.h", "t->next < NEXT_IP4 || t->next > (accept", "t->next > (accept",
		[]string{"next protocol 0 of GPE"}},
	{"tunnel/headers.h", "(accept & TUNNEL_NSH ? NEXT_NSH : NEXT_ETHERNET)", "NEXT_NSH",
		[]string{"NSH where none is accepted"}},
	{"tunnel/headers.h", "base & NSH_VERSION_OAM || ", "", []string{"version of the NSH", "OAM of the NSH"}},
	{"tunnel/headers.h", "!t->nsh_ttl || ", "", []string{"TTL of the NSH"}},
	{"tunnel/headers.h", "if (t->md != NSH_MD1 && t->md != NSH_MD2)", "if (0)", []string{"type 0", "type 15"}},
	{"tunnel/headers.h", "t->md == NSH_MD1 ? t->nsh != NSH_MD1_LENGTH : t->nsh < sizeof(*n)", "t->nsh < sizeof(*n)",
		[]string{"length for type 1"}},
	{"tunnel/headers.h", ": t->nsh < sizeof(*n)", ": 0", []string{"no length of the NSH"}},
	{"tunnel/headers.h", " || t->nsh > room", "", []string{"length of the NSH"}},
	{"tunnel/headers.h", "return t->next < NEXT_IP4 || t->next > NEXT_ETHERNET ? TUNNEL_BAD_NSH : TUNNEL_OK;",
		"return TUNNEL_OK;", []string{"NSH in NSH", "MPLS in NSH", "protocol 0 in NSH"}},
	{"tunnel/pull.h", "type != bpf_htons(ETH_P_IP) && type != bpf_htons(ETH_P_IPV6)", "0",
		[]string{"ARP inside", "VLAN inside"}},
	{"tunnel/pull.h", "at + (t->inner_ip4 ? 20 : IPV6_HLEN) > skb->len || ", "", []string{"half an inner header"}},
	{"tunnel/pull.h", " ||\n\t    ip[0] >> 4 != (t->inner_ip4 ? 4 : 6)", "",
		[]string{"inner version", "inner ethertype of the other version", "IPv4 in NSH that is IPv6"}},
}

// TestEveryCheckHasItsPacket: without a check, the packets for it are not refused, and all others are as before.
func TestEveryCheckHasItsPacket(t *testing.T) {
	var all []bpftest.Mutation
	for _, m := range mutations {
		all = append(all, bpftest.Mutation(m))
	}
	programs := bpftest.Mutations{Root: "../../bpf", Source: "tunnel_test.bpf.c", Headers: "tunnel", All: all}
	programs.Each(t, func(t *testing.T, _ bpftest.Mutation, spec *ebpf.CollectionSpec) (failed []string) {
		n := newNodeOf(t, spec)
		for _, c := range refusals() {
			if n.fault(t, c) != "" {
				failed = append(failed, c.name)
			}
		}
		return failed
	})
}
