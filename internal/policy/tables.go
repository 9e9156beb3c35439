package policy

import (
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// Numbers of apps with a meaning of their own.
const (
	AnyApp  address.AppID = 0xffff // in tables: an app that is not known
	Outside address.AppID = 0      // a peer that is no container of the tenant; so is one of a reserved app
)

// ID names a set or a table of ports. It is a hash of the content, so what an ID stands for never changes; 0 is none.
type ID uint64

// Tables are what a node decides by for one tenant. One entry of a map is one entry of a map in the kernel.
type Tables struct {
	Subjects map[address.AppID]Subject // by app; without that of AnyApp, the tenant has no policies
	Peers    map[PeerKey]Peer
	Blocks   map[BlockKey]ID // the longest prefix says the table
	Ports    map[PortKey]PortEntry
	Ranges   map[RangeKey]Verdict // the longest prefix says the verdict
	Names    map[uint32]RuleName  // of the rules in verdicts
}

// Subject has the sets of an app. 0: nothing restricts that direction; for audit: the same as without.
type Subject struct {
	Sets  [2]ID // by Direction
	Audit [2]ID // as if policies in audit were enforced
}

// PeerKey asks what a set says of an app. Each set has AnyApp; other apps only where their table is another one.
type PeerKey struct {
	Set ID
	App address.AppID
}

// Peer is a table of ports.
type Peer struct {
	Table  ID
	Blocks bool // the set has blocks, to be asked as well
}

// BlockKey asks what blocks of a set alone say of an address; IPv4 is mapped into IPv6.
type BlockKey struct {
	Set    ID
	Prefix netip.Prefix
}

// Scope is what an entry of ports is about.
type Scope uint8

const (
	ThisPort       Scope = iota
	OtherPorts           // any other port of the protocol
	OtherProtocols       // any other protocol; each table has it
)

// PortKey has zeros where its scope makes port or protocol mean nothing.
type PortKey struct {
	Table    ID
	Protocol uint8
	Scope    Scope
	Port     uint16
}

// PortEntry is all that matches, in one verdict.
type PortEntry struct {
	Verdict
	Ranges bool // in OtherPorts: ranges of the protocol are to be asked first
}

// RangeKey is ports that begin with Bits bits of Port.
type RangeKey struct {
	Table    ID
	Protocol uint8
	Bits     uint8
	Port     uint16
}

// nothing is a set that no table has: it denies, by no rule.
const nothing ID = 1<<64 - 1

// HoldUnknown has apps that are not known begin nothing, where a policy says what anybody may begin: it may select
// them. It is for nodes that judge what containers of others begin.
func (t *Tables) HoldUnknown(policies []Policy) {
	if unknown, policed := t.Subjects[AnyApp]; policed &&
		slices.ContainsFunc(policies, func(p Policy) bool { return p.touches(Egress) && !p.Audit }) {
		unknown.Sets[Egress], unknown.Audit[Egress] = nothing, 0
		t.Subjects[AnyApp] = unknown
	}
}

// Isolating has no app of a tenant begin anything, nor anybody anything to it.
func Isolating() Tables {
	return Tables{Subjects: map[address.AppID]Subject{AnyApp: {Sets: [2]ID{nothing, nothing}}}}
}

// A Verdict is what each tier says: an action in the 2 upper bits and the number of its rule below.
type Verdict struct {
	Tiers [3]uint32 // by Tier
	Rank  [2]uint16 // of Admin and Baseline: the place of the rule in the set, by which two verdicts are put together
}

// numberBits are those of a rule's number.
const numberBits = 30

func step(a Action, number uint32) uint32 { return uint32(a)<<numberBits | number }

// Action is what a tier does.
func (v Verdict) Action(t Tier) Action { return Action(v.Tiers[t] >> numberBits) }

// Rule is the number of the rule by which a tier does it.
func (v Verdict) Rule(t Tier) uint32 { return v.Tiers[t] & (1<<numberBits - 1) }

// rankOf is where Rank has that of a tier.
func rankOf(t Tier) int { return int(t) / 2 }

// with is the verdict with what another one adds to it, about the same packet in the same set. One rule says two things
// of who is not known: then it denies.
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

// decide goes through the tiers.
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
