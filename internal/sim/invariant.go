package sim

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// maxListed limits the listed violations of each kind.
const maxListed = 5

// violations collects violated invariants.
type violations struct {
	all  []string
	seen map[string]int // number of violations by kind
}

func (v *violations) add(kind, format string, args ...any) {
	if v.seen == nil {
		v.seen = map[string]int{}
	}
	if v.seen[kind]++; v.seen[kind] <= maxListed {
		v.all = append(v.all, kind+": "+fmt.Sprintf(format, args...))
	}
}

func (v *violations) list() []string {
	for kind, n := range v.seen {
		if n > maxListed {
			v.all = append(v.all, fmt.Sprintf("%s: %d more", kind, n-maxListed))
		}
	}
	slices.Sort(v.all)
	return v.all
}

// held is an address of a container, and the scope in which it must be unique.
type held struct {
	scope uint32 // tenant, from 1; 0 if the scope is all tenants
	addr  [16]byte
	node  int32
}

func (h held) compare(o held) int {
	if h.scope != o.scope {
		return int(h.scope) - int(o.scope)
	}
	return bytes.Compare(h.addr[:], o.addr[:])
}

// known is the agents' view of the cluster, for comparison with the orchestrator's view.
type known struct {
	prefixes map[netip.Prefix]string    // node by prefix
	hosts    map[string]map[string]bool // set of hosting nodes by tenant
	sum      string                     // digest of all addresses and their nodes
}

const (
	settleTime = 30 * time.Second       // for updates to reach the orchestrator and other nodes
	lookEvery  = 200 * time.Millisecond // interval of checks; with very many nodes a check takes longer
)

// sumOf returns a digest of all addresses with their nodes, to compare runs.
func sumOf(sorted []held) string {
	sum := sha256.New()
	for _, h := range sorted {
		var at [8]byte
		binary.BigEndian.PutUint32(at[:], h.scope)
		binary.BigEndian.PutUint32(at[4:], uint32(h.node))
		sum.Write(append(h.addr[:], at[:]...))
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// check compares the agents, their packet paths and the orchestrator's view of the agents with each other, while no
// event runs. The agents have completed their work; only updates about this work may still be in transit.
func (w *world) check(ctx context.Context) ([]string, error) {
	var agents violations
	has := w.checkAgents(&agents)
	w.sum = has.sum
	for end := time.Now().Add(w.patience); ; {
		var central violations
		err := w.checkKnown(ctx, &central, has)
		w.checkPolicies(&central)
		w.checkServices(&central)
		if tenant.NetworkHas(w.scenario.Network, tenant.Mappings) {
			w.checkMappings(&central)
		}
		if err != nil || len(agents.all) > 0 || len(central.all) == 0 || time.Now().After(end) {
			return append(agents.list(), central.list()...), err
		}
		if err := pause(ctx, lookEvery); err != nil {
			return nil, err
		}
	}
}

func (w *world) checkAgents(v *violations) known {
	tenants := map[string]uint32{}
	for i, name := range w.tenants {
		tenants[name] = uint32(i + 1)
	}
	var addrs []held
	prefixes := map[netip.Prefix]string{}
	hosts := map[string]map[string]bool{}
	for _, n := range w.nodes {
		m, _ := n.who.Membership()
		if other, taken := prefixes[m.Prefix]; taken {
			v.add("one prefix for two nodes", "%v belongs to %s and %s", m.Prefix, other, n.name)
		}
		prefixes[m.Prefix] = n.name
		records := n.store.List()
		n.checkRecords(v, m.Prefix, records)
		for _, r := range records {
			if hosts[r.Tenant] == nil {
				hosts[r.Tenant] = map[string]bool{}
			}
			hosts[r.Tenant][n.name] = true
			for _, a := range r.Attachments {
				addrs = append(addrs, held{tenants[r.Tenant], a.Address.As16(), int32(n.number)})
				if a.Plaintext.IsValid() && a.Plaintext != a.Address {
					addrs = append(addrs, held{0, a.Plaintext.As16(), int32(n.number)})
				}
			}
		}
	}
	slices.SortFunc(addrs, held.compare)
	for i := 1; i < len(addrs); i++ {
		if a, b := addrs[i-1], addrs[i]; a.compare(b) == 0 {
			v.add("one address for two containers", "%v is on n%d and n%d", netip.AddrFrom16(a.addr), a.node, b.node)
		}
	}
	return known{prefixes, hosts, sumOf(addrs)}
}

// checkRecords compares a node's records with its containers and with its packet path.
func (n *node) checkRecords(v *violations, own netip.Prefix, records []endpoint.Record) {
	runs := map[string]bool{}
	for _, c := range n.running {
		runs[c.id] = true
	}
	if len(records) != len(n.running) {
		v.add(
			"records do not match the containers",
			"%s has %d containers and %d records",
			n.name,
			len(n.running),
			len(records),
		)
	}
	n.driver.mu.Lock()
	defer n.driver.mu.Unlock()
	n.counted.mu.Lock()
	defer n.counted.mu.Unlock()
	n.mapped.mu.Lock()
	defer n.mapped.mu.Unlock()
	want := 0
	for _, r := range records {
		want += len(r.Attachments)
	}
	endpoints, addresses := n.active()
	if d := n.driver.attached.count(); d != len(records) || n.driver.devices.count() != d || endpoints != d ||
		addresses != want {
		v.add(
			"the packet path does not match the records",
			"%s has %d records with %d addresses, %d devices, and entries of %d endpoints with %d addresses",
			n.name,
			len(records),
			want,
			d,
			endpoints,
			addresses,
		)
	}
	for _, r := range records {
		if r.State != endpoint.Active || !runs[r.ContainerID] {
			v.add(
				"records do not match the containers",
				"endpoint %d of %s has state %s, container %.12s",
				r.ID,
				n.name,
				r.State,
				r.ContainerID,
			)
		}
		if has, known := n.has(r); !known {
			v.add(
				"the packet path lacks a tenant",
				"%s has endpoint %d of tenant %s, id %d, which its packet path lacks",
				n.name,
				r.ID,
				r.Tenant,
				r.TenantID,
			)
		} else if !has || !n.driver.attached.has(int(r.ID)) {
			v.add(
				"the packet path does not match the records",
				"endpoint %d of %s has no program or no entries", r.ID, n.name,
			)
		}
		for _, a := range r.Attachments {
			if p := address.Split(a.Plaintext); a.Plaintext.IsValid() &&
				(p.Node != own || p.Tenant != r.TenantID || p.App != r.App) {
				v.add(
					"an address encodes another endpoint",
					"%v of endpoint %d of %s, %v", a.Plaintext, r.ID, n.name, own,
				)
			}
		}
	}
}

// active returns the number of endpoints with entries and of their addresses. The caller holds the locks.
func (n *node) active() (endpoints, addresses int) {
	endpoints, addresses = n.counted.endpoints.ids.count(), n.counted.endpoints.addresses
	for _, f := range n.mapped.tenants {
		endpoints, addresses = endpoints+f.endpoints.ids.count(), addresses+f.endpoints.addresses
	}
	return endpoints, addresses
}

// has reports whether the packet path has entries of an endpoint, and whether it has the endpoint's tenant.
func (n *node) has(r endpoint.Record) (has, known bool) {
	if f := n.mapped.tenants[r.Tenant]; f != nil {
		return f.endpoints.ids.has(int(r.ID)), true
	}
	_, known = n.counted.ids[r.TenantID]
	return n.counted.endpoints.ids.has(int(r.ID)), known
}

// checkMappings compares the mappings of nodes with the actual placement.
func (w *world) checkMappings(v *violations) {
	live := map[string]*placed{}
	for _, n := range w.nodes {
		for _, r := range n.store.List() {
			for _, a := range r.Attachments {
				if a.Plaintext.IsValid() {
					continue
				}
				to := a.Subnet
				if !to.IsValid() {
					to = netip.PrefixFrom(a.Address, a.Address.BitLen())
				}
				if live[r.Tenant] == nil {
					live[r.Tenant] = &placed{owner: map[int]*node{}, of: map[*node][]int{}}
				}
				if other := live[r.Tenant].put(w.numbers.number(r.Tenant, to), n); other != n {
					v.add(
						"one subnet for two nodes",
						"%v of tenant %s is on %s and %s",
						to,
						r.Tenant,
						other.name,
						n.name,
					)
				}
			}
		}
	}
	for _, n := range w.nodes {
		n.mapped.mu.Lock()
		if w.scenario.ActivePeers > 0 {
			n.checkPulled(v, live)
			n.mapped.mu.Unlock()
			continue
		}
		for name, f := range n.mapped.tenants {
			there := cmp.Or(live[name], new(placed))
			if want, is := there.elsewhere(n, f.remote); !is {
				v.add(
					"a node lacks mappings of a tenant",
					"%s has mappings for %d subnets or addresses of tenant %s on other nodes, want %d",
					n.name,
					f.remote.count(),
					name,
					want,
				)
			}
		}
		n.mapped.mu.Unlock()
	}
}

// placed maps a tenant's subnets or addresses, by number, to nodes.
type placed struct {
	all   bitset
	owner map[int]*node
	of    map[*node][]int
}

// put records a number on a node, and returns the number's first node.
func (p *placed) put(at int, n *node) *node {
	if p.all.has(at) {
		return p.owner[at]
	}
	p.all.set(at, true)
	p.owner[at], p.of[n] = n, append(p.of[n], at)
	return n
}

// elsewhere counts the numbers on other nodes, and reports whether the node has mappings for exactly those.
func (p *placed) elsewhere(n *node, known bitset) (want int, are bool) {
	own := p.of[n]
	want = len(p.owner) - len(own)
	are = known.count() == want && p.all.without(known).count() == len(own)
	for _, at := range own {
		are = are && !known.has(at)
	}
	return want, are
}

// checkKnown compares the orchestrator's nodes and hosting nodes of tenants with the agents' view.
func (w *world) checkKnown(ctx context.Context, v *violations, has known) error {
	nodes, err := w.operator.ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil {
		return err
	}
	if n := len(nodes.Msg.Nodes); n != len(w.nodes) {
		v.add("the orchestrator's nodes are wrong", "%d nodes, want %d", n, len(w.nodes))
	}
	for _, listed := range nodes.Msg.Nodes {
		prefix, _ := netip.ParsePrefix(listed.Prefix)
		if has.prefixes[prefix] != listed.Name || !listed.Connected {
			v.add(
				"the orchestrator's nodes are wrong",
				"%s with %v (connected: %v), and the agent with that prefix is %q",
				listed.Name,
				listed.Prefix,
				listed.Connected,
				has.prefixes[prefix],
			)
		}
	}
	for _, name := range w.tenants {
		got, err := w.operator.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
		if err != nil {
			return err
		}
		if n := len(got.Msg.Hosting); n != len(has.hosts[name]) {
			v.add(
				"the orchestrator's hosting nodes are wrong",
				"%d nodes host tenant %s, want %d",
				n,
				name,
				len(has.hosts[name]),
			)
		}
		for _, h := range got.Msg.Hosting {
			if !has.hosts[name][h.Node] {
				v.add("the orchestrator's hosting nodes are wrong", "%s of tenant %s", h.Node, name)
			}
		}
	}
	return nil
}

// entries counts the entries of each table of the packet paths.
func (w *world) entries(ctx context.Context) (all []Entries, err error) {
	for i, n := range w.nodes {
		tables, err := n.core.Networks().Entries(ctx)
		if err != nil {
			return nil, err
		}
		for j, t := range tables {
			if i == 0 {
				all = append(all, Entries{Table: t.Table, Least: t.Used})
			}
			e := &all[j]
			e.Least, e.Most = min(e.Least, t.Used), max(e.Most, t.Used)
			e.Mean += float64(t.Used) / float64(len(w.nodes))
		}
	}
	return all, nil
}
