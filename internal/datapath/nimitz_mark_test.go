package datapath

import (
	"encoding/binary"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TestNimitzMarks: other programs' netfilter rules do not match the marks of our tunnel packets, and tunnels still work
// when these rules set their bits in the marks.
func TestNimitzMarks(t *testing.T) {
	w := newNimitzWire(t)
	near, far := w.add(t, 1, 7, 2), w.add(t, 2, 7, 2)
	for _, n := range w.nodes {
		markAll(t, n.ns)
	}
	for family := range 2 {
		from, to := near.of(family), far.of(family)
		datagram(t, from, to, 100)
		datagram(t, to, from, 100)
		transfer(t, from, to, 1<<20)
	}
	for i, n := range w.nodes {
		got := n.counted(t, nil)
		delete(got, "no-route") // the containers' kernels send to routers
		if len(got) != 0 {
			t.Errorf("node %d dropped %v", i+1, got)
		}
	}
}

// markAll adds rules that masquerade packets with any bit of the mark that is not ours, as kube-proxy does, and rules
// that set all these bits in incoming and outgoing packets.
func markAll(t *testing.T, ns *netns.Namespace) {
	t.Helper()
	const theirs = ^uint32(pipeline.MarkBits)
	word := binary.NativeEndian.AppendUint32
	has := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: word(nil, theirs), Xor: word(nil, 0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: word(nil, 0)},
	}
	set := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: word(nil, ^theirs), Xor: word(nil, theirs)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	}
	nft, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
	must(t, err)
	table := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv6, Name: "others"})
	add := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, at *nftables.ChainPriority,
		rule []expr.Any) {
		chain := nft.AddChain(&nftables.Chain{Table: table, Name: name, Type: kind, Hooknum: hook, Priority: at})
		nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rule})
	}
	add("in", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityFilter, set)
	add(
		"hide",
		nftables.ChainTypeNAT,
		nftables.ChainHookPostrouting,
		nftables.ChainPriorityNATSource,
		append(has, &expr.Masq{}),
	)
	add("out", nftables.ChainTypeFilter, nftables.ChainHookPostrouting, nftables.ChainPriorityLast, set)
	must(t, nft.Flush())
}
