package agent

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

func policyEvent(revision int64, d *pilasterv1.Delta) *pilasterv1.FollowResponse {
	return &pilasterv1.FollowResponse{
		Revision:     revision,
		WithPolicies: true,
		Event:        &pilasterv1.FollowResponse_Delta{Delta: d},
	}
}

func said(name, text string) *pilasterv1.Policy {
	return &pilasterv1.Policy{Tenant: "blue", Kind: "NetworkPolicy", Namespace: "default", Name: name, Document: text}
}

// policingBed is of a node with a container of tenant blue; end is called with why the stream ended.
func policingBed(t *testing.T, end func(error)) (*policyQueue, *bed) {
	b, core := newLinkBed(t), newBed(t)
	b.link.config.Tenants = core.tenants
	core.add("c1")
	core.applyPolicies(PolicyUpdate{Tenant: "blue", Whole: true})
	return &policyQueue{link: b.link, core: core.Core, running: new(sync.WaitGroup), end: end}, core
}

// TestPoliciesThatWait: updates that arrive during a compilation are in force after one more, and until then the
// stream's revision does not include them.
func TestPoliciesThatWait(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	p, core := policingBed(t, func(err error) { t.Error(err) })
	defer p.running.Wait()
	defer end()
	entered, release := make(chan struct{}), make(chan struct{})
	compiled := 0
	core.driver.during = func(call string, _ endpoint.Record) {
		if call != "SetPolicies" {
			return
		}
		if compiled++; compiled == 1 {
			close(entered)
			<-release
		}
	}
	hear := func(r *pilasterv1.FollowResponse) {
		t.Helper()
		if err := p.handleEvent(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	hear(policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("p0", webFromDB)}}))
	<-entered
	for i := range int64(50) {
		hear(
			policyEvent(
				7+i,
				&pilasterv1.Delta{
					Policies:      []*pilasterv1.Policy{said(fmt.Sprint("p", i+1), webFromDB)},
					EndedPolicies: []*pilasterv1.Policy{said(fmt.Sprint("p", i), "")},
				},
			),
		)
	}
	if at := p.link.Status().Revision; at != 0 {
		t.Errorf("the node says that it has revision %d, and nothing is in force", at)
	}
	close(release)
	if err := p.wait(ctx); err != nil {
		t.Fatal(err)
	}
	if at := p.link.Status().Revision; compiled != 2 || at != 56 {
		t.Errorf("51 changes were compiled %d times, and the node has revision %d", compiled, at)
	}
	if has := core.policies.m["blue"].documents; len(has) != 1 ||
		has[policyName{"NetworkPolicy", "default", "p50"}].Text == "" {
		t.Errorf("it has %v", has)
	}
	hear(policyEvent(57, &pilasterv1.Delta{EndedPolicies: []*pilasterv1.Policy{said("p50", "")}}))
	if err := p.wait(ctx); err != nil || len(core.policies.m["blue"].documents) != 0 || p.link.Status().Revision != 57 {
		t.Errorf("after a rest: %v, %v", err, core.policies.m["blue"].documents)
	}
}

// TestPoliciesThatAreNotKept: what the disk does not take ends the stream at the revision before it.
func TestPoliciesThatAreNotKept(t *testing.T) {
	var why error
	ctx, end := context.WithCancelCause(t.Context())
	p, core := policingBed(t, func(err error) { why = err; end(err) })
	if err := os.RemoveAll(core.policies.dir); err != nil {
		t.Fatal(err)
	}
	if err := p.handleEvent(ctx,
		policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("deny", denyAll)}})); err != nil {
		t.Fatal(err)
	}
	p.running.Wait()
	if why == nil || p.link.Status().Revision != 0 {
		t.Errorf("the stream ended with %v, at revision %d", why, p.link.Status().Revision)
	}
	if err := p.wait(ctx); err != why {
		t.Errorf("wait returns %v", err)
	}
}

// TestIsOfPolicies: only what nothing else depends on may wait. It goes through all fields that a message has, those
// too that come after this was written.
func TestIsOfPolicies(t *testing.T) {
	mayWait := map[protoreflect.Name]bool{
		"policies":        true,
		"ended_policies":  true,
		"overrides":       true,
		"ended_overrides": true,
		"whole_policies":  true,
	}
	besides := map[protoreflect.Name]bool{"delta": true, "revision": true, "spread_ms": true, "with_policies": true}
	some := &pilasterv1.Delta{Policies: []*pilasterv1.Policy{{Tenant: "blue"}}}
	for f := range fieldsOf(&pilasterv1.Delta{}) {
		if alone := (&pilasterv1.Delta{}); isPolicyOnly(policyEvent(1, set(alone, f))) != mayWait[f.Name()] {
			t.Errorf("%s alone may wait: %v", f.Name(), !mayWait[f.Name()])
		}
		if both := proto.CloneOf(some); isPolicyOnly(policyEvent(1, set(both, f))) != mayWait[f.Name()] {
			t.Errorf("%s beside policies may wait: %v", f.Name(), !mayWait[f.Name()])
		}
	}
	for f := range fieldsOf(&pilasterv1.FollowResponse{}) {
		if f.Name() == "delta" {
			continue
		}
		if event := policyEvent(1, proto.CloneOf(some)); isPolicyOnly(set(event, f)) != besides[f.Name()] {
			t.Errorf("policies in a message with %s may wait: %v", f.Name(), !besides[f.Name()])
		}
	}
	if isPolicyOnly(policyEvent(1, &pilasterv1.Delta{})) {
		t.Error("an event without anything may wait")
	}
}

func fieldsOf(m proto.Message) iter.Seq[protoreflect.FieldDescriptor] {
	return func(yield func(protoreflect.FieldDescriptor) bool) {
		fields := m.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			if !yield(fields.Get(i)) {
				return
			}
		}
	}
}

// set gives a field of a message some value that is not empty.
func set[M proto.Message](m M, f protoreflect.FieldDescriptor) M {
	r := m.ProtoReflect()
	one := func(new func() protoreflect.Value) protoreflect.Value {
		switch f.Kind() {
		case protoreflect.MessageKind:
			return new()
		case protoreflect.StringKind:
			return protoreflect.ValueOfString("x")
		case protoreflect.BoolKind:
			return protoreflect.ValueOfBool(true)
		case protoreflect.Int64Kind:
			return protoreflect.ValueOfInt64(1)
		case protoreflect.Uint32Kind:
			return protoreflect.ValueOfUint32(1)
		}
		panic(f.Kind().String() + " of " + string(f.FullName()))
	}
	if !f.IsList() {
		r.Set(f, one(func() protoreflect.Value { return r.NewField(f) }))
		return m
	}
	list := r.Mutable(f).List()
	list.Append(one(list.NewElement))
	return m
}

// TestTogether: merged updates have the effect of the single updates in order.
func TestTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	names := func() (some []Document) {
		for i := range 4 {
			if r.IntN(3) == 0 {
				some = append(some, document(fmt.Sprint("p", i), fmt.Sprintf(`{"text": %d}`, r.IntN(100))))
			}
		}
		return some
	}
	for range 2000 {
		is, one := newTenantPolicy(), newTenantPolicy()
		begun := PolicyUpdate{
			Documents: names(),
			Overrides: map[netip.Addr]address.AppID{netip.AddrFrom4([4]byte{0: 1}): 9},
		}
		is.apply(begun)
		one.apply(begun)
		var news []PolicyUpdate
		for range 1 + r.IntN(5) {
			n := PolicyUpdate{
				Tenant:    "blue",
				Whole:     r.IntN(6) == 0,
				Documents: names(),
				Removed:   names(),
				Overrides: map[netip.Addr]address.AppID{},
			}
			for i := range byte(3) {
				switch a := netip.AddrFrom4([4]byte{i}); r.IntN(4) {
				case 0:
					n.Overrides[a] = address.AppID(1 + r.IntN(9))
				case 1:
					n.EndedOverrides = append(n.EndedOverrides, a)
				}
			}
			had := maps.Clone(one.documents)
			hadOverrides := maps.Clone(one.overrides)
			news = append(news, n)
			if changed := one.apply(n); !changed &&
				(!maps.Equal(had, one.documents) || !maps.Equal(hadOverrides, one.overrides)) {
				t.Fatalf(
					"%+v changes nothing of %v, %v: now %v, %v",
					n,
					had,
					hadOverrides,
					one.documents,
					one.overrides,
				)
			}
		}
		all := mergeByTenant(news)
		if len(all) != 1 {
			t.Fatalf("%d of one tenant", len(all))
		}
		if is.apply(all[0]); !maps.Equal(is.documents, one.documents) || !maps.Equal(is.overrides, one.overrides) ||
			len(is.parseErrors) != len(one.parseErrors) ||
			len(is.parsed) != len(one.parsed) {
			t.Fatalf(
				"of %+v: together %v, %v; one after the other %v, %v",
				news,
				is.documents,
				is.overrides,
				one.documents,
				one.overrides,
			)
		}
	}
}
