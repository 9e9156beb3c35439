package policy

import (
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// App numbers with a special meaning.
const (
	AnyApp  address.AppID = 0xffff // in tables: an unknown app
	Outside address.AppID = 0      // a peer that is no container of the tenant; also one with a reserved app
)

// ID identifies a set or a table of ports. It is a hash of the content, so an ID never refers to another content. 0
// means none.
type ID uint64

// Tables are the policy tables of one tenant on a node. Each map entry is one entry of the kernel map.
type Tables struct {
	Subjects map[address.AppID]Subject // by app; a tenant without an entry for AnyApp has no policies
	Peers    map[PeerKey]Peer
	Blocks   map[BlockKey]ID // the longest prefix has the table
	Ports    map[PortKey]PortEntry
	Ranges   map[RangeKey]Verdict // the longest prefix has the verdict
	Names    map[uint32]RuleName  // of the rules in verdicts
}

// Largest returns the number of entries of the largest table. All tables of a node have the same size.
func (t Tables) Largest() int {
	return max(len(t.Subjects), len(t.Peers), len(t.Blocks), len(t.Ports), len(t.Ranges))
}

// Subject holds the sets of an app. A 0 in Sets means that no policy restricts the direction; a 0 in Audit, that
// policies in audit would change nothing.
type Subject struct {
	Sets  [2]ID // by Direction
	Audit [2]ID // as if policies in audit were enforced
}

// PeerKey is a peer app in a set. Each set has an entry for AnyApp; other apps have one only if their table differs.
type PeerKey struct {
	Set ID
	App address.AppID
}

// Peer is the table of ports for a peer.
type Peer struct {
	Table  ID
	Blocks bool // the set has blocks, which need a lookup too
}

// BlockKey is a prefix in a set. Its table has the verdicts of the set's blocks only. IPv4 is mapped into IPv6.
type BlockKey struct {
	Set    ID
	Prefix netip.Prefix
}

// Scope says which packets an entry of ports matches.
type Scope uint8

const (
	ThisPort       Scope = iota
	OtherPorts           // any other port of the protocol
	OtherProtocols       // any other protocol; each table has such an entry
)

// PortKey is the key of an entry of ports. Port and protocol are 0 where the scope does not use them.
type PortKey struct {
	Table    ID
	Protocol uint8
	Scope    Scope
	Port     uint16
}

// PortEntry combines all rules that match into one verdict.
type PortEntry struct {
	Verdict
	Ranges bool // for OtherPorts: look up the ranges of the protocol first
}

// RangeKey covers the ports whose first Bits bits are those of Port.
type RangeKey struct {
	Table    ID
	Protocol uint8
	Bits     uint8
	Port     uint16
}

// nothing is a set without entries in any table. So it denies all packets, and the verdict names no rule.
const nothing ID = 1<<64 - 1

// HoldUnknown denies the egress of unknown apps if any policy restricts egress, because that policy may select them. It
// is for nodes that also apply the egress policies of remote containers.
func (t *Tables) HoldUnknown(policies []Policy) {
	if unknown, policed := t.Subjects[AnyApp]; policed &&
		slices.ContainsFunc(policies, func(p Policy) bool { return p.touches(Egress) && !p.Audit }) {
		unknown.Sets[Egress], unknown.Audit[Egress] = nothing, 0
		t.Subjects[AnyApp] = unknown
	}
}

// Isolating returns tables that deny all connections from and to the apps of a tenant.
func Isolating() Tables {
	return Tables{Subjects: map[address.AppID]Subject{AnyApp: {Sets: [2]ID{nothing, nothing}}}}
}

// A Verdict holds a step for each tier: an action in the 2 upper bits and the number of its rule in the others.
type Verdict struct {
	Tiers [3]uint32 // by Tier
	Rank  [2]uint16 // for Admin and Baseline: the rule's position in the set, by which two verdicts are merged
}

// numberBits is the width of a rule number.
const numberBits = 30

func step(a Action, number uint32) uint32 { return uint32(a)<<numberBits | number }

// Action returns the action of a tier.
func (v Verdict) Action(t Tier) Action { return Action(v.Tiers[t] >> numberBits) }

// Rule returns the number of the rule that decides in a tier.
func (v Verdict) Rule(t Tier) uint32 { return v.Tiers[t] & (1<<numberBits - 1) }

// rankOf returns the index of a tier in Rank.
func rankOf(t Tier) int { return int(t) / 2 }

// with merges two verdicts about the same packet in the same set. If one rule both accepts and denies an unknown app,
// the result denies.
func (v Verdict) with(w Verdict) Verdict {
	for _, t := range [2]Tier{Admin, Baseline} {
		r := rankOf(t)
		sooner := w.Rank[r] < v.Rank[r] || w.Rank[r] == v.Rank[r] && w.Action(t) == Deny
		if w.Action(t) != None && (v.Action(t) == None || sooner) {
			v.Tiers[t], v.Rank[r] = w.Tiers[t], w.Rank[r]
		}
	}
	if a, b := v.Action(NetworkPolicy), w.Action(NetworkPolicy); a == None || b == Accept && a == Deny {
		v.Tiers[NetworkPolicy] = w.Tiers[NetworkPolicy]
	}
	return v
}

// decide evaluates the tiers in order.
func (v Verdict) decide() (allowed bool, rule uint32) {
	for _, t := range [3]Tier{Admin, NetworkPolicy, Baseline} {
		switch v.Action(t) {
		case Accept:
			return true, v.Rule(t)
		case Deny:
			return false, v.Rule(t)
		}
	}
	return true, 0
}
