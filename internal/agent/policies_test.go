package agent

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

const denyAll = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"deny"},` +
	`"spec":{"podSelector":{},"policyTypes":["Ingress"]}}`

const webFromDB = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web"},` +
	`"spec":{"podSelector":{"matchLabels":{"app":"web"}},
	"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"db"}}}]}]}}`

func document(name, text string) Document {
	return Document{Kind: "NetworkPolicy", Namespace: "default", Name: name, Text: text}
}

func (b *bed) applyPolicies(n PolicyUpdate) {
	b.t.Helper()
	if err := b.ApplyPolicies(b.t.Context(), n); err != nil {
		b.t.Fatal(err)
	}
}

// lets tells whether what the packet path was given lets TCP to port 80 of an app in from another.
func (b *bed) lets(from, to address.AppID) bool {
	b.driver.mu.Lock()
	defer b.driver.mu.Unlock()
	return b.driver.policies["blue"].Tables.Decide(
		to,
		policy.Ingress,
		from,
		netip.IPv6Unspecified(),
		policy.TCP,
		80,
	).Allowed
}

func TestPoliciesAreInForce(t *testing.T) {
	b := newBed(t)
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if b.driver.policies["blue"].Tables.Subjects != nil {
		t.Error("policies of a tenant that does not live here came in force")
	}
	b.add("c1")
	if !b.lets(1, 1) {
		t.Error("a tenant without policies is policed")
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if b.lets(1, 1) {
		t.Error("a policy is not in force")
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Documents: []Document{document("web", webFromDB)}})
	if b.lets(2, 1) {
		t.Error("an app that is not known matches a selector")
	}
	if err := b.Apply(t.Context(),
		[]TenantState{{Tenant: b.orchestrator.tenants["blue"], Apps: []App{{2, map[string]string{"app": "db"}}}}},
		nil); err != nil {
		t.Fatal(err)
	}
	if !b.lets(2, 1) || b.lets(1, 1) {
		t.Error("an app that has become known is not in force")
	}

	b.reopen()
	if !b.lets(2, 1) || b.lets(1, 1) {
		t.Error("policies are not in force after a start")
	}

	b.applyPolicies(
		PolicyUpdate{
			Tenant:    "blue",
			Overrides: map[netip.Addr]address.AppID{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7"): 2},
		},
	)
	if b.driver.policies["blue"].Overrides[netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7")] != 2 {
		t.Error("an override is not in force")
	}
	b.applyPolicies(
		PolicyUpdate{
			Tenant:         "blue",
			Removed:        []Document{document("deny", ""), document("web", "")},
			EndedOverrides: []netip.Addr{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7")},
		},
	)
	if !b.lets(1, 1) || len(b.driver.policies["blue"].Overrides) != 0 {
		t.Error("policies that have ended are in force")
	}

	b.applyPolicies(PolicyUpdate{Tenant: "blue", Documents: []Document{document("deny", denyAll)}})
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	if len(b.driver.policies) != 0 {
		t.Errorf("policies of a tenant that has left: %v", b.driver.policies)
	}
}

// Policies that cannot be enforced leave the previous ones in force, are reported, and block ADDs of containers they
// would not cover.
func TestPoliciesThatAreRefused(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	for _, c := range []struct {
		name   string
		update PolicyUpdate
		fail   error
	}{
		{"of a newer kind", PolicyUpdate{Tenant: "blue",
			Documents: []Document{{Kind: "Firewall", Name: "f", Text: `{"kind":"Firewall"}`}}}, nil},
		{"too many", PolicyUpdate{Tenant: "blue", Documents: []Document{document("web", webFromDB)}},
			errors.New("no room")},
	} {
		b.driver.fail["SetPolicies"] = c.fail
		b.applyPolicies(c.update)
		if b.lets(1, 1) {
			t.Errorf("%s: what was before is not in force", c.name)
		}
		if problems := b.policyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "tenant blue") {
			t.Errorf("%s: problems %q", c.name, problems)
		}
		if _, err := b.Add(t.Context(), b.request("c2")); !errors.Is(err, refusal.ErrUnavailable) {
			t.Errorf("%s: an endpoint was added: %v", c.name, err)
		}
		b.driver.fail["SetPolicies"] = nil
		b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
		if problems := b.policyProblems(); len(problems) != 0 {
			t.Errorf("%s: problems when all is well again: %q", c.name, problems)
		}
	}
	b.add("c2")
}

// The first container of a tenant with policies waits for these.
func TestFirstContainerWaitsForPolicies(t *testing.T) {
	b := newBed(t)
	b.orchestrator.policies["blue"] = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Add(ctx, b.request("c1")); !errors.Is(err, context.Canceled) {
		t.Fatalf("it did not wait: %v", err)
	}
	if len(b.Endpoints()) != 0 || len(b.tenants.Names()) != 0 {
		t.Fatalf("it left something behind: %v, %v", b.Endpoints(), b.tenants.Names())
	}
	added := make(chan error, 1)
	go func() { _, err := b.Add(t.Context(), b.request("c1")); added <- err }()
	eventually(t, func() error {
		if !b.tenants.isHosted("blue") {
			return errors.New("the tenant is not hosted yet")
		}
		return nil
	})
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	if b.lets(1, 1) {
		t.Error("it was added before its policies were in force")
	}
}

// A build that enforces no policies does not start where there are some, and this one not where they were lost.
func TestPoliciesAreNotLost(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	text := func() string {
		b.t.Helper()
		text, err := os.ReadFile(filepath.Join(b.dir, state.TenantsFolder, "blue.json"))
		if err != nil {
			b.t.Fatal(err)
		}
		return string(text)
	}
	if strings.Contains(text(), "policed") {
		t.Error("a tenant without policies cannot be read by older builds")
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if !strings.Contains(text(), `"policed"`) {
		t.Error("older builds would start and enforce nothing")
	}
	if s, err := ReadDiskState(b.dir); len(s.Policies["blue"].Documents) != 1 || !s.Tenants[0].Policed ||
		strings.Contains(err.Error(), state.PoliciesFolder) { // the bed has no node
		t.Errorf("a dump has %+v, %v", s, err)
	}
	if _, err := ReadDiskState(t.TempDir()); strings.Contains(err.Error(), state.PoliciesFolder) {
		t.Errorf("of a build without policies: %v", err)
	}
	file := filepath.Join(b.dir, state.PoliciesFolder, "blue.json")
	if err := os.Rename(file, file+".lost"); err != nil {
		t.Fatal(err)
	}
	var corrupt *statefile.CorruptError
	if err := b.tryReopen(); !errors.As(err, &corrupt) || corrupt.Path != file {
		t.Errorf("a start without the policies: %v", err)
	}
	if err := os.Rename(file+".lost", file); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true})
	if _, err := os.Stat(file); strings.Contains(text(), "policed") || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("policies that have ended are still there: %v", err)
	}
}

// Policies that could not be enforced are kept and retried with the next update.
func TestRefusedPoliciesAreTriedAgain(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("web", webFromDB)}})
	b.applyPolicies(
		PolicyUpdate{Tenant: "blue", Documents: []Document{{Kind: "Firewall", Name: "f", Text: `{"kind":"Firewall"}`}}},
	)
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Documents: []Document{document("deny", denyAll)}})
	if err := b.Apply(t.Context(),
		[]TenantState{{Tenant: b.orchestrator.tenants["blue"], Apps: []App{{2, map[string]string{"app": "db"}}}}},
		nil); err != nil {
		t.Fatal(err)
	}
	if problems := b.policyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "Firewall") {
		t.Errorf("policies that cannot be parsed are dropped by the next update: %q", problems)
	}
	said := func() string {
		var report pilasterv1.FollowRequest
		b.tenants.Report(&report, false)
		return report.Hosting[0].Unenforced
	}
	if s := said(); !strings.Contains(s, "Firewall") {
		t.Errorf("the node reports %q", s)
	}
	if _, err := b.Add(t.Context(), b.request("c2")); !errors.Is(err, refusal.ErrUnavailable) {
		t.Errorf("an endpoint was added: %v", err)
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Removed: []Document{{Kind: "Firewall", Name: "f"}}})
	if problems := b.policyProblems(); len(problems) != 0 || !b.lets(2, 1) {
		t.Errorf("it has ended, and the others are not in force: %q", problems)
	}
	if s := said(); s != "" {
		t.Errorf("the problem is resolved, but the node reports %q", s)
	}

	b.driver.fail["SetPolicies"] = errFake
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Removed: []Document{document("web", "")}})
	b.driver.fail["SetPolicies"] = nil
	b.add("c2")
	if b.lets(2, 1) {
		t.Error("a container was added under policies from before")
	}
	b.reopen()
	if b.lets(2, 1) {
		t.Error("what came in force later is not on disk")
	}
}

// A tenant whose policies cannot be enforced at the start does not block other tenants: its previous policies stay in
// holds, and no container of it is added.
func TestStartWithPoliciesThatAreRefused(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	b.driver.fail["RestorePolicies"], b.driver.fail["SetPolicies"] = errFake, errFake
	b.driver.during = func(call string, _ endpoint.Record) {
		if call == "RestorePolicies" { // the second try is of none but those that are held
			b.driver.during = func(string, endpoint.Record) { b.driver.fail["RestorePolicies"] = nil }
		}
	}
	b.reopen()
	if b.lets(1, 1) {
		t.Error("what was in force holds no more")
	}
	if problems := b.policyProblems(); len(problems) != 1 || !strings.Contains(problems[0], "tenant blue") {
		t.Errorf("problems %q", problems)
	}
	if _, err := b.Add(t.Context(), b.request("c2")); !errors.Is(err, refusal.ErrUnavailable) ||
		!errors.Is(err, errFake) {
		t.Errorf("an endpoint was added: %v", err)
	}
	b.driver.fail["SetPolicies"] = nil
	b.add("c2")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Removed: []Document{document("deny", "")}})
	if problems := b.policyProblems(); len(problems) != 0 || !b.lets(1, 1) {
		t.Errorf("all is well again: %q", problems)
	}
}

// A container that the node has no room for takes nothing from the others.
func TestRoomForPolicies(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("web", webFromDB)}})
	b.driver.during = func(call string, _ endpoint.Record) {
		b.driver.fail["SetPolicies"] = nil
		if len(b.Endpoints()) > 1 {
			b.driver.fail["SetPolicies"] = errFake
		}
	}
	q := b.request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrUnavailable) || !errors.Is(err, errFake) {
		t.Fatalf("added: %v", err)
	}
	if problems := b.policyProblems(); len(problems) != 0 {
		t.Errorf("problems without that container: %q", problems)
	}
}

// Of a tenant that had no policies the first comes alone, and a container waits for no others.
func TestFirstPolicyOfATenant(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true})
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Documents: []Document{document("deny", denyAll)}})
	b.orchestrator.policies["blue"] = true
	ctx, cancel := context.WithTimeout(t.Context(), policiesWait/2)
	defer cancel()
	q := b.request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(ctx, q); err != nil {
		t.Error(err)
	}
}

// A node receives no policies of a transit tenant without endpoints: its next container waits for the current ones.
func TestPoliciesOfACarriedTenant(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	if err := b.SetTransit(t.Context(), []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("web", webFromDB)}})
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	if !b.tenants.needed("blue") {
		t.Fatal("it is not a transit tenant")
	}
	b.orchestrator.policies["blue"] = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Add(ctx, b.request("c2")); !errors.Is(err, context.Canceled) {
		t.Errorf("it did not wait: %v", err)
	}
	b.reopen()
}

// A container with an id of its tenant that nothing was compiled for yet is policed before it flows.
func TestPoliciesOfANewID(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	rotated := b.orchestrator.tenants["blue"]
	rotated.IDs, rotated.Changes = []tenant.ID{
		{ID: 1, Key: blueKey, OnlyAccepted: true},
		{ID: 7, Key: address.Key{7}},
	}, 1
	b.orchestrator.tenants["blue"] = rotated
	b.driver.fail["CreateDevice"] = errFake
	q := b.request("c2")
	q.Labels = map[string]string{"app": "other"}
	if _, err := b.Add(t.Context(), q); !errors.Is(err, errFake) { // but its answer has added the id
		t.Fatal(err)
	}
	b.driver.fail["CreateDevice"] = nil
	if r := b.add("c3"); r.TenantID != 7 {
		t.Fatalf("it has id %d", r.TenantID)
	}
	if ids := b.driver.policies["blue"].IDs; !slices.Contains(ids, 7) {
		t.Errorf("it is not policed: the packet path knows policies of ids %v", ids)
	}
}

// A tenant's policies go with it in the cluster, and not from what still lives of it.
func TestPoliciesOfADeletedTenant(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if err := b.Apply(t.Context(), nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Removed: []Document{document("deny", "")}})
	if b.lets(1, 1) {
		t.Error("its containers may do what they might not")
	}
}

// What a snapshot repeats costs nothing.
func TestPoliciesThatAreInForceAlready(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	whole := PolicyUpdate{
		Tenant:    "blue",
		Whole:     true,
		Documents: []Document{document("web", webFromDB)},
		Overrides: map[netip.Addr]address.AppID{netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7"): 2},
	}
	b.applyPolicies(whole)
	b.reopen()
	b.driver.calls = nil
	b.applyPolicies(whole)
	if err := b.Apply(t.Context(),
		[]TenantState{{Tenant: b.orchestrator.tenants["blue"], Apps: []App{{1, map[string]string{"app": "web"}}},
			Whole: true}}, nil); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(b.driver.calls, "SetPolicies") {
		t.Error("it was all done again")
	}
	whole.Overrides = nil
	b.applyPolicies(whole)
	if len(b.driver.policies["blue"].Overrides) != 0 {
		t.Error("an override that has ended is in force")
	}
}

// Updates of a transit tenant contain no policies: they are requested when the node hosts the tenant, also if the
// stream resumes.
func TestPoliciesAreAskedFor(t *testing.T) {
	b := newBed(t)
	incomplete := func(want string) {
		t.Helper()
		var said pilasterv1.FollowRequest
		b.tenants.Report(&said, true)
		if got := strings.Join(said.IncompleteTenants, " "); got != want {
			t.Errorf("asked is for %q, want %q", got, want)
		}
	}
	if err := b.SetTransit(t.Context(), []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	if err := b.Apply(t.Context(), []TenantState{{Tenant: b.orchestrator.tenants["blue"], Whole: true}},
		nil); err != nil {
		t.Fatal(err)
	}
	incomplete("")
	b.add("c1")
	incomplete("blue")
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true})
	incomplete("")
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	incomplete("")
	b.add("c1")
	incomplete("blue")
}

// An orchestrator of a build without policies moves a node past what became of them; the next stream is asked for all.
func TestPoliciesThatWerePassedOver(t *testing.T) {
	b, core := newLinkBed(t), newBed(t)
	core.add("c1")
	defer b.run(core)()
	tell := func(r *pilasterv1.FollowResponse) {
		for {
			select {
			case b.cluster.events <- r:
				return
			case <-b.cluster.hosted:
			}
		}
	}
	hears := func(revision int64, r *pilasterv1.FollowResponse) {
		t.Helper()
		r.Revision = revision
		for tell(r); b.link.Status().Revision != revision; {
			tell(&pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}})
		}
	}
	beginsWith := func(incomplete ...string) {
		t.Helper()
		revision := b.link.Status().Revision
		tell(nil)
		for said := range b.cluster.hosted {
			if said.ResumeRevision != revision {
				continue // of the stream before
			}
			if !slices.Equal(said.IncompleteTenants, incomplete) {
				t.Errorf("after revision %d asked is for %q, want %q", revision, said.IncompleteTenants, incomplete)
			}
			return
		}
	}
	whole := func() *pilasterv1.FollowResponse {
		blue := &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1, Key: blueKey[:]}}}
		return &pilasterv1.FollowResponse{
			WithPolicies: true,
			Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
				Tenants: []*pilasterv1.Tenant{blue}, WholeTenants: []string{"blue"}, WholePolicies: []string{"blue"},
			}},
		}
	}
	hears(5, whole())
	beginsWith()
	hears(6, &pilasterv1.FollowResponse{WithPolicies: true, Event: &pilasterv1.FollowResponse_Heartbeat{}})
	beginsWith()
	hears(7, &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}}) // of an older one
	hears(8, &pilasterv1.FollowResponse{WithPolicies: true, Event: &pilasterv1.FollowResponse_Heartbeat{}})
	beginsWith("blue")
	hears(9, whole())
	beginsWith()
}

// A container that needs no request waits as well while earlier ones do.
func TestEachContainerWaitsForPolicies(t *testing.T) {
	b := newBed(t)
	b.orchestrator.policies["blue"] = true
	added := make(chan error, 1)
	go func() { _, err := b.Add(t.Context(), b.request("c1")); added <- err }()
	eventually(t, func() error {
		if b.tenants.endpoints("blue") == 0 {
			return errors.New("no endpoint is counted yet")
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // some get no further than the tenant's lock
		if _, err := b.Add(ctx, b.request("c2")); !errors.Is(err, context.Canceled) {
			t.Fatalf("the second did not wait: %v", err)
		}
	}
	if len(b.Endpoints()) != 0 {
		t.Errorf("before the policies are known there are %v", b.Endpoints())
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	if err := <-added; err != nil {
		t.Error(err)
	}
	b.add("c2")
	if b.lets(1, 1) {
		t.Error("a policy is not in force")
	}
}

// TestContainersWaitForTheFirstStream: the agent receives policy changes of its absence on the first stream, and adds
// no container before.
func TestContainersWaitForTheFirstStream(t *testing.T) {
	b := newBed(t)
	b.add("c1")
	tried := make(chan struct{})
	b.tried = tried
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.Add(ctx, b.request("c2")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("added before the first event: %v", err)
	}
	if n := len(b.Endpoints()); n != 1 {
		t.Fatalf("%d endpoints", n)
	}
	b.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true, Documents: []Document{document("deny", denyAll)}})
	close(tried)
	b.add("c2")
}
