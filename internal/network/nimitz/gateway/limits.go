package gateway

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dropreason"
)

// MostConnections limits a container's concurrent connections to services. All containers share the gateway's conntrack
// table and, for each service, its ports.
const MostConnections = 4096

// The table of limits is separate, so that it stays with its counters when the rules are replaced. A build that changes
// the rule or the limit also changes the number in the name: its table then replaces those of other builds.
const (
	limits      = "pilaster-limits"
	limitsName  = limits + "-1"
	connections = "connections"
	refused     = "refused"
)

const (
	confirmed     = 1 << 3 // IPS_CONFIRMED
	invert        = 1      // NFT_CONNLIMIT_F_INV
	counterObject = 1      // NFT_OBJECT_COUNTER
	mostSources   = 1 << 16
)

// limit adds the rule that drops connections of a virtual address beyond its limit, and deletes the limits of other
// builds in the same transaction. It comes after the rules that decide who may open connections at all.
func (g *Gateway) limit(there []*nftables.Table) error {
	nft, err := g.open()
	if err != nil {
		return err
	}
	limited := false
	for _, t := range there {
		if t.Name == limitsName {
			limited = true
		} else if strings.HasPrefix(t.Name, limits) {
			nft.DelTable(t)
		}
	}
	if !limited {
		if err := addLimit(nft); err != nil {
			return fmt.Errorf("create a set of connections by source: %w", err)
		}
	}
	if err := nft.Flush(); err != nil {
		return fmt.Errorf(
			"limit the gateway's connections by source: %w; the kernel needs nftables that count connections "+
				"(CONFIG_NFT_CONNLIMIT)",
			err,
		)
	}
	return nil
}

func addLimit(nft *nftables.Conn) error {
	table := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv6, Name: limitsName})
	nft.AddObj(&nftables.CounterObj{Table: table, Name: refused})
	sources := &nftables.Set{
		Table:   table,
		Name:    connections,
		KeyType: nftables.TypeIP6Addr,
		Dynamic: true,
		Size:    mostSources,
	}
	if err := nft.AddSet(sources, nil); err != nil {
		return err
	}
	behind := *nftables.ChainPriorityFilter + 10
	chain := nft.AddChain(
		&nftables.Chain{
			Table:    table,
			Name:     "through",
			Type:     nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookForward,
			Priority: &behind,
		},
	)
	// Only a connection's first packet is not confirmed yet. Matching the state NEW would count every packet of a flow
	// without replies.
	rule := append(from(overlay), conntrack(expr.CtKeySTATUS, confirmed, expr.CmpOpEq)...)
	nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(append(rule, load(source)...),
		&expr.Dynset{SrcRegKey: register, SetName: sources.Name, SetID: sources.ID, Operation: unix.NFT_DYNSET_OP_ADD,
			Exprs: []expr.Any{&expr.Connlimit{Count: MostConnections, Flags: invert}}},
		&expr.Objref{Type: counterObject, Name: refused},
		&expr.Verdict{Kind: expr.VerdictDrop},
	)})
	return nil
}

// Drops returns the packets dropped since the limits were created.
func (g *Gateway) Drops(context.Context) (map[dropreason.Reason]uint64, error) {
	nft, err := g.open()
	if err != nil {
		return nil, err
	}
	got, err := nft.GetObject(
		&nftables.CounterObj{Table: &nftables.Table{Family: nftables.TableFamilyIPv6, Name: limitsName}, Name: refused},
	)
	if err != nil {
		return nil, fmt.Errorf(
			"read how much the gateway has dropped: %w; restart the agent, which repairs the rules",
			err,
		)
	}
	count, ok := got.(*nftables.CounterObj)
	if !ok {
		return nil, fmt.Errorf("read how much the gateway has dropped: %T is no counter", got)
	}
	return map[dropreason.Reason]uint64{dropreason.ConnectionLimit: count.Packets}, nil
}
