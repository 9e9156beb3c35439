package orchestrator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// netpol returns a NetworkPolicy in YAML.
func netpol(name, more string) string {
	return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n" +
		"metadata: {name: " + name + ", namespace: shop}\nspec:\n  podSelector: {}\n" + more
}

// apply applies documents and returns the name and the change of each policy. It checks that GetPolicy returns the
// same.
func apply(t *testing.T, s *Server, tenant string, documents ...string) string {
	t.Helper()
	op := operator(s.config.RunDir)
	resp, err := op.ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
		Tenant: tenant, Documents: documents,
	}))
	if err != nil {
		t.Fatal(err)
	}
	var applied []string
	for _, p := range resp.Msg.Policies {
		stored, err := op.GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: p.Policy}))
		if err == nil {
			stored.Msg.Policy.Document = ""
		}
		if err != nil || !proto.Equal(stored.Msg.Policy, p.Policy) || p.Policy.Revision == 0 {
			t.Errorf("ApplyPolicies returned %v, GetPolicy %v, %v", p.Policy, stored, err)
		}
		change := strings.ToLower(strings.TrimPrefix(p.Change.String(), "POLICY_CHANGE_"))
		applied = append(applied, p.Policy.Name+" "+change)
	}
	return strings.Join(applied, ", ")
}

// TestApplyPolicies: nodes that host the tenant receive applied policies on their streams.
func TestApplyPolicies(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createTenant(t, s, "blue")
	createTenant(t, s, "red")
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "blue", "web")
	f1, f2 := follow(t, n1, hosting("blue")), follow(t, n2, hosting("red"))
	f1.next(t)
	f2.next(t)
	wantHasPolicies := func(want bool) {
		t.Helper()
		resp, err := n2.Resolve(
			t.Context(),
			connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Labels: map[string]string{"app": "web"}}),
		)
		if err != nil || resp.Msg.HasPolicies != want {
			t.Errorf("Resolve returned %v, %v; want HasPolicies %v", resp, err, want)
		}
	}
	wantHasPolicies(false)

	a := netpol("a", "  ingress: [{}, {}]\n")
	if got := apply(t, s, "blue", a, netpol("b", "")); got != "a created, b created" {
		t.Errorf("got changes %s", got)
	}
	first := f1.next(t)
	if d := first.GetDelta(); len(d.GetPolicies()) != 2 || d.Policies[0].Tenant != "blue" ||
		d.Policies[0].Revision != first.Revision ||
		!strings.Contains(d.Policies[0].Document, `"podSelector":{}`) ||
		d.Policies[0].Rules != 2 {
		t.Errorf("n1 received %v, want policies a and b", first)
	}
	c := netpol("c", "  egress: [{}]\n")
	if got := apply(t, s, "blue", a+"# a comment\n", c); got != "a unchanged, c created" {
		t.Errorf("got changes %s", got)
	}
	if d := f1.next(t).GetDelta(); len(d.GetPolicies()) != 1 || d.Policies[0].Name != "c" {
		t.Errorf("n1 received %v, want policy c only", d)
	}
	if got := apply(t, s, "blue", a); got != "a unchanged" {
		t.Errorf("got changes %s", got)
	}

	ref := &pilasterv1.Policy{Tenant: "blue", Kind: "NetworkPolicy", Namespace: "shop", Name: "a"}
	got, err := op.GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: ref}))
	if err != nil || !proto.Equal(got.Msg.Policy, first.GetDelta().Policies[0]) {
		t.Errorf("GetPolicy returned %v, %v; want the policy that n1 received", got, err)
	}
	listed, err := op.ListPolicies(t.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{}))
	if err != nil || len(listed.Msg.Policies) != 3 ||
		metric(t, s.config.RunDir, "pilaster_orchestrator_policies") != 3 ||
		listed.Msg.Policies[0].Document != "" ||
		listed.Msg.Policies[0].Changed == nil {
		t.Errorf("ListPolicies returned %v, %v; want three policies without documents", listed, err)
	}
	deleted, err := op.DeletePolicies(
		t.Context(),
		connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue", Policies: []*pilasterv1.Policy{ref}}),
	)
	if err != nil || len(deleted.Msg.Policies) != 1 {
		t.Errorf("DeletePolicies returned %v, %v; want one policy", deleted, err)
	}
	if d := f1.next(t).GetDelta(); len(d.GetEndedPolicies()) != 1 || d.EndedPolicies[0].Name != "a" ||
		len(d.Policies) != 0 {
		t.Errorf("n1 received %v, want the end of policy a", d)
	}
	if _, err := op.DeletePolicies(t.Context(), connect.NewRequest(&pilasterv1.DeletePoliciesRequest{
		Tenant: "blue", Documents: []string{netpol("b", "  ingress: []\n")},
	})); err != nil {
		t.Errorf("delete a policy by its document: %v", err)
	}
	f1.next(t)
	_, err = op.GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: ref}))
	wantCode(t, err, connect.CodeNotFound)
	_, err = op.DeletePolicies(t.Context(), connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue"}))
	wantCode(t, err, connect.CodeInvalidArgument)

	// A node that hosts the tenant later receives the policies, and so does a new stream of the first node.
	wantHasPolicies(true)
	f2.send(t, hosting("red", "blue"))
	if d := f2.next(t).GetDelta(); len(d.GetTenants()) != 1 || len(d.Policies) != 1 || d.Policies[0].Name != "c" ||
		len(d.WholePolicies) != 1 {
		t.Errorf("n2 received %v, want the tenant and policy c", d)
	}
	if r := follow(t, n1, hosting("blue")).next(t).GetSnapshot(); len(r.GetPolicies()) != 1 ||
		len(r.WholePolicies) != 1 {
		t.Errorf("n1 received snapshot %v, want policy c", r)
	}
}

// When a node registers, it reports the networks on which it enforces policies. On other networks, the orchestrator
// refuses policies of tenants that the node hosts, and refuses to resolve labels of tenants with policies for it.
func TestNodesWithoutEnforcement(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createTenant(t, s, "blue")
	n1 := dial(t, s, testNode(1))
	register := func(enforces ...string) {
		t.Helper()
		resp, err := n1.Register(
			t.Context(),
			connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Enforces: enforces}),
		)
		if err != nil {
			t.Fatal(err)
		}
		if stored := resp.Msg.Node.Enforces; len(stored) > 2 || slices.Contains(stored, "later") ||
			slices.Contains(stored, "netpila") != slices.Contains(enforces, "netpila") {
			t.Errorf("the node reported %q, the orchestrator stored %q", enforces, stored)
		}
	}
	try := func(force bool) error {
		_, err := op.ApplyPolicies(
			t.Context(),
			connect.NewRequest(
				&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{netpol("a", "")}, Force: force},
			),
		)
		return err
	}
	resolve := func() error {
		_, err := n1.Resolve(
			t.Context(),
			connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Sequence: uint64(time.Now().UnixNano())}),
		)
		return err
	}
	register()
	if err := resolve(); err != nil {
		t.Fatal(err)
	}
	wantCode(t, try(false), connect.CodeFailedPrecondition)
	if err := try(true); err != nil {
		t.Fatal(err)
	}
	wantCode(t, resolve(), connect.CodeFailedPrecondition)
	register("nimitz")
	wantCode(t, resolve(), connect.CodeFailedPrecondition)
	register("netpila", "later", "nimitz", "netpila")
	if err := resolve(); err != nil {
		t.Errorf("resolve after the node reported netpila: %v", err)
	}
	register("netpila", "nimitz")
}

// TestPoliciesBeyondCapacity: a node could enforce each of two policies alone, but not both together. The orchestrator
// refuses the second one, and does not store it.
func TestPoliciesBeyondCapacity(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	n1 := dial(t, s, testNode(1))
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", Enforces: []string{"netpila"},
	})); err != nil {
		t.Fatal(err)
	}
	if _, err := n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{
		Tenant: "blue", Labels: map[string]string{tenant.NamespaceKey: "shop"},
	})); err != nil {
		t.Fatal(err)
	}
	ranges := func(first int) string {
		var b strings.Builder
		b.WriteString("  ingress:\n  - ports:\n")
		for i := range 2049 {
			fmt.Fprintf(&b, "    - {port: %d, endPort: %d}\n", first+i, 40_000+first+i)
		}
		return b.String()
	}
	if got := apply(t, s, "blue", netpol("a", ranges(1))); got != "a created" {
		t.Fatalf("got changes %s, want a created", got)
	}
	second := &pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{netpol("b", ranges(3000))}}
	for _, second.DryRun = range []bool{true, false} {
		_, err := operator(s.config.RunDir).ApplyPolicies(t.Context(), connect.NewRequest(second))
		if wantCode(t, err, connect.CodeResourceExhausted); err != nil &&
			!strings.Contains(err.Error(), "4,098 ranges of ports") {
			t.Error(err)
		}
	}
	if all := s.cache.PoliciesOf("blue"); len(all) != 1 || all[0].Name != "a" {
		t.Errorf("the tenant has %d policies, want policy a only", len(all))
	}
	if got := apply(t, s, "blue", netpol("a", "")); got != "a configured" {
		t.Fatalf("got changes %s, want a configured", got)
	}
	if got := apply(t, s, "blue", second.Documents...); got != "b created" {
		t.Errorf("got changes %s, want b created", got)
	}

	// An existing policy may be applied again unchanged, also if together with the others it exceeds the capacity.
	first := []string{netpol("a", ranges(1))}
	read, err := rpc.ReadPolicies(first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.ApplyPolicies(t.Context(), "blue", read, store.Applying{}); err != nil {
		t.Fatal(err)
	}
	if err := s.cache.Await(t.Context(), func() bool {
		return s.cache.Policies.Of["blue"][cache.PolicyNameOf(read[0])].GetDocument() == read[0].Document
	}); err != nil {
		t.Fatal(err)
	}
	if got := apply(t, s, "blue", first...); got != "a unchanged" {
		t.Errorf("got changes %s, want a unchanged", got)
	}
}

// TestEncryptedCIDRIsRefused: a rule's CIDR may not be in the range of encrypted addresses.
func TestEncryptedCIDRIsRefused(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	document := netpol("a", "  ingress: [{from: [{ipBlock: {cidr: \"fc22::7/128\"}}]}]\n")
	_, err := operator(s.config.RunDir).ApplyPolicies(t.Context(), connect.NewRequest(
		&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{document}}))
	wantCode(t, err, connect.CodeInvalidArgument)
}

// TestSnapshotInSeveralMessages: policies that exceed the size of a message arrive in several, over a real connection.
func TestSnapshotInSeveralMessages(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	long := "annotations: {x: " + strings.Repeat("x", rpc.MaxDocument*9/10) + "}, namespace"
	const each, times = 15, 10
	for i := range times {
		var documents []string
		for j := range each {
			documents = append(
				documents,
				strings.Replace(netpol(fmt.Sprintf("p%d-%d", i, j), ""), "namespace", long, 1),
			)
		}
		apply(t, s, "blue", documents...)
	}
	f := follow(t, registered(t, s, testNode(1)), hosting("blue"))
	r := f.next(t)
	if r.GetSnapshot() == nil || len(r.GetSnapshot().WholePolicies) != 1 {
		t.Fatalf("got first message %.300v, want a snapshot", r)
	}
	got, messages := map[string]bool{}, 1
	for r.More {
		if r.Revision != 0 {
			t.Errorf("message %d has a revision, want one in the last message only", messages)
		}
		r = f.next(t)
		messages++
		for _, p := range r.GetDelta().GetPolicies() {
			got[p.Name] = true
		}
	}
	if len(got) != each*times || messages < 3 || r.Revision == 0 {
		t.Errorf(
			"received %d policies in %d messages, the last with revision %d; want %d in 3 or more",
			len(got),
			messages,
			r.Revision,
			each*times,
		)
	}
}

// TestOverrides: a node may report another app for its own containers. Other nodes that host the tenant receive this
// override. The orchestrator refuses overrides of other nodes' containers.
func TestOverrides(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "blue", "web")
	resolve(t, n2, "blue", "web")
	f1, f2 := follow(t, n1, hosting("blue")), follow(t, n2, hosting("blue"))
	f1.next(t)
	f2.next(t)
	const own = "fd70:696c:6100:1:0:100:500:7"
	report := func(sequence uint64, overrides ...*pilasterv1.Override) *pilasterv1.FollowRequest {
		return &pilasterv1.FollowRequest{
			HostedTenants: []string{"blue"},
			Sequence:      sequence,
			Hosting: []*pilasterv1.Hosting{
				{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}, Overrides: overrides},
			},
		}
	}
	f1.send(t, report(10, &pilasterv1.Override{Address: own, App: 9}))
	if d := f2.next(t).GetDelta(); len(d.GetOverrides()) != 1 || d.Overrides[0].Tenant != "blue" ||
		d.Overrides[0].Address != own ||
		d.Overrides[0].App != 9 {
		t.Errorf("n2 received %v, want the override", d)
	}
	f1.send(t, report(11))
	if d := f2.next(t).GetDelta(); len(d.GetEndedOverrides()) != 1 || d.EndedOverrides[0].Address != own {
		t.Errorf("n2 received %v, want the end of the override", d)
	}

	// A refused override does not end the stream. The node receives the reasons, and then an empty list when it no
	// longer reports the override.
	wantRefusal := func(reasons int, text string) {
		t.Helper()
		if r := f2.next(t); r.Refusals == nil || len(r.Refusals.Reasons) != reasons ||
			!strings.Contains(strings.Join(r.Refusals.Reasons, "; "), text) ||
			r.Revision != 0 {
			t.Errorf("n2 received %v, want %d reasons with %q", r, reasons, text)
		}
	}
	f2.send(t, report(12, &pilasterv1.Override{Address: own, App: 9}))
	wantRefusal(1, "node n2 reports another app for "+own)
	f2.send(t, report(13))
	wantRefusal(0, "")
	var refused []*pilasterv1.Override
	for range cache.MaxReasons + 3 {
		refused = append(refused, &pilasterv1.Override{Address: own, App: 9})
	}
	f2.send(t, report(14, refused...))
	wantRefusal(cache.MaxReasons+1, "; and 3 more")
	f2.send(t, hosting())
	wantRefusal(0, "")

	var many []*pilasterv1.Override
	for range rpc.MaxOverrides + 1 {
		many = append(many, &pilasterv1.Override{Address: own, App: 9})
	}
	f1.send(t, report(15, many...))
	f1.ended(t, connect.CodeInvalidArgument)
}

// TestWarnings: the orchestrator applies policies that are probably not what their author intended, and warns.
func TestWarnings(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	resolve(t, registered(t, s, testNode(1)), "blue", "web")
	if err := s.cache.Await(t.Context(), func() bool { return len(s.cache.Apps["blue"]) == 1 }); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ document, want string }{
		{netpol("all", "  ingress: [{}]\n"), ""},
		{strings.Replace(netpol("web", ""), "podSelector: {}", "podSelector: {matchLabels: {app: web}}", 1), ""},
		{strings.Replace(netpol("typo", ""), "podSelector: {}", "podSelector: {matchLabels: {ap: "+
			"web}}", 1), "it selects by label \"ap\""},
		{strings.Replace(netpol("value", ""), "podSelector: {}", "podSelector: {matchLabels: {app: wbe}}", 1),
			"it selects by label \"app\" with value \"wbe\""},
		{netpol("port", "  ingress: [{ports: [{port: htpp}]}]\n"), "it names port \"htpp\" of TCP"},
		{"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: empty, namespace: " +
			"shop}\n", "all containers of namespace shop"},
	} {
		resp, err := operator(s.config.RunDir).ApplyPolicies(t.Context(), connect.NewRequest(
			&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{c.document}}))
		if err != nil {
			t.Fatalf("%s: %v", c.document, err)
		}
		got := strings.Join(resp.Msg.Policies[0].Warnings, "; ")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s\ngot warnings %q, want %q", c.document, got, c.want)
		}
	}
}

// TestUnenforced: while a node reports that it cannot enforce a tenant's policies, operators see the reason with the
// tenant and with its policies.
func TestUnenforced(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "blue", "web")
	f := follow(t, n1, hosting("blue"))
	f.next(t)
	for i, want := range []string{"no room for 7 ports", ""} {
		reported := want
		if want != "" { // the orchestrator replaces control characters
			reported = "no\x1broom\nfor\u202e7 ports"
		}
		f.send(
			t,
			&pilasterv1.FollowRequest{
				HostedTenants: []string{"blue"},
				Sequence:      uint64(10 + i),
				Hosting: []*pilasterv1.Hosting{
					{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}, Unenforced: reported},
				},
			},
		)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		cached := func() string { return s.cache.Hosting["blue"]["n1"].GetUnenforced() }
		if err := s.cache.Await(ctx, func() bool { return cached() == want }); err != nil {
			t.Fatalf("the cache never has %q: %v", want, err)
		}
		cancel()
		op := operator(s.config.RunDir)
		resp, err := op.GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"}))
		if err != nil || len(resp.Msg.Hosting) != 1 || resp.Msg.Hosting[0].Unenforced != want {
			t.Errorf("GetTenant returned %v, %v; want %q", resp, err, want)
		}
		list, err := op.ListPolicies(t.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{}))
		if err != nil || len(list.Msg.Unenforced) != 1-i {
			t.Fatalf("ListPolicies returned %v, %v; want %q", list, err, want)
		}
		for _, h := range list.Msg.Unenforced {
			if h.Tenant != "blue" || h.Node != "n1" || h.Unenforced != want {
				t.Errorf("ListPolicies returned %v, want %q of tenant blue on node n1", h, want)
			}
		}
	}
	f.send(
		t,
		&pilasterv1.FollowRequest{
			HostedTenants: []string{"blue"},
			Sequence:      12,
			Hosting:       []*pilasterv1.Hosting{{Tenant: "blue", Unenforced: strings.Repeat("x", rpc.MaxProblem+1)}},
		},
	)
	f.ended(t, connect.CodeInvalidArgument)
}
