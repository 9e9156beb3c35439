package chaos_test

import (
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// log gives the calls consecutive times: each takes one second, with a second between them.
func log(calls ...entry) []entry {
	for i := range calls {
		calls[i].Asked, calls[i].Answered = time.Duration(2*i)*time.Second, time.Duration(2*i+1)*time.Second
	}
	return calls
}

func made(name string, id uint32) entry { return entry{Ask: create, Name: name, Outcome: done, ID: id} }
func given(name string, id uint32) entry {
	return entry{Ask: rotate, Name: name, Outcome: done, ID: id}
}
func gone(name string) entry      { return entry{Ask: destroy, Name: name, Outcome: done} }
func lost(ask, name string) entry { return entry{Ask: ask, Name: name, Outcome: unknown} }
func no(ask, name, code string) entry {
	return entry{Ask: ask, Name: name, Outcome: refused, Code: code}
}
func node(of int, name, prefix string) entry {
	return entry{Ask: register, Name: name, Of: of, Outcome: done, Prefix: prefix}
}
func app(tenant string, id uint32, label string, number uint32) entry {
	return entry{Ask: resolve, Name: tenant, Label: label, Outcome: done, ID: id, App: number}
}

// stored returns a store with these tenants and their IDs, and with earlier IDs.
func stored(tenants map[string]uint32, had map[uint32]string) final {
	f := final{tenants: map[string]*pilasterv1.Tenant{}, tenantIDs: map[uint32]string{},
		apps: map[string]map[string]uint32{}}
	for id, name := range had {
		f.tenantIDs[id] = name
	}
	for name, id := range tenants {
		f.tenants[name] = &pilasterv1.Tenant{Name: name, Ids: []*pilasterv1.TenantId{{Id: id}}}
		f.tenantIDs[id] = name
	}
	return f
}

// storedNode returns a store with machine 0 as node n1.
func storedNode(prefix string) final {
	id := machine(1, 0)
	return final{
		nodes:    map[string]*pilasterv1.Node{"n1": {Name: "n1", Uuid: id, Prefix: prefix}},
		uuids:    map[string]string{id: "n1"},
		prefixes: map[string]string{prefix: id},
	}
}

func shown(tenant, underlay string) entry {
	return entry{Ask: publish, Name: tenant, Outcome: done, Underlay: underlay}
}

// storedPublished returns a store in which tenant p1 and the others have a publication of the same address.
func storedPublished(others ...string) final {
	f := stored(map[string]uint32{"p1": 1}, map[uint32]string{2: "p2"})
	for _, name := range append(others, "p1") {
		f.tenants[name] = &pilasterv1.Tenant{Name: name, Ids: []*pilasterv1.TenantId{{Id: uint32(name[1] - '0')}},
			Publications: []*pilasterv1.Publication{{Node: "own0", Underlay: "u2"}}}
	}
	return f
}

func ruled(tenant, value, change string) entry {
	return entry{Ask: rule, Name: tenant, Label: value, Outcome: done, Change: change}
}

// storedRuled returns a store in which the policies db and web of tenant r1 have these values.
func storedRuled(db, web string) final {
	f := stored(map[string]uint32{"r1": 1}, nil)
	f.policies = map[string]map[string]string{"r1": {"db": db, "web": web}}
	return f
}

// TestJudge: judge detects planted errors, and accepts correct logs.
func TestJudge(t *testing.T) {
	type ids = map[string]uint32
	type had = map[uint32]string
	for _, c := range []struct {
		name string
		log  []entry
		final
		says string // empty: no error
	}{
		{"created, deleted, created again",
			log(made("t1", 1), gone("t1"), made("t1", 2)), stored(ids{"t1": 2}, had{1: "t1"}),
			""},
		{"id allocated twice", log(made("t1", 1), made("t2", 1)),
			stored(ids{"t1": 1}, nil), "tenant id 1 was allocated"},
		{"id allocated again later", log(made("t1", 1), gone("t1"), made("t1", 1)), stored(ids{"t1": 1}, nil),
			"tenant id 1 was allocated"},
		{"acknowledged tenant lost", log(made("t1", 1)), stored(nil, had{1: "t1"}), "no order"},
		{"acknowledged deletion lost", log(made("t1", 1), gone("t1")), stored(ids{"t1": 1}, nil), "no order"},
		{"claim lost", log(made("t1", 1), gone("t1")), stored(nil, nil), "lost: id 1"},
		{"refused as existing, but it did not exist", log(no(create, "t1", "already_exists")), stored(nil, nil),
			"no order"},
		{"unknown, and executed", log(lost(create, "t1"), gone("t1")), stored(nil, had{1: "t1"}), ""},
		{"unknown, and not executed", log(lost(create, "t1"), no(destroy, "t1", "not_found")), stored(nil, nil),
			""},
		{"unknown, and executed late", log(lost(create, "t1"), no(destroy, "t1", "not_found"), gone("t1")),
			stored(nil, had{1: "t1"}), ""},
		{"unknown, and executed twice", log(lost(create, "t1"), gone("t1"), gone("t1")),
			stored(nil, had{1: "t1", 2: "t1"}), "only 1 of the calls"},
		{"unknown deletion, and the tenant exists again",
			log(made("t1", 1), lost(destroy, "t1"), no(destroy, "t1", "not_found"), no(create, "t1", "already_exists")),
			stored(ids{"t1": 1}, nil), "no order"},
		{"deleted although a node hosts it", log(made("t1", 1), app("t1", 1, "a", 1), gone("t1")),
			stored(nil, had{1: "t1"}), "no order"},
		{"not deleted although no node hosts it", log(made("t1", 1), no(destroy, "t1", "failed_precondition")),
			stored(ids{"t1": 1}, nil), "no order"},
		{"key allocated to two tenants", log(made("k1", 1), made("k2", 2), given("k1", 3), given("k2", 3)),
			stored(ids{"k1": 3, "k2": 2}, had{1: "k1"}), "tenant id 3 was allocated"},
		{"key lost", log(made("k1", 1), given("k1", 2)), stored(ids{"k1": 1}, had{2: "k1"}), "got id 2"},
		{"key", log(made("k1", 1), given("k1", 2)), stored(ids{"k1": 2}, had{1: "k1"}), ""},
		{"app allocated twice", log(made("t1", 1), app("t1", 1, "a", 1), app("t1", 1, "b", 1), gone("t1")),
			stored(nil, had{1: "t1"}), "app (of tenant id)"},
		{"app lost", log(made("t1", 1), app("t1", 1, "a", 1)), stored(ids{"t1": 1}, nil), "lost: app 1"},
		{"app changed", log(made("t1", 1), app("t1", 1, "a", 1), app("t1", 1, "a", 2), gone("t1")),
			stored(nil, had{1: "t1"}), "different apps"},
		{"published", log(made("p1", 1), shown("p1", "u2")), storedPublished(), ""},
		{"published, ended, published",
			log(made("p1", 1), shown("p1", "u2"), entry{Ask: withdraw, Name: "p1", Outcome: done}, shown("p1", "u3")),
			storedPublished(), ""},
		{"ended with its tenant", log(made("p2", 2), shown("p2", "u2"), gone("p2"), no(withdraw, "p2", "not_found")),
			stored(nil, had{2: "p2"}), ""},
		{"published twice", log(made("p1", 1), shown("p1", "u2"), shown("p1", "u3")), storedPublished(), "no order"},
		{"publication lost", log(made("p2", 2), shown("p2", "u2")), stored(ids{"p2": 2}, nil), "no order"},
		{"address allocated again", log(made("p1", 1), shown("p1", "u2"), made("p2", 2), shown("p2", "u2"), gone("p2")),
			storedPublished(), "address u2 was allocated"},
		{"address of two tenants", log(made("p1", 1), made("p2", 2), shown("p1", "u2"), lost(publish, "p2")),
			storedPublished("p2"), "address u2 was allocated"},
		{"ruled", log(made("r1", 1), ruled("r1", "0", "created"), ruled("r1", "0", "unchanged"),
			ruled("r1", "1", "configured")), storedRuled("1", "1"), ""},
		{"policies applied, deleted, applied", log(made("r1", 1), ruled("r1", "0", "created"),
			entry{Ask: unrule, Name: "r1", Outcome: done}, no(unrule, "r1", "not_found"), ruled("r1", "0", "created")),
			storedRuled("0", "0"), ""},
		{"policies of a call without a response",
			log(made("r1", 1), entry{Ask: rule, Name: "r1", Label: "2", Outcome: unknown},
				ruled("r1", "1", "configured")), storedRuled("1", "1"), ""},
		{"half of the policies", log(made("r1", 1), ruled("r1", "0", "created"), ruled("r1", "1", "configured")),
			storedRuled("0", "1"), "applied together are"},
		{"policies lost", log(made("r1", 1), ruled("r1", "0", "created"), ruled("r1", "1", "configured")),
			storedRuled("0", "0"), "no order"},
		{"deleted policies present again", log(made("r1", 1), ruled("r1", "0", "created"),
			entry{Ask: unrule, Name: "r1", Outcome: done}), storedRuled("0", "0"), "no order"},
		{"unchanged policies reported as changed",
			log(made("r1", 1), ruled("r1", "0", "created"), ruled("r1", "0", "configured")),
			storedRuled("0", "0"), "no order"},
		{"policies outlast their tenant",
			log(made("r1", 1), ruled("r1", "0", "created"), gone("r1"), made("r1", 2), ruled("r1", "1", "configured")),
			storedRuled("1", "1"), "no order"},
		{"node", log(node(0, "n1", "p"), node(0, "n1", "p")), storedNode("p"), ""},
		{"prefix allocated twice", log(node(0, "n1", "p"), node(0, "n2", "p")),
			storedNode("p"), "prefix p was allocated"},
		{"prefix changed", log(node(0, "n1", "q"), node(0, "n1", "p")), storedNode("p"), "more than one prefix"},
		{"node lost", log(node(0, "n1", "p")), final{prefixes: map[string]string{"p": machine(1, 0)}}, "no order"},
		{"name allocated to two machines", log(node(0, "n1", "p"), node(1, "n1", "q")), storedNode("p"), "no order"},
		{"deleted, and present again", log(node(0, "n1", "p"), entry{Ask: remove, Name: "n1", Outcome: done},
			node(0, "n1", "p")), storedNode("p"), "no order"},
		{"not requested by any client", log(no(remove, "n1", "not_found")), storedNode("p"), "no client requested"},
	} {
		wrong := strings.Join(judge(c.log, c.final), "\n")
		if c.says == "" && wrong != "" || !strings.Contains(wrong, c.says) {
			t.Errorf("%s: judge found %q, want %q", c.name, wrong, c.says)
		}
	}
}
