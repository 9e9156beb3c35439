package agent_test

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	egressDirect = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true}}
	egressVia    = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true, Via: []tenant.EgressGateway{{
		Node: "n7", Prefix: netip.MustParsePrefix("fd70:696c:6100:7::/64"),
		Address: tenant.EgressAddress(netip.MustParsePrefix("fd70:696c:6100:7::/64"), tenant.FirstGatewayIndex),
	}}}}
)

// setEgress gives tenant blue other rules.
func setEgress(b *bed, rules []tenant.EgressRule) {
	b.T.Helper()
	blue := b.Orchestrator.Tenants["blue"]
	blue.Egress, blue.Changes = rules, blue.Changes+1
	b.Orchestrator.Tenants["blue"] = blue
	if err := b.Apply(b.T.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
		b.T.Fatal(err)
	}
}

// checkEgress fails unless record, container and entries of c1 have the route and an address, or do not.
func checkEgress(b *bed, route, addr bool) endpoint.Attachment {
	b.T.Helper()
	r, ok := b.Store.Find("c1", "eth0")
	if !ok {
		b.T.Fatal("c1 has no record")
	}
	a := r.Attachments[0]
	for where, is := range map[string]endpoint.Record{
		"record": r, "container": b.Driver.Devices[r.ID], "entries": b.Driver.Active[r.ID],
	} {
		has := is.Attachments[0]
		if slices.Contains(has.Routes, endpoint.DefaultRoute) != route || has.Egress.IsValid() != addr ||
			has.Egress != a.Egress {
			b.T.Errorf("%s: %v, %v; want route %t, address %t", where, has.Routes, has.Egress, route, addr)
		}
	}
	used := 0
	if addr {
		used = 1
	}
	if b.EgressUsed() != used {
		b.T.Errorf("%d egress addresses are in use, want %d", b.EgressUsed(), used)
	}
	if err := b.Check(b.T.Context(), agent.CheckRequest{
		ContainerID: "c1", Interface: "eth0", Netns: "/run/netns/c1",
		Addresses: []netip.Prefix{netip.PrefixFrom(a.Address, 128)},
	}); err != nil {
		b.T.Error(err)
	}
	return a
}

// A running container has the default route and an egress address while its tenant's rules require them, after each
// change, and its other address stays. No entry is removed at any time.
func TestEgressOfRunningContainers(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "Deactivate" {
			t.Error("the entries of a running container were removed")
		}
	}
	steps := []struct {
		rules       []tenant.EgressRule
		route, addr bool
	}{
		{egressDirect, true, true},
		{egressVia, true, false},
		{nil, false, false},
		{egressVia, true, false},
		{egressDirect, true, true},
		{[]tenant.EgressRule{{To: endpoint.DefaultRoute}}, false, false},
	}
	checkEgress(b, false, false)
	for i, step := range steps {
		setEgress(b, step.rules)
		select {
		case <-b.MigrationDue():
		default:
			t.Errorf("step %d: the loop was not woken", i)
		}
		if !b.MigrateAll(t.Context()) {
			t.Errorf("step %d: %v", i, b.Problems())
		}
		if a := checkEgress(b, step.route, step.addr); a.Address != r.Attachments[0].Address {
			t.Errorf("step %d: the address is %v by now", i, a.Address)
		}
		calls := len(b.Driver.Calls)
		if setEgress(b, step.rules); !b.MigrateAll(t.Context()) {
			t.Errorf("step %d, once more: %v", i, b.Problems())
		}
		for _, call := range b.Driver.Calls[calls:] {
			if call == "Readdress" || call == "Activate" {
				t.Errorf("step %d: the same rules again caused %s", i, call)
			}
		}
	}
	b.Driver.During = nil
	setEgress(b, egressDirect)
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.MustAdd("c1")
	checkEgress(b, true, true)
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil || b.EgressUsed() != 0 {
		t.Errorf("%v; %d addresses are in use without containers", err, b.EgressUsed())
	}
	b.CheckClean()
}

// A change that fails, or at which the agent or the machine crashes, is repeated until it is done, also if the rules
// have changed back meanwhile, and no address is lost.
func TestEgressIsRetried(t *testing.T) {
	for _, call := range []string{"CanReaddress", "Readdress", "Activate", "crash"} {
		for _, first := range []bool{true, false} {
			for _, back := range []bool{false, true} {
				b := newBed(t)
				b.MustAdd("c1")
				from, to := egressDirect, []tenant.EgressRule(nil)
				if first {
					from, to = to, from
				}
				setEgress(b, from)
				b.MigrateAll(t.Context())
				setEgress(b, to)
				failing := call
				if call == "crash" {
					failing = "Readdress"
				}
				b.Driver.Fail[failing] = agenttest.ErrFake
				done := b.MigrateAll(t.Context())
				if reported := strings.Contains(strings.Join(b.Problems(), "\n"), "made to fail"); done == reported {
					t.Errorf("%s fails: done %t, problems %q", failing, done, b.Problems())
				}
				delete(b.Driver.Fail, failing)
				if call == "crash" {
					b.Reopen()
				}
				if back {
					setEgress(b, from)
					to = from
				}
				if !b.MigrateAll(t.Context()) || len(b.Problems()) > 0 {
					t.Errorf("%s fails: afterwards problems %q", call, b.Problems())
				}
				if checkEgress(b, len(to) > 0, len(to) > 0); t.Failed() {
					t.Fatalf("%s failed, a change to leave: %t, and back: %t", call, first, back)
				}
			}
		}
	}
}

// An endpoint that is added while its tenant gets other rules has what these require.
func TestEgressDuringADD(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c0")
	b.MigrateAll(t.Context())
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "CreateDevice" && r.ContainerID == "c1" {
			b.Driver.During = nil
			setEgress(b, egressDirect)
			<-b.MigrationDue()
			b.MigrateAll(t.Context())
		}
	}
	b.MustAdd("c1")
	select {
	case <-b.MigrationDue():
	default:
		t.Error("the loop was not woken after the ADD")
	}
	if !b.MigrateAll(t.Context()) {
		t.Error(b.Problems())
	}
	r, _ := b.Store.Find("c1", "eth0")
	if a := b.Driver.Active[r.ID].Attachments[0]; !a.Egress.IsValid() || a.Egress != r.Attachments[0].Egress {
		t.Errorf("entries %+v", a)
	}
}

// The answer to an ADD may have other rules before the stream has; running containers follow them too.
func TestEgressByTheAnswerToAnADD(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MigrateAll(t.Context())
	blue := b.Orchestrator.Tenants["blue"]
	blue.Egress, blue.Changes = egressVia, blue.Changes+1
	b.Orchestrator.Tenants["blue"] = blue
	q := b.Request("c2")
	q.Labels = map[string]string{"app": "another"}
	if _, err := b.Add(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.MigrationDue():
	default:
		t.Error("the loop was not woken")
	}
	if !b.MigrateAll(t.Context()) {
		t.Error(b.Problems())
	}
	checkEgress(b, true, false)
	select {
	case <-b.GatewaysChanged():
	default:
		t.Error("the prober of gateways was not woken")
	}
	if got := b.EgressGateways(); len(got) != 1 || !slices.Equal(got[0], egressVia[0].Via) {
		t.Errorf("gateways %v", got)
	}
	for _, c := range []string{"c1", "c2"} {
		if err := b.Delete(t.Context(), c, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.EgressGateways(); len(got) != 0 {
		t.Errorf("gateways without containers: %v", got)
	}
}

// Only the node with the address knows who had it.
func TestFindEgressAddress(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	setEgress(b, egressDirect)
	b.MigrateAll(t.Context())
	own := checkEgress(b, true, true).Egress
	had, since, err := b.FindEgressAddress(own)
	if err != nil || len(had) != 1 || had[0].Container != "c1" || had[0].Tenant != "blue" || !since.Equal(b.Now) {
		t.Errorf("%+v since %v, %v", had, since, err)
	}
	other := netip.MustParsePrefix("fd70:696c:6100:7::/64")
	foreign := netip.MustParsePrefix("2001:db8::/64")
	for a, want := range map[netip.Addr]string{
		tenant.EgressAddress(other, tenant.FirstEgressIndex):   "the prefix " + other.String(),
		egressVia[0].Via[0].Address:                            "of the egress gateway",
		netip.MustParseAddr("2001:db8::1"):                     "not an egress address",
		tenant.EgressAddress(foreign, tenant.FirstEgressIndex): "not an egress address",
	} {
		if _, _, err := b.FindEgressAddress(a); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", a, err, want)
		}
	}
	setEgress(b, egressVia)
	via := egressVia[0].Via[0].Address
	if _, _, err := b.FindEgressAddress(via); err == nil || !strings.Contains(err.Error(), "of tenant blue") {
		t.Errorf("%v: %v, want its tenant", via, err)
	}
}

// The agent says whose address hosts outside see: a container's, or that of a tenant's gateway.
func TestExplainEgress(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	setEgress(b, egressDirect)
	b.MigrateAll(t.Context())
	own := checkEgress(b, true, true).Egress
	if e := b.Explain(own); e.Outside == nil || e.Outside.ContainerID != "c1" || e.Gateway != "" {
		t.Errorf("%v is of %+v", own, e)
	}
	setEgress(b, egressVia)
	if e := b.Explain(egressVia[0].Via[0].Address); e.Outside != nil || e.Gateway != "blue" {
		t.Errorf("the gateway's address is of %+v", e)
	}
}

// Why says which rule decides about a host outside, and about a node, beside the policies.
func TestWhyBeyond(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	own, id := r.Attachments[0], r.TenantID
	other, outside := netip.MustParsePrefix("fd70:696c:6100:7::/64"), netip.MustParseAddr("2001:db8:9::1")
	prefix := netip.MustParsePrefix("2001:db8:9::/48")
	blue := b.Driver.Tenants["blue"]
	alias, err := blue.Gateway(address.DefaultPlan(), other, blue.Of(id))
	if err != nil {
		t.Fatal(err)
	}
	setEgress(b, egressVia)
	here := tenant.NodeAddress(agenttest.NodePrefix)
	hosts, nodes := endpoint.DefaultRoute, address.DefaultPlan().Base
	reached := []dpapi.AccessEntry{{To: nodes, Action: dpapi.AccessNode}}
	entry := func(to netip.Prefix, action dpapi.AccessAction) []dpapi.AccessEntry {
		return []dpapi.AccessEntry{{To: to, Action: action}}
	}
	for name, c := range map[string]struct {
		from, to    netip.Addr
		of, all     []dpapi.AccessEntry // of blue, and of all tenants
		allowed     bool
		because     string
		alsoByRules bool
	}{
		"by a rule": {own.Address, outside, entry(hosts, dpapi.AccessGateway), nil, true,
			"egress rule to ::/0 of tenant blue via n7", true},
		"without rules": {own.Address, outside, nil, nil, false, "no egress rules", true},
		"by no rule":    {own.Address, outside, entry(prefix, dpapi.AccessDeny), nil, false, "no egress rule of", true},
		"to a protected prefix": {own.Address, outside, entry(hosts, dpapi.AccessGateway),
			entry(prefix, dpapi.AccessDeny), false, "no egress rule leads to " + prefix.String(), true},
		"from outside": {outside, own.Plaintext, entry(hosts, dpapi.AccessOutside), nil, false, "only answer", false},
		"to an alias":  {own.Address, alias.Address, reached, nil, true, "reaches nodes in", true},
		"to a node":    {own.Plaintext, tenant.NodeAddress(other), nil, nil, false, "does not reach the node", true},
		"from a node": {tenant.NodeAddress(other), own.Plaintext, reached, nil, true, "nodes in",
			true},
		"from another":     {tenant.NodeAddress(other), own.Address, nil, nil, false, "does not reach the node", true},
		"from the own":     {here, own.Address, nil, nil, true, "own containers", false},
		"to the own":       {own.Address, here, nil, nil, false, "--nodes allow", false},
		"allowed own node": {own.Address, here, reached, nil, true, "reaches nodes", false},
	} {
		b.Driver.Access = map[address.TenantID][]dpapi.AccessEntry{id: c.of, 0: c.all}
		all, err := b.Why(agent.Connection{Source: c.from, Destination: c.to, Protocol: policy.TCP, Port: 80})
		if err != nil || len(all) == 0 || all[0].Allowed != c.allowed || !strings.Contains(all[0].Access, c.because) ||
			(len(all) == 2) != c.alsoByRules {
			t.Errorf("%s: %+v, %v", name, all, err)
		}
	}
}

// A container of a build without services gets the route to them when the agent starts, whatever else it gets or loses.
// Its record stays readable for that build.
func TestRouteToServices(t *testing.T) {
	route := netip.MustParsePrefix("fd70:696c:7300::/40")
	for name, rules := range map[string][]tenant.EgressRule{"none": nil, "leaves": egressDirect} {
		for _, loses := range []bool{false, true} {
			b := newBed(t)
			old := b.MustAdd("c1")
			if !slices.Contains(old.Attachments[0].Routes, route) {
				t.Fatalf("a new container has the routes %v", old.Attachments[0].Routes)
			}
			old.Attachments = slices.Clone(old.Attachments)
			old.Attachments[0].Routes = old.Attachments[0].Routes[:1]
			if loses {
				old.Attachments[0].Routes = append(slices.Clone(old.Attachments[0].Routes), endpoint.DefaultRoute)
			}
			if err := b.Store.Put(old); err != nil {
				t.Fatal(err)
			}
			b.Driver.Devices[old.ID], b.Driver.Active[old.ID] = old, old
			b.Reopen()
			setEgress(b, rules)
			b.Driver.Fail["Readdress"] = agenttest.ErrFake
			if b.MigrateAll(t.Context()) {
				t.Errorf("%s: done although Readdress fails", name)
			}
			delete(b.Driver.Fail, "Readdress")
			var before, after []netip.Prefix
			b.Driver.Moved = func(was, is endpoint.Record) {
				before, after = was.Attachments[0].Routes, is.Attachments[0].Routes
				if slices.Contains(after, route) && !slices.Contains(before, route) {
					b.Driver.Moved = nil
				}
			}
			if !b.MigrateAll(t.Context()) {
				t.Fatalf("%s: %v", name, b.Problems())
			}
			if b.Driver.Moved != nil {
				t.Errorf("%s: the device did not get the route: from %v to %v", name, before, after)
			}
			checkEgress(b, rules != nil, rules != nil)
			r, _ := b.Store.Find("c1", "eth0")
			for where, is := range map[string]endpoint.Record{
				"record": r, "container": b.Driver.Devices[r.ID], "entries": b.Driver.Active[r.ID],
			} {
				if !slices.Contains(is.Attachments[0].Routes, route) {
					t.Errorf("%s: the %s has the routes %v", name, where, is.Attachments[0].Routes)
				}
			}
			file, err := os.ReadFile(b.Store.RecordPath(r.ID))
			if readable := strings.Contains(string(file), `"version": 1,`); err != nil || readable != (rules == nil) {
				t.Errorf("%s: record %s, %v", name, file, err)
			}
		}
	}
}
