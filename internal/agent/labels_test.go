package agent_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

func (b *bed) overridden() []*pilasterv1.Override {
	b.T.Helper()
	r := b.report(false)
	if len(r.Hosting) != 1 {
		b.T.Fatalf("it says of hosting %v", r.Hosting)
	}
	return r.Hosting[0].Overrides
}

// TestLabelsOfALiveContainer: its address stays, policies on this node use the new labels, the orchestrator is
// notified, and a restart keeps them.
func TestLabelsOfALiveContainer(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	b.MustAdd("c2")
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	if !b.lets(2, 2) || b.lets(1, 1) {
		t.Fatal("the policy is not in force")
	}
	drain(b.Tenants.Changed())
	is, err := b.Label(t.Context(), "default/c1", agent.LabelChange{Set: map[string]string{"app": "db"}})
	if err != nil {
		t.Fatal(err)
	}
	own := r.Attachments[0].Plaintext
	if is.App != 1 || is.AppNow != 2 || is.Labels["app"] != "db" || is.Attachments[0].Plaintext != own {
		t.Errorf("it is %+v", is)
	}
	check := func(when string) {
		t.Helper()
		if b.Driver.Policies["blue"].Overrides[own] != 2 {
			t.Errorf("%s: the packet path has %v", when, b.Driver.Policies["blue"].Overrides)
		}
		if said := b.overridden(); len(said) != 1 || said[0].Address != own.String() || said[0].App != 2 {
			t.Errorf("%s: it says %v", when, said)
		}
	}
	check("labelled")
	select {
	case <-b.Tenants.Changed():
	default:
		t.Error("no notification")
	}
	b.Reopen()
	check("after a start")
	// The node ignores overrides of its own containers from the cluster, because its own state is newer.
	b.MustApplyPolicies(policies.Update{Tenant: "blue", Overrides: map[netip.Addr]address.AppID{own: 1}})
	check("after an old word")

	back := agent.LabelChange{Set: map[string]string{"app": "web"}}
	if is, err = b.Label(t.Context(), own.String(), back); err != nil || is.AppNow != 0 {
		t.Fatalf("back: %+v, %v", is, err)
	}
	if said := b.overridden(); len(said) != 0 || len(b.Driver.Policies["blue"].Overrides) != 0 {
		t.Errorf("its labels are as they were, and it says %v, %v", said, b.Driver.Policies["blue"].Overrides)
	}
	if is, err = b.Label(t.Context(), "1",
		agent.LabelChange{Set: map[string]string{"app": "db"}, Remove: []string{"pod-template-hash"}}); err != nil ||
		len(is.Labels) != 1 ||
		is.AppNow != 2 {
		t.Fatalf("once more: %+v, %v", is, err)
	}
	drain(b.Tenants.Changed())
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	if said := b.overridden(); len(said) != 0 {
		t.Errorf("its container is gone, and it says %v", said)
	}
	select {
	case <-b.Tenants.Changed():
	default:
		t.Error("no notification that the container is gone")
	}
}

func drain(c <-chan struct{}) {
	select {
	case <-c:
	default:
	}
}

func TestLabelsThatAreRefused(t *testing.T) {
	b := newBedOfTwo(t)
	b.MustAdd("c1")
	for _, c := range []struct {
		name string
		q    agent.LabelChange
		kind error
	}{
		{"nothing", agent.LabelChange{}, refusal.ErrInvalid},
		{"a key that is none", agent.LabelChange{Set: map[string]string{"a b": "c"}}, refusal.ErrInvalid},
		{"both", agent.LabelChange{Set: map[string]string{"a": "c"}, Remove: []string{"a"}}, refusal.ErrInvalid},
	} {
		if _, err := b.Label(t.Context(), "1", c.q); !errors.Is(err, c.kind) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := b.Label(t.Context(), "9", agent.LabelChange{Set: map[string]string{"a": "b"}}); !errors.Is(
		err,
		refusal.ErrNotFound,
	) {
		t.Errorf("of no endpoint: %v", err)
	}
	b.Orchestrator.Err = refusal.New(refusal.ErrUnavailable, "away")
	if is, err := b.Label(t.Context(), "1",
		agent.LabelChange{Set: map[string]string{"pod-template-hash": "x"}}); err != nil ||
		is.Labels["pod-template-hash"] != "x" {
		t.Errorf("a label that makes no identity needs the orchestrator: %v", err)
	}
	if _, err := b.Label(t.Context(), "1", agent.LabelChange{Set: map[string]string{"app": "new"}}); !errors.Is(
		err,
		refusal.ErrUnavailable,
	) {
		t.Errorf("of an unknown app: %v", err)
	}
	b.Orchestrator.Err = nil

	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", agenttest.WebFromDB)))
	b.Driver.Fail["SetPolicies"] = agenttest.ErrFake
	if _, err := b.Label(t.Context(), "1", agent.LabelChange{Set: map[string]string{"app": "db"}}); !errors.Is(
		err,
		refusal.ErrUnavailable,
	) {
		t.Errorf("what the packet path refuses: %v", err)
	}
	b.Driver.Fail["SetPolicies"] = nil
	if r, _ := b.Find("1"); tenant.Canonical(tenant.IdentityLabels(r.Labels)) != "app=web" || r.AppNow != 0 {
		t.Errorf("refused, and it is %+v", r)
	}
}

// TestLabelsWhereThePacketSaysTheApp: other nodes need no notification then.
func TestLabelsWhereThePacketSaysTheApp(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	identity := func() (all []uint16) {
		for _, e := range b.Nimitz.Has {
			if s, is := e.(pipeline.Sender); is {
				all = append(all, s.Identity)
			}
		}
		return all
	}
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("db", agenttest.MutedDB)))
	label := func(app string) error {
		_, err := b.Label(t.Context(), "1", agent.LabelChange{Set: map[string]string{"app": app}})
		return err
	}
	if err := label("db"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got := identity(); !slices.Equal(got, []uint16{2}) || b.sends(2) {
			t.Errorf("the switch says app %v, which may begin something: %v", got, b.sends(2))
		}
		if said := b.overridden(); len(said) != 0 {
			t.Errorf("it says %v", said)
		}
		b.Reopen()
	}
	b.Nimitz.Fail = agenttest.ErrFake
	if err := label("web"); !errors.Is(err, refusal.ErrUnavailable) {
		t.Errorf("what the switch refuses: %v", err)
	}
	b.Nimitz.Fail = nil
	if r, _ := b.Find("1"); r.AppNow != 2 || !slices.Equal(identity(), []uint16{2}) {
		t.Errorf("refused, and it is %+v, and %v to the switch", r, identity())
	}
	if err := label("web"); err != nil || !slices.Equal(identity(), []uint16{1}) {
		t.Errorf("back: %v, and %v to the switch", err, identity())
	}
}

// TestLabelsOfAContainerThatMoves: its new address contains the initial app, and the policy tables have the current app
// before packets use the address; labels that a network rejects have no effect.
func TestLabelsOfAContainerThatMoves(t *testing.T) {
	b := newBedThatMoves(t)
	label := func(app string) error {
		_, err := b.Label(t.Context(), "1", agent.LabelChange{Set: map[string]string{"app": app}})
		return err
	}
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("db", agenttest.MutedDB)))
	if err := label("db"); err != nil {
		t.Fatal(err)
	}
	b.step(1)
	inForce := func() (apps []address.AppID) {
		for _, app := range b.Driver.Policies["green"].Overrides {
			apps = append(apps, app)
		}
		return apps
	}
	var first []address.AppID
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "Activate" && r.ID == 1 && first == nil {
			first = append([]address.AppID{}, inForce()...)
		}
	}
	b.movesAll()
	b.Driver.During = nil
	if !slices.Equal(first, []address.AppID{2}) || !slices.Equal(inForce(), []address.AppID{2}) {
		t.Errorf(
			"policy is applied to apps %v when it has the address, and %v then; want 2, as which it was labelled",
			first,
			inForce(),
		)
	}
	b.Nimitz.Fail = agenttest.ErrFake
	if err := label("web"); !errors.Is(err, refusal.ErrUnavailable) {
		t.Errorf("what the switch refuses: %v", err)
	}
	b.Nimitz.Fail = nil
	if r, _ := b.Find("1"); r.AppNow != 2 || !slices.Equal(inForce(), []address.AppID{2}) {
		t.Errorf("it is %+v, and policy is applied to apps %v", r, inForce())
	}
}
