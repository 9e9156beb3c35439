package datapath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/policymap"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/policy/policytest"
)

// policyBench is a node whose policy tables only the test queries.
type policyBench struct{ *testNode }

func newPolicyBench(t *testing.T) policyBench {
	n := newLink(t).nodes[0]
	n.open(t, endpoint.Veth)
	return policyBench{n}
}

// compiled is a case's policies for all its apps.
func compiled(t *testing.T, c policytest.Case) dpapi.TenantPolicies {
	return compiledFor(t, "acme", 7, c)
}

func compiledFor(t *testing.T, tenant string, id address.TenantID, c policytest.Case) dpapi.TenantPolicies {
	t.Helper()
	tables, err := policy.Compile(tenant, c.Policies, c.Apps, slices.Sorted(maps.Keys(c.Apps)))
	must(t, err)
	return dpapi.TenantPolicies{Tenant: tenant, IDs: []address.TenantID{id}, Tables: tables}
}

// ask runs a case's queries in the kernel, and returns the numbers of allowed and denied ones.
func (b policyBench) ask(t *testing.T, c policytest.Case) (verdicts [2]int) {
	t.Helper()
	local := netip.MustParseAddr("fd00:2::1")
	for _, q := range c.Queries {
		// Both ports, because either end may begin the session to this one.
		a, err := b.datapath.LookupPolicy(
			dpapi.PolicyQuery{
				Tenant:     7,
				Local:      local,
				Remote:     q.Address,
				LocalApp:   q.Subject,
				RemoteApp:  q.Remote,
				Protocol:   q.Protocol,
				LocalPort:  q.Port,
				RemotePort: q.Port,
			},
		)
		must(t, err)
		if a.Allowed[q.Direction] != q.Allowed {
			t.Fatalf(
				"%s: app %d %v: %v of app %d %v (%v), protocol %d port %d: allowed %v by rule %d, cyclonus says %v",
				c.Name,
				q.Subject,
				c.Apps[q.Subject],
				q.Direction,
				q.Remote,
				c.Apps[q.Remote],
				q.Address,
				q.Protocol,
				q.Port,
				a.Allowed[q.Direction],
				a.Rules[q.Direction],
				q.Allowed,
			)
		}
		verdicts[bpfobj.BoolToUint32(q.Allowed)]++
	}
	return verdicts
}

// differ returns the first difference between the kernel's tables and these tenants' policies.
func (b policyBench) differ(t *testing.T, tenants ...dpapi.TenantPolicies) string {
	t.Helper()
	r := b.datapath.PolicyMaps()
	return strings.Join(
		slices.Concat(
			differs(t, r.Targets, tenants),
			differs(t, r.Overrides, tenants),
			differs(t, r.Apps, tenants),
			differs(t, r.Cidrs, tenants),
			differs(t, r.Ports, tenants),
			differs(t, r.Ranges, tenants),
			differs(t, r.Hits, tenants),
		),
		"; ",
	)
}

func differs[K comparable, V any, Key, Value comparable](
	t *testing.T,
	r *policymap.MapSync[K, V, Key, Value],
	tenants []dpapi.TenantPolicies,
) []string {
	t.Helper()
	has, want := map[Key]Value{}, map[Key]Value{}
	must(t, r.Read(r.Kernel, has))
	for _, of := range tenants {
		for k, v := range r.EntriesOf(&of) {
			key, value := r.Entry(k, v)
			want[key] = value
		}
	}
	if maps.Equal(has, want) {
		return nil
	}
	return []string{fmt.Sprintf("%s: %d entries, want %d", r.Name, len(has), len(want))}
}

// TestPoliciesInKernel: the tables and the program of the packet path give the same verdicts as cyclonus for each of
// its cases, and for random policies and packets of both families. After each change, the tables have exactly the
// entries of the new policies.
func TestPoliciesInKernel(t *testing.T) {
	const traffics = 50
	sets, seed := 200, uint64(8)
	if os.Getenv("PILASTER_POLICIES_LONG") != "" {
		sets, seed = 10_000, rand.Uint64()
	}
	if s := os.Getenv("PILASTER_POLICIES_SEED"); s != "" {
		_, err := fmt.Sscan(s, &seed)
		must(t, err)
	}
	t.Logf("PILASTER_POLICIES_SEED=%d", seed)
	b := newPolicyBench(t)
	cases, err := policytest.Generated("192.168.1.")
	must(t, err)
	r := rand.New(rand.NewPCG(seed, 8))
	var verdicts [2]int
	for i := range len(cases) + sets {
		var c policytest.Case
		if i < len(cases) {
			c = cases[i]
		} else {
			c, err = policytest.Random(r, traffics)
			must(t, err)
		}
		p := compiled(t, c)
		must(t, b.datapath.SetPolicies(p))
		if diff := b.differ(t, p); diff != "" {
			t.Fatalf("%s: the kernel has other entries: %s", c.Name, diff)
		}
		n := b.ask(t, c)
		verdicts[0], verdicts[1] = verdicts[0]+n[0], verdicts[1]+n[1]
	}
	all := verdicts[0] + verdicts[1]
	t.Logf(
		"%s of %s compared: %s allowed, %s denied",
		humanize.Of(all, "verdict", "verdicts"),
		humanize.Of(len(cases)+sets, "case", "cases"),
		humanize.Grouped(verdicts[1]),
		humanize.Grouped(verdicts[0]),
	)
	if verdicts[0] < all/20 || verdicts[1] < all/20 || all < 200_000 {
		t.Error("those are fewer verdicts than cyclonus has, or one of the answers hardly occurs")
	}
}

// big makes random cases until the policies of one have many entries.
func big(t *testing.T, seed uint64) dpapi.TenantPolicies {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 9))
	for range 1000 {
		c, err := policytest.Random(r, 1)
		must(t, err)
		if p := compiled(t, c); len(p.Tables.Peers) > 10 && len(p.Tables.Blocks) > 2 {
			return p
		}
	}
	t.Fatal("chance makes no big policies")
	return dpapi.TenantPolicies{}
}

// TestPoliciesOutliveTheAgent: another process finds the policies in force, and writes nothing if it wants the same.
func TestPoliciesOutliveTheAgent(t *testing.T) {
	b := newPolicyBench(t)
	p := big(t, 1)
	must(t, b.datapath.SetPolicies(p))
	b.reopen(t, b.datapath.config)
	o := &b.datapath.Objects
	for _, m := range []interface{ Freeze() error }{o.PolSubjectsV1, o.PolAppsV1, o.PolBlocksV1, o.PolPortsV1,
		o.PolRangesV1, o.PolOverridesV1, o.PolHitsV1} {
		must(t, m.Freeze()) // writes fail
	}
	if err := b.datapath.RestorePolicies([]dpapi.TenantPolicies{p}, nil); err != nil {
		t.Errorf("the same policies are written again: %v", err)
	}
	if err := b.datapath.SetPolicies(p); err != nil {
		t.Errorf("the same policies of one tenant are written again: %v", err)
	}
	if diff := b.differ(t, p); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	if b.datapath.SetPolicies(big(t, 2)) == nil {
		t.Error("other policies are written to read-only maps")
	}
}

// TestPoliciesOfOneTenant: changes of one tenant's policies leave every entry of other tenants unchanged, even if their
// rules have the same numbers. This also holds after a crash of the agent, and if a change fails half-way.
func TestPoliciesOfOneTenant(t *testing.T) {
	b := newPolicyBench(t)
	r := rand.New(rand.NewPCG(3, 9))
	now := map[string]dpapi.TenantPolicies{}
	same := func(when string) {
		t.Helper()
		if diff := b.differ(t, slices.Collect(maps.Values(now))...); diff != "" {
			t.Fatalf("%s: the kernel has other entries: %s", when, diff)
		}
	}
	some := func(n int) dpapi.TenantPolicies {
		p := dpapi.TenantPolicies{}
		for len(p.Tables.Names) == 0 {
			c, err := policytest.Random(r, 1)
			must(t, err)
			p = compiledFor(t, fmt.Sprint("t", n), address.TenantID(10+n), c)
		}
		p.IDs = append(p.IDs, address.TenantID(20+n+10*r.IntN(2)))
		p.Overrides = map[netip.Addr]address.AppID{
			netip.AddrFrom16([16]byte{0xfd, 15: byte(n)}): address.AppID(1 + r.IntN(5)),
		}
		p.Tables.Names[1], p.Tables.Names[uint32(2+r.IntN(3))] = policy.RuleName{Rule: n}, policy.RuleName{Rule: n}
		return p
	}
	for i := range 36 {
		p := some(r.IntN(4))
		if r.IntN(5) == 0 {
			p = dpapi.TenantPolicies{Tenant: p.Tenant}
		}
		when := fmt.Sprintf("step %d, tenant %s", i, p.Tenant)
		switch i % 6 {
		case 3: // the change fails: its rules are written, but not the entries that refer to them
			subjects := b.datapath.Objects.PolSubjectsV1
			b.datapath.Objects.PolSubjectsV1 = b.datapath.Objects.PolPortsV1
			err := b.datapath.SetPolicies(some(r.IntN(4)))
			if b.datapath.Objects.PolSubjectsV1 = subjects; err == nil {
				t.Fatal("subjects can be written to the table of ports")
			}
		case 5: // another agent starts with the policies from before the change
			b.reopen(t, b.datapath.config)
			must(t, b.datapath.RestorePolicies(slices.Collect(maps.Values(now)), nil))
			same(when + ", begun anew")
		}
		if now[p.Tenant] = p; len(p.IDs) == 0 {
			delete(now, p.Tenant)
		}
		must(t, b.datapath.SetPolicies(p))
		same(when)
	}
	must(t, b.datapath.RestorePolicies(nil, nil))
	clear(now)
	same("without policies")
}

// TestSharedEntries: an entry that two tenants share is deleted with the second of them, and counters stay.
func TestSharedEntries(t *testing.T) {
	b := newPolicyBench(t)
	at := netip.MustParseAddr("fd00::1")
	of := func(tenant string, set policy.ID, app address.AppID) dpapi.TenantPolicies {
		return dpapi.TenantPolicies{
			Tenant:    tenant,
			IDs:       []address.TenantID{7},
			Overrides: map[netip.Addr]address.AppID{at: app},
			Tables: policy.Tables{
				Subjects: map[address.AppID]policy.Subject{
					policy.AnyApp: {Sets: [2]policy.ID{set, set}},
				}, Names: map[uint32]policy.RuleName{5: {Policy: tenant}}},
		}
	}
	blue, green := of("blue", 1, 3), of("green", 2, 4)
	must(t, b.datapath.SetPolicies(blue))
	cpus := make([]uint64, ebpf.MustPossibleCPU())
	cpus[0] = 42
	must(t, b.datapath.Objects.PolHitsV1.Put(uint32(5), cpus))
	must(t, b.datapath.SetPolicies(green))
	if diff := b.differ(t, green); diff != "" {
		t.Errorf("who came last does not hold: %s", diff)
	}
	must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "green"}))
	if diff := b.differ(t, blue); diff != "" {
		t.Errorf("who stays has not its own: %s", diff)
	}
	hits, err := b.datapath.RuleHits()
	if must(t, err); hits[5] != 42 {
		t.Errorf("the rule has denied %d packets, want 42", hits[5])
	}
	must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "blue"}))
	if diff := b.differ(t); diff != "" {
		t.Errorf("no tenant has policies: %s", diff)
	}
}

// rules returns policies of a tenant with n entries in the table of ports, numbered from first.
func rules(tenant string, first, n int) dpapi.TenantPolicies {
	t := dpapi.TenantPolicies{
		Tenant: tenant,
		IDs:    []address.TenantID{address.TenantID(tenant[0])},
		Tables: policy.Tables{
			Subjects: map[address.AppID]policy.Subject{
				policy.AnyApp: {},
			}, Ports: map[policy.PortKey]policy.PortEntry{}},
	}
	for i := range n {
		t.Tables.Ports[policy.PortKey{Table: policy.ID(tenant[0])<<32 + policy.ID(first+i),
			Scope: policy.OtherProtocols}] = policy.PortEntry{}
	}
	return t
}

// TestTooManyPolicies: policies that exceed the tables are refused, and the previous ones stay in force.
func TestTooManyPolicies(t *testing.T) {
	b := newPolicyBench(t)
	config := b.datapath.config
	config.MaxRules = 100
	b.reopen(t, config)
	p, other := rules("a", 0, 60), rules("b", 0, 41)
	restore := func(tenants ...dpapi.TenantPolicies) error { return b.datapath.RestorePolicies(tenants, nil) }
	must(t, restore(p))
	refused := func(words string, tenants ...dpapi.TenantPolicies) {
		t.Helper()
		if err := restore(tenants...); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v; want a refusal that says how much there is room for", err)
		}
	}
	refused("policies need 101 entries for ports, and the node has room for 100; nothing was changed", p, other)
	p = rules("a", 1000, 100)
	must(t, restore(p)) // fills the room that the policies in force leave
	for i := range 50 { // of a process that was killed
		must(
			t,
			b.datapath.Objects.PolPortsV1.Put(bpfobj.PilasterPortKey{Table: uint64(i + 1)}, bpfobj.PilasterPortRules{}),
		)
	}
	refused(
		"policies need 201 entries for ports, including the ones in force until then, and there are 200; nothing "+
			"was changed",
		rules("a", 0, 51),
	)
	must(t, restore(p)) // it goes with the next
	if diff := b.differ(t, p); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	must(t, restore())
	if diff := b.differ(t); diff != "" {
		t.Errorf("without policies the kernel has entries: %s", diff)
	}
}

// TestNoTenantTakesAll: no tenant gets more entries than it leaves free, so that other tenants have room. A tenant that
// already has more keeps its entries, and may reduce them.
func TestNoTenantTakesAll(t *testing.T) {
	b := newPolicyBench(t)
	config := b.datapath.config
	config.MaxRules = 90
	b.reopen(t, config)
	set := func(p dpapi.TenantPolicies) error { return b.datapath.SetPolicies(p) }
	refused := func(p dpapi.TenantPolicies, why string) {
		t.Helper()
		if err := set(p); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v; want a refusal that says %q", err, why)
		}
	}
	refused(
		rules("a", 0, 46),
		"policies of tenant a need 46 entries for ports; a tenant may use at most half of what others leave of the "+
			"node's 90, and others use 0; nothing was changed: raise the agent's --max-rules",
	)
	must(t, set(rules("a", 0, 45)))
	must(t, set(rules("a", 1000, 45))) // all of them at once
	refused(
		rules("b", 0, 23),
		"policies of tenant b need 23 entries for ports; a tenant may use at most half of what others leave of the "+
			"node's 90, and others use 45",
	)
	must(t, set(rules("b", 0, 22)))
	refused(rules("a", 1000, 46), "tenant a need 46")
	must(t, set(rules("c", 0, 11)))
	must(t, set(rules("a", 5000, 44))) // still all of them at once
	must(t, set(rules("a", 1000, 30)))
	must(t, set(rules("b", 0, 24)))
	if diff := b.differ(t, rules("a", 1000, 30), rules("b", 0, 24), rules("c", 0, 11)); diff != "" {
		t.Errorf("the kernel has other entries: %s", diff)
	}
	// An agent accepts the policies on its disk, because an earlier agent accepted them.
	b.reopen(t, config)
	must(t, b.datapath.RestorePolicies(nil, nil))
	must(t, b.datapath.RestorePolicies([]dpapi.TenantPolicies{rules("a", 1000, 80), rules("b", 0, 1)}, nil))
	must(t, set(rules("a", 1000, 79)))
	refused(rules("a", 1000, 81), "tenant a need 81")
}

// TestHeldPolicies: if an agent cannot enforce a tenant's policies at its start, the policies in the kernel stay in
// force until it can. Policies of other tenants change as usual.
func TestHeldPolicies(t *testing.T) {
	b := newPolicyBench(t)
	at := func(p dpapi.TenantPolicies) dpapi.TenantPolicies {
		a := netip.AddrFrom16([16]byte{0: 0xfd, 10: p.Tenant[0]}) // of its id
		p.Overrides = map[netip.Addr]address.AppID{a: 1}
		return p
	}
	same := func(when string, want ...dpapi.TenantPolicies) {
		t.Helper()
		if diff := b.differ(t, want...); diff != "" {
			t.Fatalf("%s: the kernel has other entries: %s", when, diff)
		}
	}
	blue, red := at(rules("blue", 0, 30)), at(rules("red", 0, 20))
	must(t, b.datapath.SetPolicies(blue))
	must(t, b.datapath.SetPolicies(red))
	config := b.datapath.config
	config.MaxRules = 25
	b.reopen(t, config)
	if err := b.datapath.RestorePolicies([]dpapi.TenantPolicies{red}, []dpapi.TenantPolicies{{Tenant: "blue",
		IDs: blue.IDs}}); err == nil ||
		!strings.Contains(err.Error(), "tenant blue: its policies cannot be enforced now, and the ones in force "+
			"are in maps of another size; packets flow as before") {
		t.Errorf("in tables of another size: %v", err)
	}
	config.MaxRules = 0
	b.reopen(t, config)
	held := []dpapi.TenantPolicies{{Tenant: "blue", IDs: blue.IDs}, {Tenant: "green", IDs: []address.TenantID{'g'}}}
	must(t, b.datapath.RestorePolicies([]dpapi.TenantPolicies{red}, held))
	isolated := dpapi.TenantPolicies{IDs: []address.TenantID{'g'}, Tables: policy.Isolating()}
	same("begun", blue, red, isolated)
	red = at(rules("red", 1000, 10))
	must(t, b.datapath.SetPolicies(red))
	same("another one's have changed", blue, red, isolated)
	must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "red"}))
	same("another one's have gone", blue, isolated)
	green := at(rules("green", 0, 5))
	must(t, b.datapath.SetPolicies(green))
	same("what was isolated has policies", blue, green)

	b.datapath.MaxRules = 40
	if b.datapath.SetPolicies(at(rules("blue", 500, 36))) == nil {
		t.Fatal("41 entries are too many")
	}
	same("refused once more", blue, green)
	b.datapath.MaxRules = 400
	blue = at(rules("blue", 500, 36))
	must(t, b.datapath.SetPolicies(blue))
	same("held no more", blue, green)
	must(t, b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "blue"}))
	same("gone", green)
}

// TestOffloadedPolicies: a tenant whose rules are looked up at frontends has no entries but those that deny and the
// counters of rules, which go on; dropping the rules and loading them again adopts no connections, because the tenant
// has policies at all times.
func TestOffloadedPolicies(t *testing.T) {
	b := newPolicyBench(t)
	loaded := big(t, 1)
	must(t, b.datapath.SetPolicies(loaded))
	var rule uint32
	for rule = range loaded.Tables.Names {
		break
	}
	counts := make([]uint64, ebpf.MustPossibleCPU())
	counts[0] = 5
	must(t, b.datapath.Objects.PolHitsV1.Put(rule, counts))
	const over = uint64(1)
	adoptions := b.datapath.Objects.PolAdoptionsV1
	must(t, adoptions.Put(uint32(7), over))
	dropped := dpapi.TenantPolicies{Tenant: loaded.Tenant, IDs: loaded.IDs, Tables: policy.Isolating()}
	dropped.Tables.Names = loaded.Tables.Names // frontends name them in verdicts
	for range 2 {
		for _, p := range []dpapi.TenantPolicies{dropped, loaded} {
			must(t, b.datapath.SetPolicies(p))
			if diff := b.differ(t, p); diff != "" {
				t.Errorf("the kernel has other entries: %s", diff)
			}
			var until uint64
			must(t, adoptions.Lookup(uint32(7), &until))
			if until != over {
				t.Errorf("connections are adopted until %d, want %d", until, over)
			}
		}
		if hits, err := b.datapath.RuleHits(); err != nil || hits[rule] != 5 {
			t.Errorf("the counter of rule %d is %d, %v", rule, hits[rule], err)
		}
		b.datapath.PolicyMapsSynced = false // the second time the kernel's maps are compared
	}
}
