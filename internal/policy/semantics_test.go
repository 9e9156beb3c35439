package policy_test

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// The apps of the tables below. unknown is not among them.
const (
	web address.AppID = 1 + iota // namespace shop, division sales
	db                           // namespace shop, division sales
	ops                          // namespace tools
	bare
	unknown
)

func semanticApps() map[address.AppID]map[string]string {
	httpKey, http80 := tenant.NamedPort("http", 80, "TCP")
	_, http8080 := tenant.NamedPort("http", 8080, "TCP")
	return map[address.AppID]map[string]string{
		web: {
			"app":                                "web",
			"tier":                               "front",
			tenant.NamespaceKey:                  "shop",
			tenant.NamespaceLabelKey("division"): "sales",
			httpKey:                              http80,
		},
		db: {
			"app":                                "db",
			tenant.NamespaceKey:                  "shop",
			tenant.NamespaceLabelKey("division"): "sales",
			httpKey:                              http8080,
		},
		ops:  {"app": "ops", tenant.NamespaceKey: "tools"},
		bare: {"app": "bare"}, // namespace default
	}
}

// A row is one packet and its expected verdict.
type row struct {
	subject   address.AppID
	direction policy.Direction
	remote    address.AppID
	addr      string // default: 192.0.2.1
	port      string // 80/TCP
	allowed   bool
	by        string // part of the rule's name, or noRule; empty: any rule
}

const in, out = policy.Ingress, policy.Egress

const noRule = "none"

func head(kind, name string) string {
	if kind == "NetworkPolicy" {
		return "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {namespace: shop, name: " + name +
			"}, spec: "
	}
	return "{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: " + name +
		"}, spec: "
}

func np(name, spec string) string { return head("NetworkPolicy", name) + spec + "}\n---\n" }
func cnp(name, spec string) string {
	return head("ClusterNetworkPolicy", name) + spec + "}\n---\n"
}

const everyone = "subject: {namespaces: {}}"

func TestSemantics(t *testing.T) {
	for name, c := range map[string]struct {
		policies string
		rows     []row
	}{
		"who is not selected is not restricted": {np("a", "{podSelector: {matchLabels: {app: web}}}"), []row{
			{web, in, ops, "", "80/TCP", false, "shop/a isolates in ingress"},
			{web, out, ops, "", "80/TCP", true, noRule},
			{db, in, ops, "", "80/TCP", true, noRule},
			{bare, in, ops, "", "80/TCP", true, noRule},
			{unknown, in, ops, "", "80/TCP", true, noRule},
		}},
		"a namespace's policy selects in that namespace alone": {np("a", "{podSelector: {}}"), []row{
			{web, in, ops, "", "80/TCP", false, "isolates"}, {db, in, ops, "", "80/TCP", false, "isolates"},
			{ops, in, web, "", "80/TCP", true, ""}, {bare, in, web, "", "80/TCP", true, ""},
		}},
		"rules of egress without policyTypes isolate both ways": {np("a", "{podSelector: {}, egress: [{}]}"), []row{
			{web, in, ops, "", "80/TCP", false, "isolates in ingress"},
			{web, out, ops, "", "80/TCP", true, "egress[0]"},
		}},
		"policyTypes Egress leaves ingress alone, and its rules": {np("a", "{podSelector: {}, policyTypes: [Egress], "+
			"ingress: [{from: [{podSelector: {}}]}]}"), []row{
			{web, in, ops, "", "80/TCP", true, noRule}, {web, in, db, "", "80/TCP", true, noRule},
			{web, out, ops, "", "80/TCP", false, "isolates in egress"},
		}},
		"rules add up": {np("a", "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: db}}}]}]}") +
			np("b", "{podSelector: {matchLabels: {app: web}}, ingress: [{ports: [{port: 443}]}]}"), []row{
			{web, in, db, "", "80/TCP", true, "shop/a ingress[0]"},
			{web, in, ops, "", "443/TCP", true, "shop/b ingress[0]"},
			{web, in, ops, "", "80/TCP", false, "shop/a isolates"},
		}},
		"podSelector alone means the policy's namespace": {np("a", "{podSelector: {}, ingress: [{from: "+
			"[{podSelector: {}}]}]}"), []row{
			{web, in, db, "", "80/TCP", true, "ingress[0]"}, {web, in, ops, "", "80/TCP", false, ""},
			{web, in, bare, "", "80/TCP", false, ""}, {web, in, unknown, "", "80/TCP", false, ""},
		}},
		"both selectors of one peer, or two peers": {np("a", "{podSelector: {}, ingress: [{from: "+
			"[{namespaceSelector: {matchLabels: {division: sales}}, podSelector: {matchLabels: {app: db}}}, "+
			"{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: tools}}}]}]}"), []row{
			{web, in, db, "", "80/TCP", true, ""}, {db, in, web, "", "80/TCP", false, ""},
			{web, in, ops, "", "80/TCP", true, ""}, {web, in, bare, "", "80/TCP", false, ""},
		}},
		"who is not known matches where all are selected": {np("a", "{podSelector: {}, ingress: [{from: "+
			"[{namespaceSelector: {}}]}]}"), []row{
			{web, in, unknown, "", "80/TCP", true, "ingress[0]"}, {web, in, policy.Outside, "", "80/TCP", false, ""},
			{web, in, address.GatewayApp, "", "80/TCP", false, ""},
		}},
		"a selector that is not empty is not for who is not known": {np("a", "{podSelector: {}, ingress: [{from: "+
			"[{namespaceSelector: {matchExpressions: [{key: division, operator: DoesNotExist}]}}]}]}"), []row{
			{web, in, unknown, "", "80/TCP", false, ""}, {web, in, ops, "", "80/TCP", true, ""},
			{web, in, db, "", "80/TCP", false, ""},
		}},
		"NotIn matches where there is no such label": {np("a", "{podSelector: {}, ingress: [{from: "+
			"[{namespaceSelector: {}, podSelector: {matchExpressions: [{key: tier, operator: NotIn, values: "+
			"[front]}]}}]}]}"), []row{
			{db, in, web, "", "80/TCP", false, ""}, {web, in, db, "", "80/TCP", true, ""},
		}},
		"no peers: everyone, also outside": {np("a", "{podSelector: {}, ingress: [{ports: [{port: 80}]}]}"), []row{
			{web, in, policy.Outside, "", "80/TCP", true, ""}, {web, in, unknown, "", "80/TCP", true, ""},
			{web, in, ops, "", "80/UDP", false, ""}, {web, in, ops, "", "0/58", false, ""},
		}},
		"ports": {np("a", "{podSelector: {}, ingress: [{ports: [{port: 80}, {protocol: UDP}, {port: 1000, endPort: "+
			"2000}, {port: 1500, endPort: 1500, protocol: SCTP}]}]}"), []row{
			{web, in, ops, "", "80/TCP", true, ""}, {web, in, ops, "", "81/TCP", false, ""},
			{web, in, ops, "", "7/UDP", true, ""}, {web, in, ops, "", "999/TCP", false, ""},
			{web, in, ops, "", "1000/TCP", true, ""},
			{web, in, ops, "", "2000/TCP", true, ""}, {web, in, ops, "", "2001/TCP", false, ""},
			{web, in, ops, "", "1500/SCTP", true, ""}, {web, in, ops, "", "1501/SCTP", false, ""},
		}},
		"a port's name on ingress is the subject's": {np("a", "{podSelector: {}, ingress: [{ports: [{port: http}]}]}"),
			[]row{
				{web, in, ops, "", "80/TCP", true, ""}, {web, in, ops, "", "8080/TCP", false, ""},
				{db, in, ops, "", "8080/TCP", true, ""}, {db, in, ops, "", "80/TCP", false, ""},
				{db, in, ops, "", "8080/UDP", false, ""},
			}},
		"a port's name on egress is the peer's": {np("a", "{podSelector: {}, policyTypes: [Egress], egress: [{ports: "+
			"[{port: http}]}]}"), []row{
			{web, out, db, "", "8080/TCP", true, ""}, {web, out, db, "", "80/TCP", false, ""},
			{db, out, web, "", "80/TCP", true, ""}, {db, out, ops, "", "80/TCP", false, ""},
			{db, out, unknown, "", "80/TCP", false, ""}, {db, out, policy.Outside, "", "80/TCP", false, ""},
		}},
		"blocks match by address, also containers": {np("a", "{podSelector: {}, policyTypes: [Egress], egress: [{to: "+
			"[{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}, {ipBlock: {cidr: 10.1.2.0/24}}]}]}"), []row{
			{web, out, policy.Outside, "10.0.0.1", "80/TCP", true, ""},
			{web, out, policy.Outside, "10.1.0.1", "80/TCP", false, ""},
			{web, out, policy.Outside, "10.1.2.1", "80/TCP", true, ""},
			{web, out, db, "10.0.0.1", "80/TCP", true, ""}, {web, out, unknown, "11.0.0.1", "80/TCP", false, ""},
		}},
		"a block of IPv6 is not for IPv4": {np("a", "{podSelector: {}, policyTypes: [Egress], egress: [{to: "+
			"[{ipBlock: {cidr: '::/0'}}]}]}"), []row{
			{web, out, policy.Outside, "fd00::1", "80/TCP", true, ""},
			{web, out, policy.Outside, "10.0.0.1", "80/TCP", false, ""},
		}},
		"Admin goes before NetworkPolicies, by priority": {cnp("late",
			"{tier: Admin, priority: 5, "+everyone+", ingress: [{action: Accept, from: [{namespaces: {}}]}]}") +
			cnp("early", "{tier: Admin, priority: 1, "+everyone+", ingress: [{name: no ops, action: Deny, from: "+
				"[{namespaces: {matchLabels: {kubernetes.io/metadata.name: tools}}}]}]}") +
			np("a", "{podSelector: {}}"), []row{
			{web, in, ops, "", "80/TCP", false, `early ingress[0] "no ops"`},
			{web, in, db, "", "80/TCP", true, "late ingress[0]"},
			{web, in, policy.Outside, "", "80/TCP", false, "shop/a isolates"}, {web, out, ops, "", "80/TCP", true, ""},
			{unknown, in, ops, "", "80/TCP", false, "early"},
		}},
		"an unknown app is denied where a deny rule may select it": {cnp("a", "{tier: Admin, priority: "+
			"1, "+everyone+", ingress: [{action: Deny, from: [{namespaces: {matchLabels: "+
			"{kubernetes.io/metadata.name: tools}}}], protocols: [{tcp: {destinationPort: {number: 80}}}]}]}"), []row{
			{web, in, unknown, "", "80/TCP", false, "ClusterNetworkPolicy a ingress[0]"},
			{web, in, unknown, "", "81/TCP", true, noRule}, {web, in, db, "", "80/TCP", true, noRule},
			{web, in, policy.Outside, "", "80/TCP", true, noRule},
		}},
		"and where a rule may pass it to a deny rule": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", "+
			"ingress: [{action: Pass, from: [{namespaces: {matchLabels: {kubernetes.io/metadata.name: tools}}}]},"+
			" {action: Accept, from: [{namespaces: {}}]}]}") + np("b", "{podSelector: {}}"), []row{
			{web, in, unknown, "", "80/TCP", false, "ClusterNetworkPolicy a ingress[0]"},
			{web, in, ops, "", "80/TCP", false, "shop/b isolates"},
			{web, in, db, "", "80/TCP", true, "ClusterNetworkPolicy a ingress[1]"},
		}},
		"but not where an earlier rule accepts everyone": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", "+
			"ingress: [{action: Accept, from: [{namespaces: {}}]}, {action: Deny, from: [{namespaces: "+
			"{matchLabels: {kubernetes.io/metadata.name: tools}}}]}]}"), []row{
			{web, in, unknown, "", "80/TCP", true, "ClusterNetworkPolicy a ingress[0]"},
		}},
		"an unknown app may use any port for a denied name": {cnp("a", "{tier: Baseline, priority: 1,"+
			" "+everyone+", egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{destinationNamedPort: "+
			"http}]}]}"), []row{
			{web, out, unknown, "", "80/TCP", false, "ClusterNetworkPolicy a egress[0]"},
			{web, out, unknown, "", "0/58", true, noRule}, {web, out, db, "", "80/TCP", true, noRule},
			{web, out, db, "", "8080/TCP", false, ""},
		}},
		"of the same priority, the name decides": {cnp("b",
			"{tier: Admin, priority: 1, "+everyone+", ingress: [{action: Deny, from: [{namespaces: {}}]}]}") +
			cnp("a", "{tier: Admin, priority: 1, "+everyone+", ingress: [{action: Accept, from: [{namespaces: {}}]}]}"),
			[]row{{web, in, ops, "", "80/TCP", true, "ClusterNetworkPolicy a"}}},
		"Pass leaves the tier": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", ingress: [{action: Pass, from: "+
			"[{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 80}}}]}, {action: Deny, from: "+
			"[{namespaces: {}}]}]}") +
			cnp("b", "{tier: Baseline, priority: 1, "+everyone+", ingress: [{action: Pass, from: [{namespaces: "+
				"{matchLabels: {division: sales}}}]}, {action: Deny, from: [{namespaces: {}}]}]}"), []row{
			{web, in, ops, "", "81/TCP", false, "ClusterNetworkPolicy a ingress[1]"},
			{web, in, ops, "", "80/TCP", false, "ClusterNetworkPolicy b ingress[1]"},
			{web, in, db, "", "80/TCP", true, ""},
		}},
		"Baseline is not asked where a NetworkPolicy isolates": {cnp("b",
			"{tier: Baseline, priority: 1, "+everyone+", ingress: [{action: Deny, from: [{namespaces: {}}]}]}") +
			np("a", "{podSelector: {matchLabels: {app: web}}, ingress: [{}]}"), []row{
			{web, in, ops, "", "80/TCP", true, "shop/a ingress[0]"},
			{db, in, ops, "", "80/TCP", false, "ClusterNetworkPolicy b"},
		}},
		"rules by address and by label are one order": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", "+
			"egress: [{action: Accept, to: [{networks: [10.0.0.0/8]}]}, {action: Deny, to: [{namespaces: {}}, "+
			"{networks: [0.0.0.0/0, '::/0']}]}]}"), []row{
			{web, out, db, "10.0.0.1", "80/TCP", true, "egress[0]"},
			{web, out, db, "11.0.0.1", "80/TCP", false, "egress[1]"},
			{web, out, policy.Outside, "10.0.0.1", "80/TCP", true, "egress[0]"},
			{web, out, policy.Outside, "fd00::1", "80/TCP", false, "egress[1]"},
		}},
		"destinationNamedPort is of any protocol": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", ingress: "+
			"[{action: Deny, from: [{namespaces: {}}], protocols: [{destinationNamedPort: http}]}]}"), []row{
			{web, in, ops, "", "80/TCP", false, ""}, {web, in, ops, "", "8080/TCP", true, ""},
			{ops, in, web, "", "80/TCP", true, ""},
		}},
		"a subject by pods in namespaces": {cnp("a", "{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: "+
			"{matchLabels: {division: sales}}, podSelector: {matchLabels: {app: db}}}}, ingress: [{action: Deny, "+
			"from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}}]}]}"), []row{
			{db, in, web, "", "80/TCP", false, ""}, {db, in, ops, "", "80/TCP", true, ""},
			{web, in, web, "", "80/TCP", true, ""},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			tables := compiled(t, c.policies)
			for _, r := range c.rows {
				got := r.ask(t, tables)
				by := noRule
				if got.Rule != 0 {
					by = tables.Names[got.Rule].String()
				}
				if got.Allowed != r.allowed || !strings.Contains(by, r.by) || got.WouldDrop {
					t.Errorf("%+v: %+v by %s", r, got, by)
				}
			}
		})
	}
}

func compiled(t *testing.T, text string) policy.Tables {
	t.Helper()
	policies, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	tables, err := policy.Compile("acme", policies, semanticApps(), appsOf(semanticApps()))
	if err != nil {
		t.Fatal(err)
	}
	return tables
}

func (r row) ask(t *testing.T, tables policy.Tables) policy.Decision {
	t.Helper()
	addr := netip.MustParseAddr("192.0.2.1")
	if r.addr != "" {
		addr = netip.MustParseAddr(r.addr)
	}
	port, protocol := parsePort(t, r.port)
	return tables.Decide(r.subject, r.direction, r.remote, addr, protocol, port)
}

// TestAudit: a policy in audit drops nothing, and the decision names the rule that would.
func TestAudit(t *testing.T) {
	audited := strings.Replace(
		np("a", "{podSelector: {matchLabels: {app: web}}, ingress: [{ports: [{port: 80}]}]}"),
		"name: a",
		`name: a, annotations: {pilaster.io/audit: "true"}`,
		1,
	)
	tables := compiled(t, audited+np("b", "{podSelector: {matchLabels: {app: db}}}"))
	for _, c := range []struct {
		row
		drop string
	}{
		{row{web, in, ops, "", "80/TCP", true, ""}, ""},
		{row{web, in, ops, "", "81/TCP", true, ""}, "shop/a isolates"},
		{row{web, out, ops, "", "81/TCP", true, ""}, ""},
		{row{db, in, ops, "", "80/TCP", false, "shop/b isolates"}, ""},
	} {
		got := c.ask(t, tables)
		name := tables.Names[got.AuditRule]
		if got.Allowed != c.allowed || got.WouldDrop != (c.drop != "") || !strings.Contains(name.String(), c.drop) ||
			got.WouldDrop && !name.Audit {
			t.Errorf("%+v: %+v, audit by %+v", c, got, name)
		}
	}
	if s := tables.Subjects[db]; s.Audit != [2]policy.ID{} {
		t.Errorf("no policy in audit selects db, and it has sets of audit: %+v", s)
	}
}

// TestConstantTables: the entries that every set and table has, and the tables of a tenant without policies.
func TestConstantTables(t *testing.T) {
	tables := compiled(t, np("a", "{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{port: 80}]}]}"))
	if _, ok := tables.Subjects[policy.AnyApp]; !ok {
		t.Error("no entry says that the tenant has policies")
	}
	for key, peer := range tables.Peers {
		anyone, ok := tables.Peers[policy.PeerKey{Set: key.Set, App: policy.AnyApp}]
		if !ok || key.App != policy.AnyApp && anyone.Table == peer.Table {
			t.Errorf("%+v: %+v, any other %+v", key, peer, anyone)
		}
		if _, ok := tables.Ports[policy.PortKey{Table: peer.Table, Scope: policy.OtherProtocols}]; !ok {
			t.Errorf("table %x has no entry for other protocols", peer.Table)
		}
	}
	none, err := policy.Compile("acme", nil, semanticApps(), appsOf(semanticApps()))
	if err != nil || len(none.Subjects) != 0 {
		t.Errorf("without policies: %+v, %v", none, err)
	}
	if d := none.Decide(web, in, ops, netip.IPv6Loopback(), policy.TCP, 80); !d.Allowed || d.Rule != 0 {
		t.Errorf("without policies: %+v", d)
	}
}

func TestCompileRefuses(t *testing.T) {
	apps := semanticApps()
	all := policy.Policy{Tier: policy.Admin, Name: "a"}
	for range 1 << 16 {
		all.Rules[policy.Ingress] = append(all.Rules[policy.Ingress], policy.Rule{Action: policy.Deny})
	}
	more := all
	more.Name = "b"
	for want, c := range map[string]struct {
		policies []policy.Policy
		subjects []address.AppID
		apps     map[address.AppID]map[string]string
	}{
		"ClusterNetworkPolicy a twice": {[]policy.Policy{{Name: "a"}, {Name: "a", Tier: policy.Baseline}}, nil,
			apps},
		"app 77 of tenant acme is on this node": {[]policy.Policy{{Name: "a"}}, []address.AppID{77}, apps},
		"65280 is not the number of an app": {[]policy.Policy{{Name: "a"}}, nil,
			map[address.AppID]map[string]string{address.GatewayApp: {}}},
		"more than 65,536 rules":              {[]policy.Policy{all, more}, nil, apps},
		"100,001 policies, more than 100,000": {make([]policy.Policy, policy.MaxPolicies+1), nil, apps},
	} {
		if _, err := policy.Compile("acme", c.policies, c.apps, c.subjects); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func parsePort(t *testing.T, s string) (port uint16, protocol uint8) {
	t.Helper()
	number, name, _ := strings.Cut(s, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	protocols := map[string]uint8{"TCP": policy.TCP, "UDP": policy.UDP, "SCTP": policy.SCTP, "58": 58}
	return uint16(n), protocols[name]
}

// TestManyRulesOfOneApp: only rules of ClusterNetworkPolicies have ranks, so NetworkPolicies may have more rules for
// one app than there are ranks.
func TestManyRulesOfOneApp(t *testing.T) {
	p := policy.Policy{Tier: policy.NetworkPolicy, Name: "a", Isolates: [2]bool{true, false}}
	for i := range 1<<16 + 10 {
		p.Rules[policy.Ingress] = append(
			p.Rules[policy.Ingress],
			policy.Rule{
				Action:   policy.Accept,
				Everyone: true,
				Ports:    []policy.Port{{Protocol: policy.TCP, First: uint16(i%100 + 1), Last: uint16(i%100 + 1)}},
			},
		)
	}
	tables, err := policy.Compile("acme", []policy.Policy{p}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for port, want := range map[uint16]bool{100: true, 101: false} {
		if d := tables.Decide(policy.AnyApp, policy.Ingress, 1, netip.IPv6Loopback(), policy.TCP,
			port); d.Allowed != want {
			t.Errorf("port %d is allowed: %v", port, d.Allowed)
		}
	}
}

// TestHoldUnknown: where a policy may restrict egress, unknown apps cannot open connections; they receive as before.
func TestHoldUnknown(t *testing.T) {
	for name, c := range map[string]struct {
		policies string
		held     bool
	}{
		"of what comes": {np("a", "{podSelector: {matchLabels: {app: web}}}"), false},
		"of what goes":  {np("a", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress]}"), true},
		"a rule, which accepts": {cnp("a", "{tier: Admin, priority: 1, "+everyone+", egress: [{action: Accept, to: "+
			"[{namespaces: {}}]}]}"), true},
		"in audit": {strings.Replace(np("a", "{podSelector: {}, policyTypes: [Egress]}"), "name: a",
			`name: a, annotations: {pilaster.io/audit: "true"}`, 1), false},
	} {
		parsed, err := policy.Parse([]byte(c.policies))
		if err != nil {
			t.Fatal(err)
		}
		tables := compiled(t, c.policies)
		before := tables.Decide(unknown, in, web, netip.IPv6Loopback(), policy.TCP, 80)
		tables.HoldUnknown(parsed)
		if out := tables.Decide(unknown, out, web, netip.IPv6Loopback(), policy.TCP, 80); out.Allowed == c.held {
			t.Errorf("%s: %+v", name, out)
		}
		if after := tables.Decide(unknown, in, web, netip.IPv6Loopback(), policy.TCP, 80); after != before {
			t.Errorf("%s: to it %+v, before %+v", name, after, before)
		}
		if known := tables.Decide(db, out, web, netip.IPv6Loopback(), policy.TCP, 80); !known.Allowed {
			t.Errorf("%s: who is known: %+v", name, known)
		}
	}
}
