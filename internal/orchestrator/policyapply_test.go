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

// netpol is a NetworkPolicy as people write it.
func netpol(name, more string) string {
	return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: " + name + ", namespace: shop}\nspec:\n  podSelector: {}\n" + more
}

func apply(t *testing.T, s *Server, tenant string, documents ...string) string {
	t.Helper()
	resp, err := operator(
		s.config.RunDir,
	).ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: tenant, Documents: documents}))
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	for _, p := range resp.Msg.Policies {
		// What is there now says the same.
		is, err := operator(
			s.config.RunDir,
		).GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: p.Policy}))
		if err == nil {
			is.Msg.Policy.Document = ""
		}
		if err != nil || !proto.Equal(is.Msg.Policy, p.Policy) || p.Policy.Revision == 0 {
			t.Errorf("answered was %v, and it is %v, %v", p.Policy, is, err)
		}
		said = append(said, p.Policy.Name+" "+strings.ToLower(strings.TrimPrefix(p.Change.String(), "POLICY_CHANGE_")))
	}
	return strings.Join(said, ", ")
}

// TestApplyPolicies: what a person writes reaches nodes that host the tenant, on their streams.
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
	ruled := func(want bool) {
		t.Helper()
		resp, err := n2.Resolve(
			t.Context(),
			connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Labels: map[string]string{"app": "web"}}),
		)
		if err != nil || resp.Msg.HasPolicies != want {
			t.Errorf("who resolves hears %v, %v", resp, err)
		}
	}
	ruled(false)

	if got := apply(t, s, "blue", netpol("a", "  ingress: [{}, {}]\n"), netpol("b", "")); got != "a created, b created" {
		t.Errorf("applied: %s", got)
	}
	first := f1.next(t)
	if d := first.GetDelta(); len(d.GetPolicies()) != 2 || d.Policies[0].Tenant != "blue" ||
		d.Policies[0].Revision != first.Revision ||
		!strings.Contains(d.Policies[0].Document, `"podSelector":{}`) ||
		d.Policies[0].Rules != 2 {
		t.Errorf("n1 heard %v", first)
	}
	if got := apply(t, s, "blue", netpol("a", "  ingress: [{}, {}]\n")+"# as it was\n", netpol("c", "  egress: [{}]\n")); got != "a unchanged, c created" {
		t.Errorf("applied: %s", got)
	}
	if d := f1.next(t).GetDelta(); len(d.GetPolicies()) != 1 || d.Policies[0].Name != "c" {
		t.Errorf("n1 heard %v", d)
	}
	if got := apply(t, s, "blue", netpol("a", "  ingress: [{}, {}]\n")); got != "a unchanged" {
		t.Errorf("applied: %s", got)
	}

	ref := &pilasterv1.Policy{Tenant: "blue", Kind: "NetworkPolicy", Namespace: "shop", Name: "a"}
	got, err := op.GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: ref}))
	if err != nil || !proto.Equal(got.Msg.Policy, first.GetDelta().Policies[0]) {
		t.Errorf("asked for it is %v, %v", got, err)
	}
	listed, err := op.ListPolicies(t.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{}))
	if err != nil || len(listed.Msg.Policies) != 3 ||
		metric(t, s.config.RunDir, "pilaster_orchestrator_policies") != 3 ||
		listed.Msg.Policies[0].Document != "" ||
		listed.Msg.Policies[0].Changed == nil {
		t.Errorf("listed are %v, %v", listed, err)
	}
	deleted, err := op.DeletePolicies(
		t.Context(),
		connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue", Policies: []*pilasterv1.Policy{ref}}),
	)
	if err != nil || len(deleted.Msg.Policies) != 1 {
		t.Errorf("deleted are %v, %v", deleted, err)
	}
	if d := f1.next(t).GetDelta(); len(d.GetEndedPolicies()) != 1 || d.EndedPolicies[0].Name != "a" ||
		len(d.Policies) != 0 {
		t.Errorf("n1 heard %v", d)
	}
	if _, err := op.DeletePolicies(t.Context(), connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue", Documents: []string{netpol("b", "  ingress: []\n")}})); err != nil {
		t.Errorf("by its document: %v", err)
	}
	f1.next(t)
	_, err = op.GetPolicy(t.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: ref}))
	wantCode(t, err, connect.CodeNotFound)
	_, err = op.DeletePolicies(t.Context(), connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue"}))
	wantCode(t, err, connect.CodeInvalidArgument)

	// Another node, later, and the one that comes back.
	ruled(true)
	f2.send(t, hosting("red", "blue"))
	if d := f2.next(t).GetDelta(); len(d.GetTenants()) != 1 || len(d.Policies) != 1 || d.Policies[0].Name != "c" ||
		len(d.WholePolicies) != 1 {
		t.Errorf("the first that n2 heard is %v", d)
	}
	if r := follow(t, n1, &pilasterv1.FollowRequest{HostedTenants: []string{"blue"}}).next(t).GetSnapshot(); len(
		r.GetPolicies(),
	) != 1 ||
		len(r.WholePolicies) != 1 {
		t.Errorf("back, n1 heard %v", r)
	}
}

// A node says what it enforces when it registers; one that enforces nothing is refused, and so are policies that it
// would not enforce.
func TestNodesThatEnforceNothing(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	op := operator(s.config.RunDir)
	createTenant(t, s, "blue")
	n1 := dial(t, s, testNode(1))
	says := func(enforces ...string) {
		t.Helper()
		resp, err := n1.Register(
			t.Context(),
			connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Enforces: enforces}),
		)
		if err != nil {
			t.Fatal(err)
		}
		if said := resp.Msg.Node.Enforces; len(said) > 2 || slices.Contains(said, "later") ||
			slices.Contains(said, "netpila") != slices.Contains(enforces, "netpila") {
			t.Errorf("it said %q, and noted is %q", enforces, said)
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
	asks := func() error {
		_, err := n1.Resolve(
			t.Context(),
			connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Sequence: uint64(time.Now().UnixNano())}),
		)
		return err
	}
	says()
	if err := asks(); err != nil {
		t.Fatal(err)
	}
	wantCode(t, try(false), connect.CodeFailedPrecondition)
	if err := try(true); err != nil {
		t.Fatal(err)
	}
	wantCode(t, asks(), connect.CodeFailedPrecondition)
	says("nimitz")
	wantCode(t, asks(), connect.CodeFailedPrecondition)
	says("netpila", "later", "nimitz", "netpila")
	if err := asks(); err != nil {
		t.Errorf("after its upgrade: %v", err)
	}
	says("netpila", "nimitz")
}

// TestPoliciesThatNoNodeCouldEnforce: two that go each by itself and not together. The second is refused, and is not
// there afterwards.
func TestPoliciesThatNoNodeCouldEnforce(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	n1 := dial(t, s, testNode(1))
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test", Enforces: []string{"netpila"}})); err != nil {
		t.Fatal(err)
	}
	if _, err := n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue", Labels: map[string]string{tenant.NamespaceKey: "shop"}})); err != nil {
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
		t.Fatal(got)
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
		t.Errorf("the tenant has %d policies", len(all))
	}
	if got := apply(t, s, "blue", netpol("a", "")); got != "a configured" {
		t.Fatal(got)
	}
	if got := apply(t, s, "blue", second.Documents...); got != "b created" {
		t.Error(got)
	}

	// What it has already stays so, though no node could enforce it since the tenant has other apps.
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
		t.Error(got)
	}
}

// TestBlocksAreRefused: the call refuses such a block.
func TestBlocksAreRefused(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	_, err := operator(
		s.config.RunDir,
	).ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{netpol("a", "  ingress: [{from: [{ipBlock: {cidr: \"fc22::7/128\"}}]}]\n")}}))
	wantCode(t, err, connect.CodeInvalidArgument)
}

// TestLongPoliciesAreFollowed: what is longer than one message comes in several, over a real connection.
func TestLongPoliciesAreFollowed(t *testing.T) {
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
		t.Fatalf("first it heard %.300v", r)
	}
	got, messages := map[string]bool{}, 1
	for r.More {
		if r.Revision != 0 {
			t.Errorf("message %d has a revision, and there are more", messages)
		}
		r = f.next(t)
		messages++
		for _, p := range r.GetDelta().GetPolicies() {
			got[p.Name] = true
		}
	}
	if len(got) != each*times || messages < 3 || r.Revision == 0 {
		t.Errorf(
			"%d policies came in %d messages, the last at revision %d; want %d in 3 or more",
			len(got),
			messages,
			r.Revision,
			each*times,
		)
	}
}

// TestOverrides: a node says of its own containers which app they are of, and others that host the tenant hear of it;
// not of another's.
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
	say := func(sequence uint64, overrides ...*pilasterv1.Override) *pilasterv1.FollowRequest {
		return &pilasterv1.FollowRequest{
			HostedTenants: []string{"blue"},
			Sequence:      sequence,
			Hosting: []*pilasterv1.Hosting{
				{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}, Overrides: overrides},
			},
		}
	}
	f1.send(t, say(10, &pilasterv1.Override{Address: own, App: 9}))
	if d := f2.next(t).GetDelta(); len(d.GetOverrides()) != 1 || d.Overrides[0].Tenant != "blue" ||
		d.Overrides[0].Address != own ||
		d.Overrides[0].App != 9 {
		t.Errorf("n2 heard %v", d)
	}
	f1.send(t, say(11))
	if d := f2.next(t).GetDelta(); len(d.GetEndedOverrides()) != 1 || d.EndedOverrides[0].Address != own {
		t.Errorf("then n2 heard %v", d)
	}

	// What is refused costs the stream nothing, and its node is told as long as it says so.
	untaken := func(reasons int, words string) {
		t.Helper()
		if r := f2.next(t); r.Refusals == nil || len(r.Refusals.Reasons) != reasons ||
			!strings.Contains(strings.Join(r.Refusals.Reasons, "; "), words) ||
			r.Revision != 0 {
			t.Errorf("n2 heard %v", r)
		}
	}
	f2.send(t, say(12, &pilasterv1.Override{Address: own, App: 9}))
	untaken(1, "node n2 reports another app for "+own)
	f2.send(t, say(13))
	untaken(0, "")
	var wrong []*pilasterv1.Override
	for range cache.MaxReasons + 3 {
		wrong = append(wrong, &pilasterv1.Override{Address: own, App: 9})
	}
	f2.send(t, say(14, wrong...))
	untaken(cache.MaxReasons+1, "; and 3 more")
	f2.send(t, hosting())
	untaken(0, "")

	var many []*pilasterv1.Override
	for range rpc.MaxOverrides + 1 {
		many = append(many, &pilasterv1.Override{Address: own, App: 9})
	}
	f1.send(t, say(15, many...))
	f1.ended(t, connect.CodeInvalidArgument)
}

// TestWarnings: what may not be as its writer means it is said, and applied all the same.
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
		{"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: empty, namespace: " +
			"shop}\n", "all containers of namespace shop"},
	} {
		resp, err := operator(
			s.config.RunDir,
		).ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{c.document}}))
		if err != nil {
			t.Fatalf("%s: %v", c.document, err)
		}
		got := strings.Join(resp.Msg.Policies[0].Warnings, "; ")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s\nwarned of %q, want %q", c.document, got, c.want)
		}
	}
}

// TestUnenforced: that a tenant's policies are not in force on a node is known where it was said, until it is said no
// more.
func TestUnenforced(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createTenant(t, s, "blue")
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "blue", "web")
	f := follow(t, n1, hosting("blue"))
	f.next(t)
	for i, words := range []string{"no room for 7 ports", ""} {
		said := words
		if words != "" { // what a terminal obeys is not passed on
			said = "no\x1broom\nfor\u202e7 ports"
		}
		f.send(
			t,
			&pilasterv1.FollowRequest{
				HostedTenants: []string{"blue"},
				Sequence:      uint64(10 + i),
				Hosting: []*pilasterv1.Hosting{
					{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}, Unenforced: said},
				},
			},
		)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := s.cache.Await(ctx, func() bool { return s.cache.Hosting["blue"]["n1"].GetUnenforced() == words }); err != nil {
			t.Fatalf("%q is not noted: %v", words, err)
		}
		cancel()
		resp, err := operator(
			s.config.RunDir,
		).GetTenant(t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"}))
		if err != nil || len(resp.Msg.Hosting) != 1 || resp.Msg.Hosting[0].Unenforced != words {
			t.Errorf("%q is shown as %v, %v", words, resp, err)
		}
		list, err := operator(
			s.config.RunDir,
		).ListPolicies(t.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{}))
		if err != nil || len(list.Msg.Unenforced) != 1-i ||
			i == 0 &&
				(list.Msg.Unenforced[0].Tenant != "blue" || list.Msg.Unenforced[0].Node != "n1" || list.Msg.Unenforced[0].Unenforced != words) {
			t.Errorf("beside policies %q is shown as %v, %v", words, list, err)
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
