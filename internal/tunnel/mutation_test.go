package tunnel

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// mutation removes one check of bpf/tunnel. old occurs once in the file.
type mutation struct {
	file, old, new string
	cases          []string // of refusals: those that fail without the check, and no others
}

var mutations = []mutation{
	{"headers.h", "h->version_length >> 4 != 4 || ", "", []string{"version 5 as IPv4"}},
	{"headers.h", "(h->version_length & 15) < 5", "0", []string{"header of 16 bytes, IPv4"}},
	{"headers.h", "if (h->proto != NEXTHDR_UDP)", "if (0)", []string{"TCP, IPv4"}},
	{"headers.h", "h->version_length != 0x45 || ", "", []string{"IPv4 options"}},
	{"headers.h", " || h->fragment & bpf_htons(IP4_MORE_FRAGMENTS | IP4_FRAGMENT_OFFSET)", "",
		[]string{"first fragment, IPv4", "later fragment, IPv4"}},
	{"headers.h", "ETH_HLEN + bpf_ntohs(h->length) != length || ", "",
		[]string{"another length in IPv4"}},
	{"headers.h", "ip4_checksum(h) ||", "", []string{"header checksum"}},
	{"headers.h", "ip4_checksum(h) ||\n\t    offsetof(struct outer4, udp) + bpf_ntohs(h->udp.len) != length",
		"ip4_checksum(h)", []string{"another length in UDP, IPv4"}},
	{"headers.h", "if (first >> 28 != 6)", "if (0)", []string{"version 4 as IPv6"}},
	{"headers.h", "is_extension(h->nexthdr) ? TUNNEL_OPTIONS : TUNNEL_OTHER", "TUNNEL_OTHER",
		[]string{"fragment, IPv6", "hop-by-hop options, IPv6", "routing header, IPv6", "destination options, IPv6",
			"authentication header, IPv6"}},
	{"headers.h", " || h->udp.len != h->payload_len", "", []string{"another length in UDP, IPv6"}},
	{"headers.h", "offsetof(struct outer6, udp) + bpf_ntohs(h->payload_len) != length || ", "",
		[]string{"shorter than it says, IPv6", "longer than it says, IPv6"}},
	{"pull.h", "is_ip4_mapped(&t->src) || ", "", []string{"mapped source"}},
	{"pull.h", " || is_ip4_mapped(&t->dst)", "", []string{"mapped destination"}},
	{"headers.h", "if (vni & VXLAN_RESERVED_VNI)", "if (0)", []string{"reserved byte behind the VNI"}},
	{"headers.h", "flags ^= VXLAN_HAS_VNI;", "flags &= ~VXLAN_HAS_VNI;", []string{"no VNI"}},
	{"headers.h", "return flags ? TUNNEL_BAD_FLAGS : TUNNEL_OK;", "return TUNNEL_OK;",
		[]string{"no VNI", "reserved flag", "reserved bytes", "group where none is accepted",
			"GPE where none is accepted", "GPE and group", "OAM of GPE", "version of GPE"}},
	{"headers.h", "accept & TUNNEL_GPE && ", "", []string{"GPE where none is accepted"}},
	{"headers.h", "accept & TUNNEL_GROUP && ", "", []string{"group where none is accepted"}},
	{"headers.h", "t->next < NEXT_IP4 || t->next > (accept", "t->next > (accept",
		[]string{"next protocol 0 of GPE"}},
	{"headers.h", "(accept & TUNNEL_NSH ? NEXT_NSH : NEXT_ETHERNET)", "NEXT_NSH",
		[]string{"NSH where none is accepted"}},
	{"headers.h", "base & NSH_VERSION_OAM || ", "", []string{"version of the NSH", "OAM of the NSH"}},
	{"headers.h", "!t->nsh_ttl || ", "", []string{"TTL of the NSH"}},
	{"headers.h", "if (t->md != NSH_MD1 && t->md != NSH_MD2)", "if (0)", []string{"type 0", "type 15"}},
	{"headers.h", "t->md == NSH_MD1 ? t->nsh != NSH_MD1_LENGTH : t->nsh < sizeof(*n)", "t->nsh < sizeof(*n)",
		[]string{"length for type 1"}},
	{"headers.h", ": t->nsh < sizeof(*n)", ": 0", []string{"no length of the NSH"}},
	{"headers.h", " || t->nsh > room", "", []string{"length of the NSH"}},
	{"headers.h", "return t->next < NEXT_IP4 || t->next > NEXT_ETHERNET ? TUNNEL_BAD_NSH : TUNNEL_OK;",
		"return TUNNEL_OK;", []string{"NSH in NSH", "MPLS in NSH", "protocol 0 in NSH"}},
	{"pull.h", "type != bpf_htons(ETH_P_IP) && type != bpf_htons(ETH_P_IPV6)", "0",
		[]string{"ARP inside", "VLAN inside"}},
	{"pull.h", "at + (t->inner_ip4 ? 20 : IPV6_HLEN) > skb->len || ", "", []string{"half an inner header"}},
	{"pull.h", " ||\n\t    ip[0] >> 4 != (t->inner_ip4 ? 4 : 6)", "",
		[]string{"inner version", "inner ethertype of the other version", "IPv4 in NSH that is IPv6"}},
}

// TestEveryCheckHasItsPacket: without a check, the packets for it are not refused, and all others are as before. By
// default it tries two checks, with MUTATION=all each.
func TestEveryCheckHasItsPacket(t *testing.T) {
	tried := mutations
	if os.Getenv("MUTATION") != "all" {
		tried = mutations[:2]
	}
	for _, m := range tried {
		t.Run(m.old, func(t *testing.T) {
			n := newNodeOf(t, m.compile(t))
			var failed []string
			for _, c := range refusals() {
				if n.fault(t, c) != "" {
					failed = append(failed, c.name)
				}
			}
			slices.Sort(failed)
			if want := slices.Sorted(slices.Values(m.cases)); !slices.Equal(failed, want) {
				t.Errorf("failed cases %q, want %q", failed, want)
			}
		})
	}
}

// compile compiles the programs as go generate does, with the check removed.
func (m mutation) compile(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	const bpf = "../../bpf"
	text, err := os.ReadFile(filepath.Join(bpf, "tunnel", m.file))
	must(t, err)
	if n := strings.Count(string(text), m.old); n != 1 {
		t.Fatalf("%s has %q %d times", m.file, m.old, n)
	}
	dir := t.TempDir()
	must(t, os.CopyFS(filepath.Join(dir, "tunnel"), os.DirFS(filepath.Join(bpf, "tunnel"))))
	source, err := os.ReadFile(filepath.Join(bpf, "tunnel_test.bpf.c"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "tunnel_test.bpf.c"), source, 0o600)) // includes what lies beside it
	changed := strings.Replace(string(text), m.old, m.new, 1)
	must(t, os.WriteFile(filepath.Join(dir, "tunnel", m.file), []byte(changed), 0o600))
	object := filepath.Join(dir, "programs.o")
	build := exec.CommandContext(t.Context(), "clang-16", "-target", "bpfel", "-mcpu=v3", "-O2", "-g",
		"-I"+dir, "-I"+bpf, "-c", filepath.Join(dir, "tunnel_test.bpf.c"), "-o", object)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build.Args, err, out)
	}
	spec, err := ebpf.LoadCollectionSpec(object)
	must(t, err)
	return spec
}
