package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
)

// Limits for one tenant.
const (
	MaxPolicies = 100_000
	maxRank     = math.MaxUint16
	maxEntries  = 1 << 20 // of one map, on one node
)

// Compile compiles the policies into the tables for subjects, the apps on this node. apps are all known apps with their
// identity labels and must include subjects. Compile is deterministic: equal arguments give equal tables.
func Compile(
	tenant string,
	policies []Policy,
	apps map[address.AppID]map[string]string,
	subjects []address.AppID,
) (Tables, error) {
	return NewIndex(apps).Compile(tenant, policies, subjects)
}

// Compile does what the function Compile does, with an index of the apps. The index must include subjects.
func (ix *Index) Compile(tenant string, policies []Policy, subjects []address.AppID) (Tables, error) {
	c, err := newCompiler(tenant, policies, ix)
	if err != nil || len(policies) == 0 {
		return Tables{}, err
	}
	places := []int{c.index.unknown()}
	for _, app := range subjects {
		at, known := slices.BinarySearch(c.index.apps, app)
		if !known {
			return Tables{}, fmt.Errorf("app %d of tenant %s is on this node and its labels are not known", app, tenant)
		}
		places = append(places, at)
	}
	selecting := c.selecting(places)
	for i, at := range places {
		s, err := c.subject(at, selecting[i])
		if err != nil {
			return Tables{}, fmt.Errorf("policies of tenant %s: %w", tenant, err)
		}
		c.tables.Subjects[c.appAt(at)] = s
	}
	c.tables.Peers = make(map[PeerKey]Peer, len(c.rows))
	for _, r := range c.rows {
		c.tables.Peers[r.key] = r.peer
	}
	return c.tables, nil
}

// Names returns the names of a tenant's rules by the numbers that Compile gives them, also of rules that no app needs.
func Names(tenant string, policies []Policy) (map[uint32]RuleName, error) {
	c, err := newCompiler(tenant, policies, NewIndex(nil))
	if err != nil {
		return nil, err
	}
	for i, p := range c.policies {
		for _, d := range directions {
			if p.Isolates[d] {
				c.number(place{i, d, Isolation})
			}
			for rule := range p.Rules[d] {
				c.number(place{i, d, rule})
			}
		}
	}
	return c.tables.Names, nil
}

// compiler is one run of Compile.
type compiler struct {
	tenant   string
	policies []*Policy // in the order of evaluation
	index    *Index
	numbers  numbers
	peers    map[place]appSet // cache: the apps that a rule's peers select by labels
	most     int              // limit of the entries of a map
	tables   Tables
	rows     []peerRow       // entries for the map of peers, the largest map
	sets     map[string]ID   // by inputs (see inputsKey)
	ports    map[[32]byte]ID // by a hash of their matches
	key      []byte          // buffer for the inputs of the current table
	sums     map[ID][32]byte // the full hashes of the IDs in use
}

func newCompiler(tenant string, policies []Policy, ix *Index) (*compiler, error) {
	if len(policies) > MaxPolicies {
		return nil, fmt.Errorf(
			"tenant %s has %s, more than %s",
			tenant,
			humanize.Of(len(policies), "policy", "policies"),
			humanize.Grouped(MaxPolicies),
		)
	}
	for _, app := range ix.apps {
		if app == Outside || app >= address.FirstReservedApp {
			return nil, fmt.Errorf("tenant %s: %d is not the number of an app", tenant, app)
		}
	}
	c := &compiler{tenant: tenant, index: ix, peers: map[place]appSet{}, most: maxEntries}
	c.clear()
	for i := range policies {
		c.policies = append(c.policies, &policies[i])
	}
	slices.SortStableFunc(c.policies, func(a, b *Policy) int {
		return cmp.Or(
			cmp.Compare(a.Tier, b.Tier),
			cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name),
		)
	})
	called := make(map[string]bool, len(policies))
	for _, p := range c.policies {
		name := p.String()
		if called[name] {
			return nil, fmt.Errorf("tenant %s has %s twice", tenant, name)
		}
		called[name] = true
	}
	c.numbers = number(tenant, c.policies)
	return c, nil
}

// clear empties the tables of the run.
func (c *compiler) clear() {
	c.rows, c.sets, c.ports, c.sums = nil, map[string]ID{}, map[[32]byte]ID{}, map[ID][32]byte{}
	c.tables = Tables{
		Subjects: map[address.AppID]Subject{}, Blocks: map[BlockKey]ID{},
		Ports: map[PortKey]PortEntry{}, Ranges: map[RangeKey]Verdict{}, Names: map[uint32]RuleName{},
	}
}

// selecting returns, for the app at each place, the policies that select it.
func (c *compiler) selecting(places []int) []selection {
	of := make([]selection, len(places))
	for i, p := range c.policies {
		subject := c.index.selected(p.Subject)
		for j, at := range places {
			if subject.has(at) {
				of[j].add(i, p)
			}
		}
	}
	return of
}

func (c *compiler) appAt(i int) address.AppID {
	switch i {
	case c.index.unknown():
		return AnyApp
	case c.index.outside():
		return Outside
	}
	return c.index.apps[i]
}

type peerRow struct {
	key  PeerKey
	peer Peer
}

// selection holds the policies that select one subject and apply to a direction.
type selection [2]struct{ enforced, all []int }

func (s *selection) add(i int, p *Policy) {
	for _, d := range directions {
		if p.touches(d) {
			s[d].all = append(s[d].all, i)
			if !p.Audit {
				s[d].enforced = append(s[d].enforced, i)
			}
		}
	}
}

func (c *compiler) subject(at int, selecting selection) (s Subject, err error) {
	for _, d := range directions {
		enforced, all := selecting[d].enforced, selecting[d].all
		if s.Sets[d], err = c.set(d, enforced, at); err != nil {
			return s, err
		}
		if len(all) == len(enforced) {
			continue
		}
		if s.Audit[d], err = c.set(d, all, at); err != nil {
			return s, err
		}
		if s.Audit[d] == s.Sets[d] {
			s.Audit[d] = 0
		}
	}
	return s, nil
}

// setMatches is what build makes a set from.
type setMatches struct {
	pods     []podMatch
	blocks   []blockMatch
	isolated uint32 // the step of the NetworkPolicy tier for packets that no policy accepts
}

// collect gathers the matches of policies for one subject.
func (c *compiler) collect(d Direction, policies []int, at int) (m setMatches, err error) {
	var ranks [3]int
	for _, i := range policies {
		p := c.policies[i]
		if p.Isolates[d] && m.isolated == 0 {
			m.isolated = step(Deny, c.number(place{i, d, Isolation}))
		}
		for j := range p.Rules[d] {
			rule, where := &p.Rules[d][j], place{i, d, j}
			rank := ranks[p.Tier]
			if ranks[p.Tier]++; rank > maxRank && p.Tier != NetworkPolicy {
				return m, fmt.Errorf(
					"more than %s of ClusterNetworkPolicies select one app in %s: select fewer apps by them",
					humanize.Of(maxRank+1, "rule", "rules"),
					d,
				)
			}
			var v Verdict
			v.Tiers[p.Tier] = step(rule.Action, c.number(where))
			if p.Tier != NetworkPolicy {
				v.Rank[rankOf(p.Tier)] = uint16(rank)
			}
			pods, blocks := c.index.matches(rule, d, v, c.matched(rule, where), at)
			m.pods, m.blocks = append(m.pods, pods...), append(m.blocks, blocks...)
		}
	}
	return m, nil
}

// matched returns the apps that a rule's peers select by labels. It ignores the rule's ports.
func (c *compiler) matched(r *Rule, where place) appSet {
	if r.Everyone {
		return c.index.everyone
	}
	those, ok := c.peers[where]
	if !ok {
		those = c.index.empty()
		for _, p := range r.Pods {
			those.or(c.index.selected(p))
		}
		c.peers[where] = those
	}
	return those
}

// number returns the number of a rule, and enters the rule's name into the tables.
func (c *compiler) number(at place) uint32 {
	n := c.numbers.at(at)
	if _, named := c.tables.Names[n]; !named {
		p := c.policies[at.policy]
		name := RuleName{Policy: p.String(), Direction: at.direction, Rule: at.rule, Audit: p.Audit}
		if at.rule != Isolation {
			name.Name = p.Rules[at.direction][at.rule].Name
		}
		c.tables.Names[n] = name
	}
	return n
}

// place identifies a rule: its policy in the order of evaluation, its direction, and its index in the policy.
type place struct {
	policy    int
	direction Direction
	rule      int // or Isolation
}

// numbers holds the numbers of a tenant's rules, by policy and direction. The number for Isolation comes first.
type numbers [][2][]uint32

func (n numbers) at(p place) uint32 { return n[p.policy][p.direction][p.rule-Isolation] }

// number gives each rule its number: bits of a hash of its policy, direction and index. So a rule keeps its number when
// other policies are added or removed. A rule in audit has another number than without audit, because its counter has
// another meaning. If two rules would get the same number, the later rule gets the next free number.
func number(tenant string, policies []*Policy) (n numbers) {
	taken := make(map[uint32]struct{}, 4*len(policies))
	var text []byte
	for _, p := range policies {
		kind := "rule\x00"
		if p.Audit {
			kind = "audited\x00"
		}
		text = append(text[:0], kind+tenant+"\x00"+p.String()+"\x00"...)
		var of [2][]uint32
		for _, d := range directions {
			if !p.touches(d) {
				continue
			}
			for rule := Isolation; rule < len(p.Rules[d]); rule++ {
				sum := sha256.Sum256(binary.BigEndian.AppendUint32(append(text, byte(d)), uint32(int32(rule))))
				of[d] = append(of[d], free(taken, binary.BigEndian.Uint32(sum[:])>>(32-numberBits)))
			}
		}
		n = append(n, of)
	}
	return n
}

// free returns the first number from n on that is not taken, and marks it as taken.
func free(taken map[uint32]struct{}, n uint32) uint32 {
	for _, is := taken[n]; n == 0 || is; _, is = taken[n] {
		n = (n + 1) & (1<<numberBits - 1)
	}
	taken[n] = struct{}{}
	return n
}
