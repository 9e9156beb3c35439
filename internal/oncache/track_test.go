package oncache

import (
	"encoding/binary"
	"net/netip"
	"slices"
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

// faults returns the cases that fail, in a namespace with these conntrack entries. A packet whose tuple conntrack has
// not, because of the translation, is as good as one of a translated flow.
func (b *bench) trackFaults(t *testing.T) (failed []string) {
	here, there, _, _ := b.ends()
	for i, c := range trackCases() {
		for _, program := range []string{"learn out", "learn in"} {
			b.clean(t)
			port := 2*uint16(i) + 4000
			if program == "learn in" {
				port++
			}
			f := c.flow(netip.AddrPortFrom(here, port), netip.AddrPortFrom(there, 80))
			must(t, b.ns.Do(f.create))
			r := refusal{name: program + ": " + c.name}
			s := step{program: program, mark: b.field(r.way())}
			if program == "learn out" {
				s.frame = b.leaving(packet.UDP{SourcePort: port, DestinationPort: 80})
			} else {
				s.frame = b.received(packet.UDP{SourcePort: 80, DestinationPort: port})
			}
			causes := b.counted(t, r.way(), func() { b.run(t, s) })
			ok := slices.Equal(causes, []string{c.cause})
			if c.cause == "nat" {
				ok = ok || slices.Equal(causes, []string{"untracked"})
			}
			stats, err := b.Stats()
			must(t, err)
			if learnt := c.cause == "learnt"; !ok || (stats.Flows == 1) != learnt {
				t.Logf("%v: %s: counted %q, %d flows", b.world, r.name, causes, stats.Flows)
				failed = append(failed, r.name)
			}
		}
	}
	return failed
}

func tracking(c *Config) { c.Tracks = true }

// A flow is learnt only if conntrack has seen both directions and does not translate it.
func TestConntrack(t *testing.T) {
	for _, w := range worlds {
		if failed := newBench(t, w, tracking).trackFaults(t); len(failed) > 0 {
			t.Errorf("%v: %q", w, failed)
		}
	}
}
