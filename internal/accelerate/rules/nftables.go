package rules

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// chainName identifies a chain, or with another last field a set, of nftables.
type chainName struct {
	family      byte
	table, name string
}

func (c chainName) String() string {
	family := map[byte]string{
		unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_ARP: "arp",
		unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge",
	}[c.family]
	return fmt.Sprintf("table %s %s, chain %s", family, c.table, c.name)
}

type rule struct {
	chain       chainName
	handle      uint64
	expressions []expression
}

// ruleset is what the kernel's dumps say.
type ruleset struct {
	bases []chainName // base chains that IP packets meet, of another type than nat
	rules map[chainName][]rule
	maps  map[chainName][]string // verdict maps, with the chains that their elements name
	// stateful are sets whose elements have an expression with state, such as a limit, which a lookup evaluates.
	stateful map[chainName]string
}

func readNftables(marks uint32) (r Report, err error) {
	s, err := netns.List(dumpRuleset)
	if err != nil {
		return r, err
	}
	reached := s.reached()
	for chain, rules := range s.rules {
		for _, one := range rules {
			r.Tracks = r.Tracks || one.tracks()
			if why := one.unsafe(marks, s.stateful); why != "" && reached[chain] {
				r.Unsafe = append(r.Unsafe, fmt.Sprintf("nftables %v, rule with handle %d: %s", chain, one.handle, why))
			}
		}
	}
	slices.Sort(r.Unsafe)
	return r, nil
}

// reached returns the chains that packets after the first one of a connection can reach.
func (s ruleset) reached() map[chainName]bool {
	reached, queue := map[chainName]bool{}, slices.Clone(s.bases)
	for len(queue) > 0 {
		chain := queue[0]
		queue = queue[1:]
		if reached[chain] {
			continue
		}
		reached[chain] = true
		for _, r := range s.rules[chain] {
			for _, e := range r.expressions {
				for _, name := range e.jumps(s.maps, chain) {
					queue = append(queue, chainName{chain.family, chain.table, name})
				}
			}
		}
	}
	return reached
}

// dumpRuleset reads chains, rules and the elements of sets.
func dumpRuleset() (s ruleset, err error) {
	s = ruleset{rules: map[chainName][]rule{}, maps: map[chainName][]string{}, stateful: map[chainName]string{}}
	err = dump(unix.NFT_MSG_GETCHAIN, nil, func(family byte, a attributes) error {
		_, base := a[unix.NFTA_CHAIN_HOOK]
		if base && a.text(unix.NFTA_CHAIN_TYPE) != "nat" && family != unix.NFPROTO_ARP {
			s.bases = append(s.bases, chainName{family, a.text(unix.NFTA_CHAIN_TABLE), a.text(unix.NFTA_CHAIN_NAME)})
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	err = dump(unix.NFT_MSG_GETRULE, nil, func(family byte, a attributes) error {
		chain := chainName{family, a.text(unix.NFTA_RULE_TABLE), a.text(unix.NFTA_RULE_CHAIN)}
		r := rule{chain: chain, handle: a.number(unix.NFTA_RULE_HANDLE)}
		list, err := nl.ParseRouteAttr(a[unix.NFTA_RULE_EXPRESSIONS])
		for _, one := range list {
			e, err := parseExpression(one.Value)
			if err != nil {
				return err
			}
			r.expressions = append(r.expressions, e)
		}
		s.rules[chain] = append(s.rules[chain], r)
		return err
	})
	if err != nil {
		return s, err
	}
	return s, s.dumpSets()
}

// NFTA_SET_ELEM_EXPRESSIONS, the list form of NFTA_SET_ELEM_EXPR.
const elementExpressions = 11

func (s ruleset) dumpSets() error {
	var names []chainName
	err := dump(unix.NFT_MSG_GETSET, nil, func(family byte, a attributes) error {
		names = append(names, chainName{family, a.text(unix.NFTA_SET_TABLE), a.text(unix.NFTA_SET_NAME)})
		return nil
	})
	if err != nil {
		return err
	}
	for _, set := range names {
		err := dump(unix.NFT_MSG_GETSETELEM, &set, func(_ byte, a attributes) error {
			elements, err := nl.ParseRouteAttr(a[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
			for _, one := range elements {
				if err := s.element(set, one.Value); err != nil {
					return err
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s ruleset) element(set chainName, b []byte) error {
	a, err := parse(b)
	if err != nil {
		return err
	}
	if chain := verdictChain(a[unix.NFTA_SET_ELEM_DATA]); chain != "" {
		s.maps[set] = append(s.maps[set], chain)
	}
	var expressions [][]byte
	if one, ok := a[unix.NFTA_SET_ELEM_EXPR]; ok {
		expressions = append(expressions, one)
	}
	list, err := nl.ParseRouteAttr(a[elementExpressions])
	for _, one := range list {
		expressions = append(expressions, one.Value)
	}
	for _, one := range expressions {
		e, err := parseExpression(one)
		if err != nil {
			return err
		}
		if e.name != "counter" && e.name != "last" {
			s.stateful[set] = e.name
		}
	}
	return err
}

// dump calls do with the attributes of each object of the kind that the message asks for; of one set if it is not nil.
func dump(message int, set *chainName, do func(family byte, a attributes) error) error {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP)
	header := &nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC}
	req.AddData(header)
	if set != nil {
		header.NfgenFamily = set.family
		req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(set.table)))
		req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set.name)))
	}
	all, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return err
	}
	for _, one := range all {
		if len(one) < nl.SizeofNfgenmsg {
			return fmt.Errorf("a message of %d bytes", len(one))
		}
		a, err := parse(one[nl.SizeofNfgenmsg:])
		if err != nil {
			return err
		}
		if err := do(one[0], a); err != nil {
			return err
		}
	}
	return nil
}

// attributes are netlink attributes by type.
type attributes map[uint16][]byte

func parse(b []byte) (attributes, error) {
	list, err := nl.ParseRouteAttr(b)
	a := attributes{}
	for _, one := range list {
		a[one.Attr.Type&nl.NLA_TYPE_MASK] = one.Value
	}
	return a, err
}

func (a attributes) text(key uint16) string { return string(bytes.TrimRight(a[key], "\x00")) }

// number returns a big-endian number of 1 to 8 bytes; 0 if there is none.
func (a attributes) number(key uint16) uint64 {
	var full [8]byte
	v := a[key]
	copy(full[8-min(len(v), 8):], v)
	return binary.BigEndian.Uint64(full[:])
}

// verdictChain returns the chain of a verdict that jumps.
func verdictChain(data []byte) string {
	a, err := parse(data)
	if err != nil {
		return ""
	}
	verdict, err := parse(a[unix.NFTA_DATA_VERDICT])
	if err != nil {
		return ""
	}
	return verdict.text(unix.NFTA_VERDICT_CHAIN)
}
