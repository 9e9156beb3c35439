package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The table that translates, and its map of published addresses.
const (
	tableName = "pilaster"
	published = "published"
)

// elementsAtOnce is how many elements of a map fit into one netlink message, whose length has 16 bits.
const elementsAtOnce = 512

// Offsets in an IPv6 header, and a register that holds an address.
const (
	source      = 8
	destination = 24
	register    = 1
)

// Publish makes exactly the given containers reachable: each underlay address leads to the container with the virtual
// address. The rules change in one transaction. Existing connections are unaffected.
func (g *Gateway) Publish(_ context.Context, virtual map[netip.Addr]netip.Addr) error {
	var elements []nftables.SetElement
	for _, at := range slices.SortedFunc(maps.Keys(virtual), netip.Addr.Compare) {
		elements = append(elements, nftables.SetElement{Key: at.AsSlice(), Val: virtual[at].AsSlice()})
	}
	return g.replace(elements)
}

// keepRules creates missing tables. Existing tables stay with their counters, and with their publications until
// Publish replaces these.
func (g *Gateway) keepRules() error {
	nft, err := g.open()
	if err != nil {
		return err
	}
	tables, err := nft.ListTablesOfFamily(nftables.TableFamilyIPv6)
	if err != nil {
		return fmt.Errorf("list the gateway's tables: %w", err)
	}
	if err := g.limit(tables); err != nil {
		return err
	}
	if slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName }) {
		return nil
	}
	return g.replace(nil)
}

func (g *Gateway) open() (*nftables.Conn, error) {
	nft, err := nftables.New(nftables.WithNetNSFd(g.ns.FD()))
	if err != nil {
		return nil, fmt.Errorf("nftables: %w; the gateway needs them, with NAT (CONFIG_NFT_NAT), in the kernel", err)
	}
	return nft, nil
}

func (g *Gateway) replace(elements []nftables.SetElement) error {
	nft, err := g.open()
	if err != nil {
		return err
	}
	c := g.config
	table := &nftables.Table{Family: nftables.TableFamilyIPv6, Name: tableName}
	nft.AddTable(table) // so that the deletion finds one
	nft.DelTable(table)
	nft.AddTable(table)
	leads := &nftables.Set{
		Table:    table,
		Name:     published,
		IsMap:    true,
		KeyType:  nftables.TypeIP6Addr,
		DataType: nftables.TypeIP6Addr,
	}
	err = nft.AddSet(leads, nil)
	for some := range slices.Chunk(elements, elementsAtOnce) {
		err = errors.Join(err, nft.SetAddElements(leads, some))
	}
	if err != nil {
		return fmt.Errorf("create the map of published addresses: %w", err)
	}
	add := func(chain *nftables.Chain, parts ...[]expr.Any) {
		nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(parts...)})
	}

	// (d): the destination changes from the published address to the container's virtual one. The source becomes the
	// gateway, so that replies return through it.
	in := nft.AddChain(
		&nftables.Chain{
			Table:    table,
			Name:     "in",
			Type:     nftables.ChainTypeNAT,
			Hooknum:  nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityNATDest,
		},
	)
	add(in, from(underlay), load(destination), []expr.Any{
		&expr.Lookup{
			SourceRegister: register,
			DestRegister:   register,
			IsDestRegSet:   true,
			SetName:        leads.Name,
			SetID:          leads.ID,
		},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV6, RegAddrMin: register},
	})
	out := nft.AddChain(
		&nftables.Chain{
			Table:    table,
			Name:     "out",
			Type:     nftables.ChainTypeNAT,
			Hooknum:  nftables.ChainHookPostrouting,
			Priority: nftables.ChainPriorityNATSource,
		},
	)
	add(out, to(overlay), sourceBecomes(c.Virtual))
	// (c): the source becomes the gateway.
	add(out, to(underlay), sourceBecomes(c.Own))

	drop, accept := nftables.ChainPolicyDrop, []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	through := nft.AddChain(&nftables.Chain{
		Table: table, Name: "through", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	// Any other source was not translated by the switch, so it is no container of this node.
	add(through, from(overlay), to(underlay), load(source), within(c.Block), valid(), accept)
	add(
		through,
		from(underlay),
		to(overlay),
		conntrack(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED, expr.CmpOpNeq),
		accept,
	)
	add(through, from(underlay), to(overlay), conntrack(expr.CtKeySTATUS, destinationTranslated, expr.CmpOpNeq), accept)
	// The gateway's own stack accepts no packets.
	nft.AddChain(&nftables.Chain{
		Table: table, Name: "here", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput,
		Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	if err := nft.Flush(); err != nil {
		return fmt.Errorf("replace the gateway's rules: %w; they are unchanged", err)
	}
	return nil
}

const destinationTranslated = 1 << 5 // IPS_DST_NAT

func from(device string) []expr.Any { return onDevice(expr.MetaKeyIIFNAME, device) }
func to(device string) []expr.Any   { return onDevice(expr.MetaKeyOIFNAME, device) }

func onDevice(key expr.MetaKey, device string) []expr.Any {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, device)
	return []expr.Any{
		&expr.Meta{Key: key, Register: register},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: name},
	}
}

func load(address uint32) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: address, Len: 16},
	}
}

func within(p netip.Prefix) []expr.Any {
	n := ipNet(p)
	return []expr.Any{
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 16, Mask: n.Mask, Xor: make([]byte, 16)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: n.IP},
	}
}

func sourceBecomes(a netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: a.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV6, RegAddrMin: register},
	}
}

// valid matches packets of known and of new connections: only these are translated.
func valid() []expr.Any {
	return conntrack(
		expr.CtKeySTATE,
		expr.CtStateBitNEW|expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED,
		expr.CmpOpNeq,
	)
}

// conntrack matches packets with any of the bits (CmpOpNeq), or with none of them (CmpOpEq).
func conntrack(key expr.CtKey, bits uint32, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: register},
		&expr.Bitwise{
			SourceRegister: register,
			DestRegister:   register,
			Len:            4,
			Mask:           binaryutil.NativeEndian.PutUint32(bits),
			Xor:            make([]byte, 4),
		},
		&expr.Cmp{Op: op, Register: register, Data: make([]byte, 4)},
	}
}
