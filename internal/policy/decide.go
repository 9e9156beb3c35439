package policy

import (
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Decision is the result for the first packet of a connection, in one direction of one subject.
type Decision struct {
	Allowed bool
	Rule    uint32 // the rule that decided; 0: no rule applied
	// WouldDrop reports that a policy in audit would drop the packet if the policy were enforced. AuditRule is the
	// policy's rule.
	WouldDrop bool
	AuditRule uint32
}

// Decide looks a packet up in the same order as the eBPF program: subject, peer, ports, blocks. remote is Outside if
// the peer is no container of the tenant, and addr is its canonical address. port is 0 for protocols without ports.
func (t Tables) Decide(
	subject address.AppID,
	d Direction,
	remote address.AppID,
	addr netip.Addr,
	protocol uint8,
	port uint16,
) Decision {
	s, ok := t.Subjects[subject]
	if !ok {
		s = t.Subjects[AnyApp]
	}
	if remote >= address.FirstReservedApp {
		remote = Outside
	}
	var result Decision
	result.Allowed, result.Rule = t.ask(s.Sets[d], remote, addr, protocol, port).decide()
	if audit := s.Audit[d]; audit != 0 && result.Allowed {
		allowed, rule := t.ask(audit, remote, addr, protocol, port).decide()
		if !allowed {
			result.WouldDrop, result.AuditRule = true, rule
		}
	}
	return result
}

func (t Tables) ask(set ID, remote address.AppID, addr netip.Addr, protocol uint8, port uint16) Verdict {
	if set == 0 {
		return Verdict{}
	}
	peer, ok := t.Peers[PeerKey{set, remote}]
	if !ok {
		peer, ok = t.Peers[PeerKey{set, AnyApp}]
	}
	if !ok {
		return Verdict{Tiers: [3]uint32{step(Deny, 0)}} // a missing entry denies
	}
	v := t.atPort(peer.Table, protocol, port)
	if peer.Blocks {
		if table := t.block(set, addr); table != 0 {
			v = v.with(t.atPort(table, protocol, port))
		}
	}
	return v
}

func (t Tables) atPort(table ID, protocol uint8, port uint16) Verdict {
	if e, ok := t.Ports[PortKey{table, protocol, ThisPort, port}]; ok {
		return e.Verdict
	}
	e, ok := t.Ports[PortKey{table, protocol, OtherPorts, 0}]
	if !ok {
		return t.Ports[PortKey{table, 0, OtherProtocols, 0}].Verdict
	}
	for bits := 16; e.Ranges && bits >= 0; bits-- {
		if v, ok := t.Ranges[RangeKey{table, protocol, uint8(bits), port &^ (1<<(16-bits) - 1)}]; ok {
			return v
		}
	}
	return e.Verdict
}

func (t Tables) block(set ID, addr netip.Addr) ID {
	addr = mapped(addr)
	for bits := 128; bits >= 0; bits-- {
		prefix, _ := addr.Prefix(bits) // no error: bits is at most 128 and addr is IPv6
		if id, ok := t.Blocks[BlockKey{set, prefix}]; ok {
			return id
		}
	}
	return 0
}

// mapped returns an address as tables store it: IPv4 mapped into IPv6.
func mapped(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }

func mappedPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.PrefixFrom(mapped(p.Addr()), p.Bits()+96)
	}
	return p
}
