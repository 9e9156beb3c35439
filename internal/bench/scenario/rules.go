package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// RuleCounts are the numbers of rules for the measurement of policies and netfilter (NZ10, CI1).
var RuleCounts = []int{1, 100, 1000, 10_000}

// RuleScenarios have the same rules in two forms: a NetworkPolicy on netpila, and netfilter rules in front of a routed
// container. Each rule admits peers of one /64 to the server; the last rule admits the client.
func RuleScenarios() (all []Scenario) {
	for _, n := range RuleCounts {
		all = append(all, Scenario{
			Name: fmt.Sprint(
				"netpila-rules-",
				n,
			), Of: "netpila", About: "netpila under a NetworkPolicy of " + rulesOf(n),
			Build: netpila(Variant{rules: n}),
		})
	}
	for _, n := range RuleCounts {
		all = append(all, Scenario{
			Name: fmt.Sprint(
				"route-rules-",
				n,
			), Of: "route", About: "route with connection tracking and, on the server's node, the same rules of " +
				"netfilter: " + rulesOf(n),
			Build: func(w *Wire) (Pair, error) {
				p, err := route(w)
				if err != nil {
					return p, err
				}
				return p, w.Nodes[1].netfilter(RuleBlocks(n, w.Nodes[0].Prefix))
			},
		})
	}
	return all
}

func rulesOf(n int) string {
	if n == 1 {
		return "one rule, which admits the client"
	}
	return humanize.Grouped(n) + " rules, the last of which admits the client"
}

// RuleBlocks returns n prefixes of length 64. The last element is last.
func RuleBlocks(n int, last netip.Prefix) (all []netip.Prefix) {
	for i := range n - 1 {
		all = append(
			all,
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0x72, 0, byte(i >> 8), byte(i)}), 64),
		)
	}
	return append(all, last)
}

// RulePolicy returns a policy with one rule for each prefix. Each rule admits all connections from its prefix.
func RulePolicy(blocks []netip.Prefix) policy.Policy {
	p := policy.Policy{
		Tier:      policy.NetworkPolicy,
		Namespace: tenant.DefaultNamespace,
		Name:      "bench",
		Isolates:  [2]bool{policy.Ingress: true},
	}
	for _, b := range blocks {
		p.Rules[policy.Ingress] = append(
			p.Rules[policy.Ingress],
			policy.Rule{Action: policy.Accept, Blocks: []policy.Block{{Prefix: b}}},
		)
	}
	return p
}

// ApplyPolicy enforces a policy for the containers of a tenant ID, as an agent does. It checks that the tables have all
// rules and that the last rule admits the peer.
func ApplyPolicy(
	d *datapath.Datapath,
	id address.TenantID,
	p policy.Policy,
	apps map[address.AppID]map[string]string,
	local, remote netip.Addr,
) error {
	const app = 1 // app of all containers of the benchmark
	tables, err := policy.Compile("bench", []policy.Policy{p}, apps, []address.AppID{app})
	if err != nil {
		return err
	}
	if err := d.SetPolicies(dpapi.TenantPolicies{Tenant: "bench", IDs: []address.TenantID{id},
		Tables: tables}); err != nil {
		return err
	}
	rules := len(p.Rules[policy.Ingress])
	if hits, err := d.RuleHits(); err != nil || len(hits) < rules { // RuleHits has an entry for every rule
		return errors.Join(err, fmt.Errorf("the tables have %d of %d rules", len(hits), rules))
	}
	a, err := d.LookupPolicy(
		dpapi.PolicyQuery{
			Tenant:     id,
			Local:      local,
			Remote:     remote,
			LocalApp:   app,
			RemoteApp:  app,
			Protocol:   policy.TCP,
			LocalPort:  80,
			RemotePort: 40_000,
		},
	)
	if err != nil {
		return err
	}
	if by := tables.Names[a.Rules[policy.Ingress]]; !a.Allowed[policy.Ingress] || by.Rule != rules-1 {
		return fmt.Errorf(
			"%v → %v is decided by %v (allowed: %v), want the last of %d rules",
			remote,
			local,
			by,
			a.Allowed[policy.Ingress],
			rules,
		)
	}
	return nil
}

// rulesAtOnce is the number of rules in one netlink message.
const rulesAtOnce = 50

// netfilter makes this node drop forwarded packets, except packets of established connections and packets from the
// given prefixes. It adds one rule per prefix.
func (n *Node) netfilter(sources []netip.Prefix) error {
	nft, err := nftables.New(nftables.WithNetNSFd(n.NS.FD()))
	if err != nil {
		return fmt.Errorf("netfilter in %s: %w", n.name, err)
	}
	drop := nftables.ChainPolicyDrop
	table := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv6, Name: "bench"})
	chain := nft.AddChain(&nftables.Chain{
		Name: "forward", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{
			SourceRegister: 1,
			DestRegister:   1,
			Len:            4,
			Mask:           binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED),
			Xor:            make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		accept,
	}})
	for some := range slices.Chunk(sources, rulesAtOnce) {
		for _, p := range some {
			nft.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
				&expr.Payload{
					Base:         expr.PayloadBaseNetworkHeader,
					Offset:       sourceOffset,
					Len:          uint32(p.Bits() / 8),
					DestRegister: 1,
				},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()[:p.Bits()/8]},
				accept,
			}})
		}
		if err := nft.Flush(); err != nil {
			return fmt.Errorf("netfilter in %s: %w", n.name, err)
		}
	}
	has, err := nft.GetRules(table, chain)
	if err == nil && len(has) != 1+len(sources) {
		err = fmt.Errorf("got %d of %d rules", len(has), 1+len(sources))
	}
	if err != nil {
		return fmt.Errorf("netfilter in %s: %w", n.name, err)
	}
	return nil
}

// sourceOffset is the offset of the source address in an IPv6 header.
const sourceOffset = 8
