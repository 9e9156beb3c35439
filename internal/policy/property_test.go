package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// TestNames: a rule has one number, whether it is compiled or only named.
func TestNames(t *testing.T) {
	named := 0
	for seed := range uint64(200) {
		d := dice{rand.New(rand.NewPCG(seed, 2))}
		policies, apps := d.policies(), d.apps()
		tables, err := policy.Compile("acme", policies, apps, appsOf(apps))
		if err != nil {
			t.Fatal(err)
		}
		names, err := policy.Names("acme", policies)
		if err != nil {
			t.Fatal(err)
		}
		for number, name := range tables.Names {
			if names[number] != name {
				t.Fatalf("seed %d: rule %d is %v, want %v", seed, number, names[number], name)
			}
		}
		all := map[policy.RuleName]bool{}
		for _, name := range names {
			all[name] = true
		}
		if len(all) != len(names) {
			t.Fatalf("seed %d: %d numbers name %d rules", seed, len(names), len(all))
		}
		named += len(tables.Names)
	}
	if named < 1000 {
		t.Errorf("only %d rules were compiled", named)
	}
}

// TestDecideIsEvaluate: the tables decide as the reference (evaluate) does, in all tiers, in audit, for unknown apps
// and for peers outside. If several rules of NetworkPolicies accept, Decide may name any of these rules.
func TestDecideIsEvaluate(t *testing.T) {
	const sets, packets = 800, 80
	var answers [2]int
	decided, drops := map[policy.Tier]int{}, 0
	for seed := range uint64(sets) {
		d := dice{rand.New(rand.NewPCG(seed, 1))}
		policies, apps := d.policies(), d.apps()
		tables, err := policy.Compile("acme", policies, apps, appsOf(apps))
		if err != nil {
			t.Fatal(err)
		}
		tiers := map[string]policy.Tier{}
		for _, p := range policies {
			tiers[p.String()] = p.Tier
		}
		for range packets {
			got, p := d.ask(tables, apps)
			want, by := evaluate(policies, p, false)
			name := tables.Names[got.Rule]
			several := got.Allowed && tiers[by.Policy] == policy.NetworkPolicy &&
				tiers[name.Policy] == policy.NetworkPolicy
			if got.Allowed != want || name != by && !several {
				t.Fatalf(
					"seed %d: %+v\nallowed %v by %v, want %v by %v\n%+v",
					seed,
					p,
					got.Allowed,
					name,
					want,
					by,
					policies,
				)
			}
			audited, auditedBy := evaluate(policies, p, true)
			drop := want && !audited
			if got.WouldDrop != drop || drop && tables.Names[got.AuditRule] != auditedBy {
				t.Fatalf(
					"seed %d: %+v\nwould drop %v by %v, want %v by %v",
					seed,
					p,
					got.WouldDrop,
					tables.Names[got.AuditRule],
					drop,
					auditedBy,
				)
			}
			if answers[0]++; got.Allowed {
				answers[1]++
			}
			if by.Policy != "" {
				decided[tiers[by.Policy]]++
			}
			if drop {
				drops++
			}
		}
	}
	t.Logf("%d packets, %d allowed; decided by tier: %v; audit would drop %d", answers[0], answers[1], decided, drops)
	if answers[1] < answers[0]/10 || answers[1] > answers[0]*9/10 ||
		min(decided[policy.Admin], decided[policy.NetworkPolicy], decided[policy.Baseline], drops) < 1000 {
		t.Error("something hardly occurs")
	}
}

// TestTablesAreTheSame: the order of policies does not change the tables, and the tables of two tenants have no ID in
// common.
func TestTablesAreTheSame(t *testing.T) {
	for seed := range uint64(50) {
		d := dice{rand.New(rand.NewPCG(seed, 2))}
		policies, apps := d.policies(), d.apps()
		first, err := policy.Compile("acme", policies, apps, appsOf(apps))
		if err != nil {
			t.Fatal(err)
		}
		d.Shuffle(len(policies), func(i, j int) { policies[i], policies[j] = policies[j], policies[i] })
		subjects := appsOf(apps)
		slices.Reverse(subjects)
		again, err := policy.Compile("acme", policies, apps, subjects)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("seed %d: in another order the tables are others", seed)
		}
		other, err := policy.Compile("other", policies, apps, subjects)
		if err != nil {
			t.Fatal(err)
		}
		for key := range other.Peers {
			if _, there := first.Peers[key]; there {
				t.Fatalf("seed %d: set %x is of two tenants", seed, key.Set)
			}
		}
		for key := range other.Ports {
			if _, there := first.Ports[key]; there {
				t.Fatalf("seed %d: table %x is of two tenants", seed, key.Table)
			}
		}
	}
}

// TestAnIDNeverMeansAnotherContent: entries with the same ID are equal, while policies and apps are added and removed.
func TestAnIDNeverMeansAnotherContent(t *testing.T) {
	ports, ranges := map[policy.PortKey]policy.PortEntry{}, map[policy.RangeKey]policy.Verdict{}
	peers, blocks := map[policy.PeerKey]policy.Peer{}, map[policy.BlockKey]policy.ID{}
	shared := 0
	for seed := range uint64(300) {
		d := dice{rand.New(rand.NewPCG(seed/10, 3))} // ten variants of each world, each with some parts left out
		policies, apps := d.policies(), d.apps()
		if n := int(seed % 10); n < len(policies) {
			policies = slices.Delete(policies, n, n+1)
		}
		tables, err := policy.Compile("acme", policies, apps, appsOf(apps))
		if err != nil {
			t.Fatal(err)
		}
		shared += same(
			t,
			ports,
			tables.Ports,
		) + same(
			t,
			ranges,
			tables.Ranges,
		) + same(
			t,
			peers,
			tables.Peers,
		) + same(
			t,
			blocks,
			tables.Blocks,
		)
	}
	if shared == 0 {
		t.Error("no entry was there twice")
	}
}

func same[K comparable, V comparable](t *testing.T, before, now map[K]V) (shared int) {
	t.Helper()
	for k, v := range now {
		if was, ok := before[k]; ok {
			if shared++; was != v {
				t.Fatalf("%+v was %+v and is %+v", k, was, v)
			}
		}
		before[k] = v
	}
	return shared
}

// dice generates random policies, also some that the types of model.go allow and Parse never returns.
type dice struct{ *rand.Rand }

func pick[T any](d dice, from ...T) T { return from[d.IntN(len(from))] }

func (d dice) value() string { return pick(d, "a", "b", "c") }

func (d dice) apps() map[address.AppID]map[string]string {
	apps := map[address.AppID]map[string]string{}
	for i := range 10 {
		labels := map[string]string{"app": d.value(), "n": fmt.Sprint(i)}
		if d.IntN(2) == 0 {
			labels["tier"] = d.value()
		}
		if d.IntN(3) > 0 {
			labels[tenant.NamespaceKey] = d.value()
			labels[tenant.NamespaceLabelKey("team")] = d.value()
		}
		for _, name := range []string{"http", "dns"} {
			if d.IntN(2) == 0 {
				k, v := tenant.NamedPort(name, d.port(), pick(d, "TCP", "UDP"))
				labels[k] = v
			}
		}
		apps[address.AppID(1+3*i)] = labels
	}
	return apps
}

func (d dice) port() uint16 { return pick[uint16](d, 1, 2, 53, 79, 80, 81, 8080, 65534, 65535) }

func (d dice) addr() netip.Addr {
	if d.IntN(3) == 0 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:%d::%d", d.IntN(3), d.IntN(3)))
	}
	return netip.AddrFrom4([4]byte{10, byte(d.IntN(2)), byte(d.IntN(3)), byte(d.IntN(256))})
}

func (d dice) policies() (policies []policy.Policy) {
	for i := range 1 + d.IntN(9) {
		p := policy.Policy{
			Name:  fmt.Sprint("p", i),
			Tier:  pick(d, policy.Admin, policy.NetworkPolicy, policy.NetworkPolicy, policy.Baseline),
			Audit: d.IntN(4) == 0,
		}
		if p.Tier == policy.NetworkPolicy {
			p.Namespace = pick(d, "a", "b", "default")
			p.Isolates = pick(d, [2]bool{true, false}, [2]bool{false, true}, [2]bool{true, true})
			p.Subject = policy.Pods{Namespace: p.Namespace, Labels: d.selector("app", "tier")}
		} else {
			p.Priority = d.IntN(4)
			p.Subject = policy.Pods{Namespaces: d.selector("team", "kubernetes.io/metadata.name"),
				Labels: d.selector("app", "tier")}
		}
		for direction := range p.Rules {
			if p.Tier == policy.NetworkPolicy && !p.Isolates[direction] {
				continue
			}
			for j := range d.IntN(4) {
				p.Rules[direction] = append(p.Rules[direction], d.rule(p, fmt.Sprint("r", j)))
			}
		}
		policies = append(policies, p)
	}
	return policies
}

func (d dice) rule(p policy.Policy, name string) policy.Rule {
	r := policy.Rule{Name: name, Action: policy.Accept, Everyone: d.IntN(6) == 0}
	if p.Tier != policy.NetworkPolicy {
		r.Action = pick(d, policy.Accept, policy.Deny, policy.Pass)
	}
	for range d.IntN(3) {
		s := policy.Pods{Namespaces: d.selector("team"), Labels: d.selector("app", "tier")}
		if d.IntN(3) == 0 {
			s.Namespace, s.Namespaces = pick(d, "a", "b", "default"), nil
		}
		r.Pods = append(r.Pods, s)
	}
	names := true
	for range d.IntN(3) {
		b := policy.Block{
			Prefix: netip.MustParsePrefix(
				pick(
					d,
					"0.0.0.0/0",
					"10.0.0.0/8",
					"10.1.0.0/16",
					"10.1.2.0/24",
					"::/0",
					"fd00::/16",
					"fd00:1::/32",
					"::/96",
					"::/80",
				),
			),
		}
		for _, e := range []string{"10.1.0.0/17", "10.1.2.0/24", "10.1.2.64/26", "fd00:1::/33", "fd00::/15",
			"10.1.2.0/25"} {
			if e := netip.MustParsePrefix(e); d.IntN(2) == 0 && b.Prefix.Bits() < e.Bits() &&
				b.Prefix.Contains(e.Addr()) {
				b.Except = append(b.Except, e)
			}
		}
		r.Blocks, names = append(r.Blocks, b), false
	}
	for range d.IntN(4) {
		port := policy.Port{Protocol: pick[uint8](d, policy.TCP, policy.UDP, policy.SCTP), Last: 65535}
		switch d.IntN(5) {
		case 0:
		case 1, 2:
			port.First = d.port()
			port.Last = port.First
		case 3:
			a, b := d.port(), d.port()
			port.First, port.Last = min(a, b), max(a, b)
		case 4:
			if names {
				port = policy.Port{Protocol: pick[uint8](d, 0, policy.TCP, policy.UDP), Name: pick(d, "http", "dns")}
			}
		}
		r.Ports = append(r.Ports, port)
	}
	return r
}

func (d dice) selector(keys ...string) (s policy.Selector) {
	for range pick(d, 0, 0, 1, 1, 2) {
		r := policy.Requirement{
			Key:      pick(d, keys...),
			Operator: pick(d, policy.In, policy.In, policy.NotIn, policy.Exists, policy.DoesNotExist),
		}
		if r.Operator == policy.In || r.Operator == policy.NotIn {
			for range 1 + d.IntN(2) {
				r.Values = append(r.Values, d.value())
			}
		}
		s = append(s, r)
	}
	return s
}

// ask passes a random packet to Decide. It returns the decision, and the packet for evaluate, with identities instead
// of app numbers.
func (d dice) ask(tables policy.Tables, apps map[address.AppID]map[string]string) (policy.Decision, packet) {
	known := appsOf(apps)
	identity := func(app address.AppID) *tenant.Identity {
		labels, ok := apps[app]
		if !ok {
			return nil
		}
		id := tenant.ReadIdentity(labels)
		return &id
	}
	subject, remote := pick(
		d,
		append(known, 999)...), pick(
		d,
		append(known, 999, policy.Outside, address.FirstReservedApp)...)
	p := packet{
		subject: identity(
			subject,
		), remote: identity(remote), outside: remote == policy.Outside || remote == address.FirstReservedApp,
		direction: pick(
			d,
			policy.Ingress,
			policy.Egress,
		), addr: d.addr(), protocol: pick[uint8](d, policy.TCP, policy.TCP, policy.UDP, policy.SCTP, 58),
		port: d.port(),
	}
	if p.protocol == 58 {
		p.port = 0
	}
	return tables.Decide(subject, p.direction, remote, p.addr, p.protocol, p.port), p
}
