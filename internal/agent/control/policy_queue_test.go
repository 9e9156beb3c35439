package control

import (
	"context"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
)

// An orchestrator of a build without policies, or without services, raises the node's revision without sending their
// changes: the next stream requests all of them.
func TestPoliciesThatWerePassedOver(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	core.MustAdd("c1")
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
	handles := func(revision int64, r *pilasterv1.FollowResponse) {
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
		blue := &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1, Key: agenttest.BlueKey[:]}}}
		return &pilasterv1.FollowResponse{
			WithPolicies: true, WithServices: true,
			Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
				Tenants: []*pilasterv1.Tenant{blue}, WholeTenants: []string{"blue"}, WholePolicies: []string{"blue"},
				WholeServices: []string{"blue"},
			}},
		}
	}
	handles(5, whole())
	beginsWith()
	heartbeat := func(policies, services bool) *pilasterv1.FollowResponse {
		return &pilasterv1.FollowResponse{
			WithPolicies: policies, WithServices: services, Event: &pilasterv1.FollowResponse_Heartbeat{},
		}
	}
	handles(6, heartbeat(true, true))
	beginsWith()
	handles(7, heartbeat(false, true)) // of an older one
	handles(8, heartbeat(true, true))
	beginsWith("blue")
	handles(9, whole())
	beginsWith()
	handles(10, heartbeat(true, false)) // of a build with policies, without services
	handles(11, heartbeat(true, true))
	beginsWith("blue")
	handles(12, whole())
	beginsWith()
}

func policyEvent(revision int64, d *pilasterv1.Delta) *pilasterv1.FollowResponse {
	return &pilasterv1.FollowResponse{
		Revision:     revision,
		WithPolicies: true,
		WithServices: true,
		Event:        &pilasterv1.FollowResponse_Delta{Delta: d},
	}
}

func said(name, text string) *pilasterv1.Policy {
	return &pilasterv1.Policy{Tenant: "blue", Kind: "NetworkPolicy", Namespace: "default", Name: name, Document: text}
}

// policingBed returns the bed of a node with a container of tenant blue. end receives the reason why the stream ends.
func policingBed(t *testing.T, end func(error)) (*policyQueue, *agenttest.Bed) {
	b, core := newLinkBed(t), agenttest.New(t)
	b.link.config.Tenants = core.Tenants
	core.MustAdd("c1")
	core.MustApplyPolicies(policies.Update{Tenant: "blue", Whole: true})
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
	core.Driver.During = func(call string, _ endpoint.Record) {
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
	hear(policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("p0", agenttest.WebFromDB)}}))
	<-entered
	for i := range int64(50) {
		hear(
			policyEvent(
				7+i,
				&pilasterv1.Delta{
					Policies:      []*pilasterv1.Policy{said(fmt.Sprint("p", i+1), agenttest.WebFromDB)},
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
	kept := func() []policies.Document {
		t.Helper()
		disk, err := agent.ReadDiskState(core.Dir)
		if err != nil && !strings.Contains(err.Error(), state.NodeFileName) { // there is none
			t.Fatal(err)
		}
		return disk.Policies["blue"].Documents
	}
	if has := kept(); len(has) != 1 || has[0].Name != "p50" || has[0].Text == "" {
		t.Errorf("it has %v", has)
	}
	hear(policyEvent(57, &pilasterv1.Delta{EndedPolicies: []*pilasterv1.Policy{said("p50", "")}}))
	if err := p.wait(ctx); err != nil || len(kept()) != 0 || p.link.Status().Revision != 57 {
		t.Errorf("after a rest: %v, %v", err, kept())
	}
}

// TestPoliciesThatAreNotKept: if the disk refuses an update, the stream ends at the revision before the update.
func TestPoliciesThatAreNotKept(t *testing.T) {
	var why error
	ctx, end := context.WithCancelCause(t.Context())
	p, core := policingBed(t, func(err error) { why = err; end(err) })
	if err := os.RemoveAll(filepath.Join(core.Dir, state.PoliciesFolder)); err != nil {
		t.Fatal(err)
	}
	deny := &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("deny", agenttest.DenyAll)}}
	if err := p.handleEvent(ctx, policyEvent(6, deny)); err != nil {
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

// TestIsPolicyOnly: only events whose only changes are policy updates may be queued. The test checks every field of a
// message, also
// fields that are added later.
func TestIsPolicyOnly(t *testing.T) {
	mayWait := map[protoreflect.Name]bool{
		"policies":        true,
		"ended_policies":  true,
		"overrides":       true,
		"ended_overrides": true,
		"whole_policies":  true,
	}
	besides := map[protoreflect.Name]bool{
		"delta": true, "revision": true, "spread_ms": true, "with_policies": true, "with_services": true,
		"with_subscriptions": true,
		"identifiers":        true, // handled before
	}
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

// TestPoliciesDelayNoOtherTenant: while the policies of a tenant are compiled, another tenant's first state and
// policies are applied. The stream's revision stays before the first event that is not in force.
func TestPoliciesDelayNoOtherTenant(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	core.MustAdd("c1")
	entered, release := make(chan struct{}), make(chan struct{})
	first := sync.OnceFunc(func() { close(entered); <-release })
	core.Driver.During = func(call string, _ endpoint.Record) {
		if call == "SetPolicies" {
			first()
		}
	}
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
	tell(policyEvent(5, &pilasterv1.Delta{WholePolicies: []string{"blue"}}))
	tell(policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("deny", agenttest.DenyAll)}}))
	<-entered
	blueNow := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{Name: "blue", Ids: []*pilasterv1.TenantId{{Id: 1, Key: agenttest.BlueKey[:]}}}
	}
	red := said("deny", agenttest.DenyAll)
	red.Tenant = "red"
	tell(policyEvent(7, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{red}}))
	tell(&pilasterv1.FollowResponse{WithPolicies: true, Revision: 8, Event: &pilasterv1.FollowResponse_Heartbeat{}})
	tell(&pilasterv1.FollowResponse{WithPolicies: true, Revision: 9, Event: &pilasterv1.FollowResponse_Heartbeat{}})
	if at := b.link.Status().Revision; at != 5 {
		t.Errorf("the node has revision %d, and the event of revision 6 is not in force", at)
	}
	// An event with the state of blue waits.
	blue := []*pilasterv1.Tenant{blueNow()}
	tell(policyEvent(10, &pilasterv1.Delta{Tenants: blue, WholeTenants: []string{"blue"}}))
	close(release)
	for b.link.Status().Revision != 11 {
		tell(&pilasterv1.FollowResponse{
			WithPolicies: true, Revision: 11, Event: &pilasterv1.FollowResponse_Heartbeat{},
		})
	}
	if core.Driver.Policies["blue"].Tables.Subjects == nil {
		t.Error("the policies of blue are not in force")
	}
}

// TestPolicyQueueOfTenants: a tenant's updates are in force while another tenant's wait, and wait returns for it.
func TestPolicyQueueOfTenants(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	p, core := policingBed(t, func(err error) { t.Error(err) })
	defer p.running.Wait()
	defer end()
	slow := &slowTenant{Core: core.Core, name: "blue", entered: make(chan struct{}), release: make(chan struct{})}
	p.core = slow
	deny := &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("deny", agenttest.DenyAll)}}
	if err := p.handleEvent(ctx, policyEvent(6, deny)); err != nil {
		t.Fatal(err)
	}
	<-slow.entered
	for i := range 20 {
		other := said("deny", agenttest.DenyAll)
		other.Tenant = fmt.Sprint("t", i)
		d := &pilasterv1.Delta{Policies: []*pilasterv1.Policy{other}}
		if err := p.handleEvent(ctx, policyEvent(7+int64(i), d)); err != nil {
			t.Fatal(err)
		}
		if err := p.wait(ctx, other.Tenant); err != nil {
			t.Fatal(err)
		}
	}
	if applied, at := slow.applied.Load(), p.link.Status().Revision; applied != 20 || at != 0 {
		t.Errorf("the updates of %d tenants were applied beside, at revision %d; want 20 and 0", applied, at)
	}
	close(slow.release)
	if err := p.wait(ctx); err != nil || p.link.Status().Revision != 26 {
		t.Errorf("%v at revision %d, want 26", err, p.link.Status().Revision)
	}
}

// slowTenant is a core that does not apply the policies of one tenant until it is released.
type slowTenant struct {
	Core
	name             string
	entered, release chan struct{}
	applied          atomic.Int64 // updates of other tenants
}

func (s *slowTenant) ApplyPolicies(ctx context.Context, n policies.Update) error {
	if n.Tenant != s.name {
		s.applied.Add(1)
		return nil
	}
	close(s.entered)
	<-s.release
	return s.Core.ApplyPolicies(ctx, n)
}
