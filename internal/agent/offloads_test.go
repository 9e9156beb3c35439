package agent_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// farNode and thirdNode are the prefixes of two other nodes.
var (
	farNode   = netip.MustParsePrefix("fd70:696c:6100:2::/64")
	thirdNode = netip.MustParsePrefix("fd70:696c:6100:3::/64")
)

var webAndDB = []agent.App{
	{ID: 1, Labels: map[string]string{"app": "web"}}, {ID: 2, Labels: map[string]string{"app": "db"}},
}

// offload is an offload of green in a phase.
func offload(phase tenant.OffloadPhase, backend netip.Prefix, frontends ...netip.Prefix) tenant.Offload {
	o := tenant.Offload{ID: 7, Node: "backend", Prefix: backend, Phase: phase, Epoch: 9}
	for i, f := range frontends {
		o.Frontends = append(o.Frontends, tenant.Frontend{Node: fmt.Sprint("frontend", i+1), Prefix: f})
	}
	return o
}

// greenWith is green after some changes, with offloads.
func (b *bed) greenWith(changes uint64, offloads ...tenant.Offload) agent.TenantState {
	green := b.Orchestrator.Tenants["green"]
	green.Changes, green.Offloads = changes, offloads
	return agent.TenantState{Tenant: green, Whole: true, Apps: webAndDB}
}

func (b *bed) mustApply(k agent.TenantState) {
	b.T.Helper()
	if err := b.Apply(b.T.Context(), []agent.TenantState{k}, nil); err != nil {
		b.T.Fatal(err)
	}
}

func (b *bed) mustSetTransit(names ...string) {
	b.T.Helper()
	if err := b.SetTransit(b.T.Context(), names); err != nil {
		b.T.Fatal(err)
	}
}

// hosting is what the node reports of green; nil if it does not host it.
func (b *bed) hosting() *pilasterv1.Hosting {
	all := b.report(false).Hosting
	i := slices.IndexFunc(all, func(h *pilasterv1.Hosting) bool { return h.Tenant == "green" })
	if i < 0 {
		return nil
	}
	return all[i]
}

func (b *bed) applied() uint64 { return b.hosting().GetAppliedChanges() }

// rules describes what the packet path has of green: "none", "rules" or "denies".
func (b *bed) rules() string {
	b.Driver.Mu.Lock()
	defer b.Driver.Mu.Unlock()
	tables := b.Driver.Policies["green"].Tables
	unknown, has := tables.Subjects[policy.AnyApp]
	switch {
	case !has:
		return "none"
	case len(tables.Subjects) > 1:
		return "rules"
	case unknown == policy.Isolating().Subjects[policy.AnyApp] && len(tables.Peers)+len(tables.Ports) == 0:
		return "denies"
	}
	return fmt.Sprint(tables)
}

func (b *bed) wantRules(when, want string) {
	b.T.Helper()
	if got := b.rules(); got != want {
		b.T.Errorf("%s: the packet path has %s, want %s", when, got, want)
	}
}

func (b *bed) wantApplied(when string, want uint64) {
	b.T.Helper()
	if got := b.applied(); got != want {
		b.T.Errorf("%s: changes %d are reported as applied, want %d", when, got, want)
	}
}

// isSignalled reports whether a report is due, and takes the signal.
func (b *bed) isSignalled() bool {
	select {
	case <-b.Tenants.Changed():
		return true
	default:
		return false
	}
}

var webFromDB = agenttest.AllPolicies("green", agenttest.Document("web", agenttest.WebFromDB))

// TestFrontendHostsWithoutContainers (Nezha §3.2): a frontend has apps, policies and mappings of the tenant, reports it
// as hosted, acknowledges it once its rules are in force, also after a restart, and forgets it afterwards.
func TestFrontendHostsWithoutContainers(t *testing.T) {
	b := newBedOfTwo(t)
	b.Tenants.SetHasMappings(func(tenant.Tenant) bool { return true })
	b.mustSetTransit("green")
	b.mustApply(b.greenWith(1))
	if b.hosting() != nil {
		t.Fatal("a transit tenant without offloads is reported as hosted")
	}
	b.mustApply(b.greenWith(2, offload(tenant.OffloadPreparing, farNode, agenttest.NodePrefix)))
	if r := b.report(false); !slices.Equal(r.HostedTenants, []string{"green"}) ||
		!slices.Equal(r.IncompleteTenants, []string{"green"}) {
		t.Errorf("a frontend reports %v", r)
	}
	b.wantApplied("before the policies arrive", 0)
	b.isSignalled()
	b.MustApplyPolicies(webFromDB)
	if !b.isSignalled() {
		t.Error("the arrival of the policies triggers no report")
	}
	b.wantRules("with policies", "rules")
	b.wantApplied("before the mappings arrive", 0)
	b.isSignalled()
	b.Tenants.SetListed("green")
	if !b.isSignalled() {
		t.Error("the arrival of the mappings triggers no report")
	}
	b.wantApplied("with policies and mappings", 2)
	if b.hosting().Offloaded != nil {
		t.Error("a frontend reports containers of a backend")
	}

	b.Reopen()
	b.wantRules("after a start", "rules")
	b.wantApplied("after a start, before the stream", 0)
	if !b.Tenants.IsHosted("green") {
		t.Error("a start forgets what this node is a frontend of")
	}
	b.mustApply(b.greenWith(3, offload(tenant.OffloadActive, farNode, agenttest.NodePrefix)))
	b.MustApplyPolicies(webFromDB)
	b.wantApplied("after a start", 3)

	b.mustSetTransit()
	b.mustApply(b.greenWith(4, offload(tenant.OffloadActive, farNode, thirdNode)))
	b.wantRules("as a frontend no more", "none")
	b.CheckClean()
}

// TestPoliciesRevision: a node of an offload reports up to which revision the tenant's policies are in force, which
// changes with them only.
func TestPoliciesRevision(t *testing.T) {
	b := newBedOfTwo(t)
	b.mustSetTransit("green")
	b.mustApply(b.greenWith(2, offload(tenant.OffloadPreparing, farNode, agenttest.NodePrefix)))
	overrides := map[netip.Addr]address.AppID{netip.MustParseAddr("10.0.0.1"): 1}
	another := agenttest.MorePolicies("green", agenttest.Document("b", agenttest.WebFromDB))
	for i, c := range []struct {
		update policies.Update
		want   int64
	}{
		{policies.Update{Tenant: "green", Documents: webFromDB.Documents}, 0}, // there may be others
		{webFromDB, 11},
		{another, 12},
		{policies.Update{Tenant: "green", Overrides: overrides}, 12},
		{policies.Update{Tenant: "green", Removed: another.Documents}, 14},
	} {
		c.update.Revision = int64(10 + i)
		before := b.hosting().GetPoliciesRevision()
		b.isSignalled()
		b.MustApplyPolicies(c.update)
		got := b.hosting().GetPoliciesRevision()
		if signalled := b.isSignalled(); got != c.want || got != before && !signalled {
			t.Errorf("update %d: revision %d is reported, want %d; signalled: %v", i, got, c.want, signalled)
		}
	}
	b.mustApply(b.greenWith(3))
	if r := b.hosting().GetPoliciesRevision(); r != 0 {
		t.Errorf("revision %d is reported without offloads", r)
	}
}

// TestRulesOfABackend: a backend reports how many entries its policies need, also without its rules, and after a start
// without them.
func TestRulesOfABackend(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	want := func(when string, want int) {
		t.Helper()
		if got := b.RulesOf("green"); got != want {
			t.Errorf("%s: the policies need %d entries, want %d", when, got, want)
		}
	}
	want("without policies", 0)
	b.mustApply(b.greenWith(1))
	b.MustApplyPolicies(webFromDB)
	alone := b.RulesOf("green")
	if alone == 0 {
		t.Fatal("policies need no entries")
	}
	b.mustApply(b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	b.wantRules("in an offload", "denies")
	want("in an offload", alone)
	b.Reopen()
	b.wantRules("after a start", "denies")
	want("after a start", alone)
	b.mustApply(b.greenWith(3, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	b.MustApplyPolicies(agenttest.MorePolicies("green", agenttest.Document("more",
		`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"more"},
		"spec":{"podSelector":{"matchLabels":{"app":"db"}},"ingress":[{"ports":[{"port":1,"endPort":99},{"port":200}]}]}}`,
	)))
	more := b.RulesOf("green")
	if more <= alone {
		t.Errorf("with more policies %d entries are needed, with fewer %d", more, alone)
	}
	k := b.greenWith(4, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode))
	k.Apps = slices.Clone(k.Apps)
	for id := range address.AppID(20) {
		k.Apps = append(k.Apps, agent.App{ID: 10 + id, Labels: map[string]string{"app": "db", "n": fmt.Sprint(id)}})
	}
	b.mustApply(k)
	if apps := b.RulesOf("green"); apps <= more {
		t.Errorf("with more apps %d entries are needed, with fewer %d", apps, more)
	}
	b.wantRules("with more apps", "denies")
}

// TestLostFrontends (NZ6): a backend reports at once which frontends do not answer, until they do, and only while it is
// the backend.
func TestLostFrontends(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.mustApply(b.greenWith(1, offload(tenant.OffloadActive, farNode, thirdNode)))
	if len(b.OffloadsChanged()) > 0 || len(b.LoadDue()) > 0 {
		t.Error("a change of an offload of other nodes is signalled")
	}
	b.mustApply(b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode, thirdNode)))
	if len(b.OffloadsChanged()) == 0 || len(b.LoadDue()) == 0 {
		t.Error("a change of offloads is not signalled")
	}
	both := []string{"frontend1", "frontend2"}
	for _, want := range []struct{ lost, answering []string }{
		{nil, both[:1]}, {both[1:], both[:1]}, {both, nil}, {both, both[:1]}, {nil, both[:1]}, {both[:1], nil},
	} {
		b.isSignalled()
		b.SetFrontends("green", want.lost, want.answering)
		if is := b.hosting(); !b.isSignalled() || !slices.Equal(is.GetLostFrontends(), want.lost) ||
			!slices.Equal(is.GetAnsweringFrontends(), want.answering) {
			t.Errorf("the report is %v, want %q", is, want)
		}
		if b.SetFrontends("green", want.lost, want.answering); b.isSignalled() {
			t.Error("a report that says nothing new")
		}
		if roles := b.Roles(); len(roles) != 1 || !slices.Equal(roles[0].Lost, want.lost) {
			t.Errorf("the roles are %+v", roles)
		}
	}
	b.SetFrontends("green", both[:1], both[1:])
	b.mustApply(b.greenWith(3))
	if is := b.hosting(); is.GetLostFrontends() != nil || is.GetAnsweringFrontends() != nil {
		t.Errorf("without an offload %v is reported", is)
	}
}

// TestFrontendBecomesTransit: what only a frontend needs goes, and a transit tenant stays.
func TestFrontendBecomesTransit(t *testing.T) {
	b := newBedOfTwo(t)
	b.mustSetTransit("green")
	b.mustApply(b.greenWith(1, offload(tenant.OffloadActive, farNode, agenttest.NodePrefix)))
	b.MustApplyPolicies(webFromDB)
	b.wantRules("as a frontend", "rules")
	b.mustApply(b.greenWith(2))
	b.wantRules("as a frontend no more", "none")
	known, _, ok := b.Tenants.Get("green")
	if !ok || len(known.Apps) > 0 || b.hosting() != nil {
		t.Errorf("the transit tenant is %+v, reported as %v", known, b.hosting())
	}
	b.mustSetTransit()
	b.CheckClean()
}

// TestFrontendWithContainers: with its last container a frontend keeps the tenant, and the last container of another
// node takes it along. The first one on a frontend waits for its policies.
func TestFrontendWithContainers(t *testing.T) {
	b := newBedOfTwo(t)
	b.mustSetTransit("green")
	front := b.greenWith(1, offload(tenant.OffloadActive, farNode, agenttest.NodePrefix))
	b.mustApply(front)
	b.Orchestrator.Tenants["green"] = front.Tenant
	b.Orchestrator.Apps["green "+tenant.Canonical(map[string]string{"app": "web"})] = 1
	asked := b.Orchestrator.Calls
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	if b.Orchestrator.Calls != asked+1 {
		t.Error("a container was added without a request before the policies arrived")
	}
	b.MustApplyPolicies(webFromDB)
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.wantRules("without containers", "rules")
	if _, err := b.Add(t.Context(), b.Green("c2")); err != nil {
		t.Fatal(err)
	}
	if b.Orchestrator.Calls != asked+1 {
		t.Error("a frontend with policies sent a request for a known app")
	}
	b.mustSetTransit()
	b.mustApply(b.greenWith(2))
	b.wantRules("as a frontend no more, with a container", "rules")
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}

// TestFrontendOfADeletedTenant: it has no reason to know the tenant any more; a new one of that name is another tenant.
func TestFrontendOfADeletedTenant(t *testing.T) {
	b := newBedOfTwo(t)
	front := b.greenWith(5, offload(tenant.OffloadActive, farNode, agenttest.NodePrefix))
	b.mustSetTransit("green")
	b.mustApply(front)
	b.MustApplyPolicies(webFromDB)
	anew := b.greenWith(1)
	anew.Tenant.Created = time.Unix(5, 0).UTC()
	b.mustApply(anew)
	b.wantRules("made anew", "none")
	front.Tenant.Created = anew.Tenant.Created
	b.mustApply(front)
	b.MustApplyPolicies(webFromDB)
	b.mustSetTransit() // all that a node learns if the tenant was deleted while it had no stream
	b.wantRules("deleted", "none")
	b.CheckClean()
}

// TestBackendDropsRulesByPhase (Nezha §4.2): only in phase active a backend lacks rules, and it denies then, also after
// a restart and for apps and containers that come then.
func TestBackendDropsRulesByPhase(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(webFromDB)
	changes := uint64(1)
	for _, c := range []struct {
		phase tenant.OffloadPhase
		want  string
	}{
		{tenant.OffloadPreparing, "rules"},
		{tenant.OffloadDual, "rules"},
		{tenant.OffloadActive, "denies"},
		{tenant.OffloadReturning, "rules"},
		{tenant.OffloadActive, "denies"},
		{tenant.OffloadEnding, "rules"},
	} {
		changes++
		b.mustApply(b.greenWith(changes, offload(c.phase, agenttest.NodePrefix, farNode)))
		when := "phase " + string(c.phase)
		b.wantRules(when, c.want)
		b.wantApplied(when, changes)
		b.Reopen()
		b.wantRules(when+", after a start", c.want)
		if !b.Tenants.HasPolicies("green") {
			t.Errorf("%s: the tenant has policies no more", when)
		}
		before := len(b.Driver.Calls)
		b.mustApply(b.greenWith(changes, offload(c.phase, agenttest.NodePrefix, farNode)))
		if slices.Contains(b.Driver.Calls[before:], "SetPolicies") {
			t.Errorf("%s: the same update sets the policies again", when)
		}
		b.MustApplyPolicies(webFromDB)
		b.wantRules(when+", with the same policies", c.want)
		b.wantApplied(when+", after a start", changes)
	}
	b.mustApply(b.greenWith(changes + 1))
	b.wantRules("without an offload", "rules")
	b.wantApplied("without an offload", 0)
}

// TestBackendWithoutRules: what changes while frontends look the rules up.
func TestBackendWithoutRules(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(webFromDB)
	active := b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode))
	names := b.Driver.Policies["green"].Tables.Names
	b.mustApply(active)
	b.wantRules("active", "denies")
	if got := b.Driver.Policies["green"].Tables.Names; len(names) == 0 || !maps.Equal(got, names) {
		t.Errorf("rules %v are counted, want %v", got, names)
	}

	calls := func() (n int) {
		for _, call := range b.Driver.Calls {
			if call == "SetPolicies" {
				n++
			}
		}
		return n
	}
	before := calls()
	if _, err := b.Add(t.Context(), b.Green("c2")); err != nil {
		t.Fatal(err)
	}
	more := active
	more.Apps = append(slices.Clone(webAndDB), agent.App{ID: 3, Labels: map[string]string{"app": "cache"}})
	b.mustApply(more)
	if calls() != before {
		t.Error("a container or an app changes tables that do not depend on apps")
	}
	rotated := active
	rotated.Tenant.IDs = append(slices.Clone(active.Tenant.IDs), tenant.ID{ID: 4, Key: address.Key{4}})
	rotated.Tenant.Changes = 3
	b.mustApply(rotated)
	if got := b.Driver.Policies["green"].IDs; !slices.Equal(got, []address.TenantID{3, 4}) {
		t.Errorf("the tables deny ids %v", got)
	}

	b.MustApplyPolicies(policies.Update{Tenant: "green", Removed: []policies.Document{agenttest.Document("web", "")}})
	b.wantRules("without policies", "none")
	b.MustApplyPolicies(webFromDB)
	b.wantRules("with policies again", "denies")

	// A frontend of another backend needs the rules.
	both := rotated
	both.Tenant.Changes = 4
	second := offload(tenant.OffloadActive, farNode, agenttest.NodePrefix)
	second.ID = 8
	both.Tenant.Offloads = []tenant.Offload{active.Tenant.Offloads[0], second}
	b.mustApply(both)
	b.wantRules("backend and frontend", "rules")
	b.mustApply(func() agent.TenantState { k := rotated; k.Tenant.Changes = 5; return k }())
	b.wantRules("backend only", "denies")

	for _, container := range []string{"c1", "c2"} {
		if err := b.Delete(t.Context(), container, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.wantRules("without containers", "none")
	b.CheckClean()
}

// TestBackendWithoutRoom: a node that has no room for rules, and so needs an offload, confirms its begin, with the
// problem, until frontends have them.
func TestBackendWithoutRoom(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.Driver.Fail["SetPolicies"] = errors.New("no room")
	b.MustApplyPolicies(webFromDB)
	for i, phase := range []tenant.OffloadPhase{tenant.OffloadPreparing, tenant.OffloadDual} {
		b.mustApply(b.greenWith(uint64(i+2), offload(phase, agenttest.NodePrefix, farNode)))
		if h := b.hosting(); h.AppliedChanges != uint64(i+2) || !strings.Contains(h.Unenforced, "no room") {
			t.Errorf("in phase %s the report is %v", phase, h)
		}
	}
	delete(b.Driver.Fail, "SetPolicies")
	b.mustApply(b.greenWith(4, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	b.wantRules("with frontends", "denies")
	if h := b.hosting(); h.AppliedChanges != 4 || h.Unenforced != "" {
		t.Errorf("with frontends the report is %v", h)
	}
}

// TestMTUReserve: on a node without the reserve no container of a tenant with offloads is added, and the status says
// what happens to those that are there.
func TestMTUReserve(t *testing.T) {
	b := newBedOfTwo(t)
	b.MTUReserve = tenant.OffloadOverhead - 1
	b.Reopen()
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	if problems := b.OffloadProblems(); len(problems) > 0 {
		t.Errorf("without offloads: %q", problems)
	}
	b.mustApply(b.greenWith(1, offload(tenant.OffloadActive, farNode, thirdNode)))
	if problems := b.OffloadProblems(); len(problems) != 1 || !strings.Contains(problems[0], "--mtu-reserve 96") {
		t.Errorf("with an offload: %q", problems)
	}
	if !slices.ContainsFunc(b.Problems(), func(p string) bool { return strings.Contains(p, "--mtu-reserve 96") }) {
		t.Errorf("the status has %q", b.Problems())
	}
	_, err := b.Add(t.Context(), b.Green("c2"))
	if err == nil || !strings.Contains(err.Error(), "this node reserves 95") ||
		!strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a container was added: %v", err)
	}
	if n := len(b.Endpoints()); n != 1 {
		t.Errorf("%d containers after the refusal, want 1", n)
	}
	b.mustApply(b.greenWith(2))
	if _, err := b.Add(t.Context(), b.Green("c2")); err != nil {
		t.Error(err)
	}
}

// TestManyOffloadedContainers: a report has as many addresses as the orchestrator accepts, of the same containers each
// time, and the status says that there are more.
func TestManyOffloadedContainers(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	b.mustApply(b.greenWith(1, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	n := 0 // containers, with two addresses each
	b.Tenants.SetContainers(func(string) (all []*pilasterv1.OffloadedEndpoint) {
		for i := range n {
			all = append(all, &pilasterv1.OffloadedEndpoint{
				App: uint32(i + 1), Addresses: [][]byte{{10, 0, 0, 1}, {10, 0, 0, 2}},
			})
		}
		return all
	})
	for n = tenant.MaxOffloaded/2 - 1; n <= tenant.MaxOffloaded/2+1; n++ {
		has := b.hosting().GetOffloaded()
		want, problems := min(n, tenant.MaxOffloaded/2), b.OffloadProblems()
		if len(has) != want || has[len(has)-1].App != uint32(want) {
			t.Errorf("%d containers: %d are reported, want the first %d", n, len(has), want)
		}
		if (len(problems) > 0) != (n > want) {
			t.Errorf("%d containers: the problems are %q", n, problems)
		}
	}
}

// TestBackendCannotLoadRules: the orchestrator learns why, and that the rules are not in force, until a retry succeeds.
// The rules are loaded before the networks rely on them.
func TestBackendCannotLoadRules(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Add(t.Context(), b.Green("c2")); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(webFromDB)
	b.mustApply(b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	b.wantApplied("active", 2)
	b.Driver.Fail["SetPolicies"] = errors.New("no room")
	b.mustApply(b.greenWith(3, offload(tenant.OffloadReturning, agenttest.NodePrefix, farNode)))
	b.wantRules("refused", "denies")
	if h := b.hosting(); h.AppliedChanges != 3 || !strings.Contains(h.Unenforced, "no room") {
		t.Errorf("the report is %v", h)
	}
	delete(b.Driver.Fail, "SetPolicies")
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.wantRules("retried", "rules")
	b.wantApplied("retried", 3)

	b.mustApply(b.greenWith(4, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	b.wantRules("active again", "denies")
	var first string // that the packet path has when the networks change
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "PutTenant" {
			first = cmp.Or(first, b.rules())
		}
	}
	ended := b.greenWith(5)
	ended.Tenant.Leaving = tenant.DefaultNetwork // whose packet path records the call
	b.mustApply(ended)
	if first != "rules" {
		t.Errorf("the packet path has %q when the networks change", first)
	}
	b.wantRules("ended", "rules")
}

// TestBackendIsNotSealed: policies in audit mode restrict nothing, wherever they are looked up.
func TestBackendIsNotSealed(t *testing.T) {
	b := newBedOfTwo(t)
	b.Nimitz.Unpoliced = errors.New("it judges nothing")
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	audited := strings.Replace(agenttest.WebFromDB, `"name":"web"`,
		`"name":"web","annotations":{"pilaster.io/audit":"true"}`, 1)
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("web", audited)))
	b.mustApply(b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	for i, when := range []string{"in phase active", "after a start"} {
		b.wantRules(when, "denies")
		if _, err := b.Add(t.Context(), b.Green(fmt.Sprint("more", i))); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if problems := b.PolicyProblems(); len(problems) > 0 {
			t.Errorf("%s: problems %q", when, problems)
		}
		b.Reopen()
	}
}

// TestReportOfOffloadedContainers: a backend reports its containers at each change of them.
func TestReportOfOffloadedContainers(t *testing.T) {
	b := newBedOfTwo(t)
	words := func() (all []string) {
		for _, e := range b.hosting().GetOffloaded() {
			for _, raw := range e.Addresses {
				a, _ := netip.AddrFromSlice(raw)
				all = append(all, fmt.Sprint(a, " ", e.App))
			}
		}
		return all
	}
	check := func(when string, want ...string) {
		t.Helper()
		if !b.isSignalled() {
			t.Errorf("%s: no report is due", when)
		}
		if got := words(); !slices.Equal(got, want) {
			t.Errorf("%s: containers %q are reported, want %q", when, got, want)
		}
		if _, err := tenant.ParseOffloaded(b.hosting().GetOffloaded()); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	add := func(container string) endpoint.Record {
		t.Helper()
		r, err := b.Add(t.Context(), b.Green(container))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	add("c1")
	if words() != nil {
		t.Error("a node that is no backend reports containers")
	}
	b.isSignalled()
	b.mustApply(b.greenWith(2, offload(tenant.OffloadPreparing, agenttest.NodePrefix, farNode)))
	check("a backend", "10.0.3.1 1")
	add("c2")
	check("a container started", "10.0.3.1 1", "10.0.3.2 1")
	if _, err := b.Label(t.Context(), "c2", agent.LabelChange{Set: map[string]string{"app": "db"}}); err != nil {
		t.Fatal(err)
	}
	check("a container's app changed", "10.0.3.1 1", "10.0.3.2 2")
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	check("a container stopped", "10.0.3.2 2")
	b.mustApply(b.greenWith(3))
	check("no backend any more")
}

// TestOffloadsOnDisk: all fields survive a restart, files of earlier builds are readable, and an answer to an ADD does
// not bring back earlier endpoints.
func TestOffloadsOnDisk(t *testing.T) {
	b := newBedOfTwo(t)
	o := offload(tenant.OffloadDual, farNode, agenttest.NodePrefix, thirdNode)
	o.Frontends[1].Draining, o.Since = true, 3
	o.Endpoints = []tenant.OffloadedEndpoint{{Address: netip.MustParseAddr("10.0.9.9"), App: 2}}
	b.mustSetTransit("green")
	b.mustApply(b.greenWith(3, o))
	b.Reopen()
	known := func() tenant.Tenant { k, _, _ := b.Tenants.Get("green"); return k.Tenant }
	if got := known().Offloads; len(got) != 1 || !got[0].Equal(o) {
		t.Errorf("the disk has %+v, want %+v", got, o)
	}
	without := b.greenWith(3, o).Tenant
	without.Offloads = []tenant.Offload{o}
	without.Offloads[0].Endpoints = nil
	b.Orchestrator.Tenants["green"] = without
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	if got := known().Offloads; len(got) != 1 || !got[0].Equal(o) {
		t.Errorf("after an ADD the offloads are %+v, want %+v", got, o)
	}

	file := b.Tenants.Path("green")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bad := strings.Replace(string(content), `"epoch": 9`, `"epoch": 0`, 1)
	if bad == string(content) {
		t.Fatalf("the file is %s", content)
	}
	if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.TryReopen(); err == nil || !strings.Contains(err.Error(), "has no epoch") {
		t.Errorf("a damaged file: %v", err)
	}
}

// TestWhyOfABackend: a backend without rules says who has them, rather than what its tables would do.
func TestWhyOfABackend(t *testing.T) {
	b := newBedOfTwo(t)
	for _, container := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), b.Green(container)); err != nil {
			t.Fatal(err)
		}
	}
	b.MustApplyPolicies(webFromDB)
	why := func() ([]agent.Reason, error) {
		return b.Why(agent.Connection{
			Source: netip.MustParseAddr("10.0.3.1"), Destination: netip.MustParseAddr("10.0.3.2"),
			Protocol: policy.TCP, Port: 80,
		})
	}
	b.mustApply(b.greenWith(2, offload(tenant.OffloadDual, agenttest.NodePrefix, farNode)))
	if all, err := why(); err != nil || len(all) != 2 || all[1].Allowed || all[1].By == nil {
		t.Errorf("in phase dual: %+v, %v", all, err)
	}
	b.mustApply(b.greenWith(3, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode)))
	if all, err := why(); err == nil || !strings.Contains(err.Error(), "looked up by frontends: frontend1\n  run on "+
		"one of these nodes: pilaster why 10.0.3.1 10.0.3.2 tcp/80 --tenant green") {
		t.Errorf("in phase active: %+v, %v", all, err)
	}
}

// TestWhyOfAFrontend: it has the rules, and knows the apps of the backend's containers.
func TestWhyOfAFrontend(t *testing.T) {
	b := newBedOfTwo(t)
	b.mustSetTransit("green")
	o := offload(tenant.OffloadActive, farNode, agenttest.NodePrefix)
	web, db := netip.MustParseAddr("10.0.9.1"), netip.MustParseAddr("10.0.9.2")
	o.Endpoints = []tenant.OffloadedEndpoint{{Address: web, App: 1}, {Address: db, App: 2}}
	b.mustApply(b.greenWith(1, o))
	b.MustApplyPolicies(webFromDB)
	for _, c := range []struct {
		from, to netip.Addr
		allowed  bool
	}{{db, web, true}, {web, web, false}, {web, db, true}} {
		all, err := b.Why(agent.Connection{Source: c.from, Destination: c.to, Protocol: policy.TCP, Port: 80})
		if err != nil || len(all) != 2 || !all[0].Allowed || all[1].Allowed != c.allowed {
			t.Errorf("from %v to %v: %+v, %v", c.from, c.to, all, err)
		}
	}
	other := netip.MustParseAddr("10.0.8.8")
	if all, err := b.Why(agent.Connection{Source: db, Destination: other, Protocol: policy.TCP, Port: 80,
		PeerApp: 1}); err != nil || len(all) != 2 || !all[1].Allowed {
		t.Errorf("to another node's container: %+v, %v", all, err)
	}
	b.mustApply(b.greenWith(2))
	if all, err := b.Why(agent.Connection{Source: db, Destination: web, Protocol: policy.TCP, Port: 80}); err != nil ||
		len(all) > 0 {
		t.Errorf("as a frontend no more: %+v, %v", all, err)
	}
}

// TestRoles: what this node does for offloads.
func TestRoles(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	far, third := offload(tenant.OffloadDual, farNode, agenttest.NodePrefix), offload(tenant.OffloadActive, thirdNode,
		farNode)
	far.ID, third.ID = 8, 9
	far.Frontends[0].Draining = true
	b.mustApply(b.greenWith(2, offload(tenant.OffloadActive, agenttest.NodePrefix, farNode), far, third))
	words := ""
	for _, r := range b.Roles() {
		words += fmt.Sprintln(r.Tenant, r.Backend, r.ID, r.Phase, r.Draining)
	}
	if want := "green true 7 active false\ngreen false 8 dual true\n"; words != want {
		t.Errorf("roles %q, want %q", words, want)
	}
}
