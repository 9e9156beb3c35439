package oncache

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/packet"
)

// Of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	ctNew                                                     = unix.NFNL_SUBSYS_CTNETLINK << 8
	ctaOrig, ctaReply, ctaStatus, ctaNATSrc, ctaNATDst        = 1, 2, 3, 6, 13
	ctaTimeout, ctaIP, ctaProto                               = 7, 1, 2
	ctaV4Src, ctaV6Src, ctaNum, ctaSrcPort, ctaDstPort        = 1, 3, 1, 2, 3
	natV4, natV6, natProto, natPortMin, natPortMax            = 1, 4, 3, 1, 2
	ipsSeenReply, ipsConfirmed                         uint32 = 2, 8
)

type tuple struct{ from, to netip.AddrPort }

func be16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

func (u tuple) attr(kind int) *nl.RtAttr {
	family := ctaV6Src
	if u.from.Addr().Is4() {
		family = ctaV4Src
	}
	a := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	ip := a.AddRtAttr(unix.NLA_F_NESTED|ctaIP, nil)
	ip.AddRtAttr(family, u.from.Addr().AsSlice())
	ip.AddRtAttr(family+1, u.to.Addr().AsSlice())
	proto := a.AddRtAttr(unix.NLA_F_NESTED|ctaProto, nil)
	proto.AddRtAttr(ctaNum, []byte{packet.ProtocolUDP})
	proto.AddRtAttr(ctaSrcPort, be16(u.from.Port()))
	proto.AddRtAttr(ctaDstPort, be16(u.to.Port()))
	return a
}

// flow is a conntrack entry of UDP. nat is ctaNATSrc or ctaNATDst with the new end, 0 for none.
type flow struct {
	orig    tuple
	replied bool
	nat     int
	to      netip.AddrPort
}

// create adds the entry to conntrack in the thread's namespace.
func (f flow) create() error {
	r := nl.NewNetlinkRequest(ctNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	family := uint8(unix.AF_INET6)
	if f.orig.from.Addr().Is4() {
		family = unix.AF_INET
	}
	status := ipsConfirmed
	if f.replied {
		status |= ipsSeenReply
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family})
	r.AddData(f.orig.attr(ctaOrig))
	r.AddData(tuple{f.orig.to, f.orig.from}.attr(ctaReply))
	r.AddData(nl.NewRtAttr(ctaStatus, binary.BigEndian.AppendUint32(nil, status)))
	r.AddData(nl.NewRtAttr(ctaTimeout, binary.BigEndian.AppendUint32(nil, 60)))
	if f.nat != 0 {
		nat, ip := nl.NewRtAttr(unix.NLA_F_NESTED|f.nat, nil), natV6
		if f.to.Addr().Is4() {
			ip = natV4
		}
		nat.AddRtAttr(ip, f.to.Addr().AsSlice())
		proto := nat.AddRtAttr(unix.NLA_F_NESTED|natProto, nil)
		proto.AddRtAttr(natPortMin, be16(f.to.Port()))
		proto.AddRtAttr(natPortMax, be16(f.to.Port()))
		r.AddData(nat)
	}
	_, err := r.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// trackCase is a packet that the overlay has let through, and what conntrack knows of its flow.
type trackCase struct {
	name  string
	flow  func(here, there netip.AddrPort) flow
	cause string
}

func trackCases() []trackCase {
	type ends = netip.AddrPort
	other := func(e ends) ends { return netip.AddrPortFrom(e.Addr(), e.Port()+1000) }
	return []trackCase{
		{"established", func(a, b ends) flow { return flow{orig: tuple{a, b}, replied: true} }, "learnt"},
		{"established by the peer", func(a, b ends) flow { return flow{orig: tuple{b, a}, replied: true} }, "learnt"},
		{"another flow", func(a, b ends) flow { return flow{orig: tuple{other(a), b}, replied: true} }, "untracked"},
		{"no reply", func(a, b ends) flow { return flow{orig: tuple{a, b}} }, "unreplied"},
		{"no reply to the peer", func(a, b ends) flow { return flow{orig: tuple{b, a}} }, "unreplied"},
		{"source translated", func(a, b ends) flow {
			return flow{orig: tuple{a, b}, replied: true, nat: ctaNATSrc, to: other(a)}
		}, "nat"},
		{"peer's source translated", func(a, b ends) flow {
			return flow{orig: tuple{b, a}, replied: true, nat: ctaNATSrc, to: other(b)}
		}, "nat"},
		{"destination translated", func(a, b ends) flow {
			return flow{orig: tuple{a, b}, replied: true, nat: ctaNATDst, to: other(b)}
		}, "nat"},
		{"peer's destination translated", func(a, b ends) flow {
			return flow{orig: tuple{b, a}, replied: true, nat: ctaNATDst, to: other(a)}
		}, "nat"},
	}
}

// trackFaults returns the cases that fail, in a namespace with these conntrack entries: packets get no learn mark, and
// are not learnt from. A packet whose tuple conntrack has not, because of the translation, is as good as one of a
// translated flow.
func (b *bench) trackFaults(t *testing.T) (failed []string) {
	here, there, _, _ := b.ends()
	b.introduce(t)
	for i, c := range trackCases() {
		for way, program := range []string{"out", "in"} {
			port := 2*uint16(i) + uint16(way) + 4000
			f := c.flow(netip.AddrPortFrom(here, port), netip.AddrPortFrom(there, 80))
			must(t, b.ns.Do(f.create))
			said := packet.UDP{SourcePort: port, DestinationPort: 80}
			answered := packet.UDP{SourcePort: 80, DestinationPort: port}
			first, last := b.sent(said), b.leaving(said)
			if program == "in" {
				first, last = b.coming(answered), b.received(answered)
			}
			for _, s := range []step{{program: program, frame: first}, {program: "learn " + program, frame: last}} {
				if why := b.trackFault(t, s, uint32(way+1), c.cause); why != "" {
					t.Logf("%v: %s: %s: %s", b.world, s.program, c.name, why)
					failed = append(failed, s.program+": "+c.name)
				}
			}
		}
	}
	return failed
}

func (b *bench) trackFault(t *testing.T, s step, way uint32, cause string) string {
	t.Helper()
	b.clean(t)
	s.mark = others
	marked, learnt := others|b.field(way), cause == "learnt"
	wanted, entries, mark := []string{cause}, 0, marked
	switch teaches := strings.HasPrefix(s.program, "learn"); {
	case teaches && learnt:
		s.mark, entries = marked, 1 // the way to the destination, or the flow
	case teaches:
		s.mark = marked
	case learnt:
		wanted = []string{"unknown"}
	default:
		wanted, mark = []string{cause, "unknown"}, others
	}
	var got uint32
	causes := b.counted(t, way, func() { _, _, got = b.run(t, s) })
	stats, err := b.Stats()
	must(t, err)
	if cause == "nat" && slices.Contains(causes, "untracked") {
		wanted[0] = "untracked"
	}
	slices.Sort(wanted)
	if n := stats.Flows + stats.Remote; !slices.Equal(causes, wanted) || n != entries || got != mark {
		return fmt.Sprintf("counted %q, want %q, %d entries, mark %#x, want %#x", causes, wanted, n, got, mark)
	}
	return ""
}

func tracking(c *Config) { c.Tracks = true }

// A flow is marked and learnt only if conntrack has seen both directions and does not translate it.
func TestConntrack(t *testing.T) {
	for _, w := range worlds {
		if failed := newBench(t, w, tracking).trackFaults(t); len(failed) > 0 {
			t.Errorf("%v: %q", w, failed)
		}
	}
}
