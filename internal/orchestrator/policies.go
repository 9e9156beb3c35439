package orchestrator

import (
	"cmp"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/policy"
)

// policies are what decides which containers of a tenant may speak: its policies, and which containers are of another
// app than their addresses say. Nodes that host the tenant are told, and no others.
type policies struct {
	of               map[string]map[policyName]*pilasterv1.Policy // by tenant
	read             map[string]map[policyName]policy.Policy      // the same, but for those that this build cannot read
	overrides        map[string]map[string]*pilasterv1.Override   // by tenant, address
	changedOverrides *[]store.Event                               // of overrides, in the batch at hand
}

type policyName struct{ kind, namespace, name string }

func nameOf(p *pilasterv1.Policy) policyName { return policyName{p.Kind, p.Namespace, p.Name} }

func newPolicies() policies {
	return policies{
		map[string]map[policyName]*pilasterv1.Policy{},
		map[string]map[policyName]policy.Policy{},
		map[string]map[string]*pilasterv1.Override{},
		new([]store.Event),
	}
}

func (p policies) add(is *pilasterv1.Policy) {
	if p.of[is.Tenant] == nil {
		p.of[is.Tenant], p.read[is.Tenant] = map[policyName]*pilasterv1.Policy{}, map[policyName]policy.Policy{}
	}
	p.of[is.Tenant][nameOf(is)] = is
	delete(p.read[is.Tenant], nameOf(is))
	if read, err := policy.ParseKept(is.Kind, []byte(is.Document)); err == nil { // of another build's, nodes say what they make of it
		p.read[is.Tenant][nameOf(is)] = read
	}
}

func (p policies) remove(was *pilasterv1.Policy) {
	delete(p.read[was.Tenant], nameOf(was))
	if delete(p.of[was.Tenant], nameOf(was)); len(p.of[was.Tenant]) == 0 {
		p.removeAll(was.Tenant)
	}
}

func (p policies) removeAll(tenant string) {
	delete(p.of, tenant)
	delete(p.read, tenant)
}

// override takes note of what a node says of its containers, as it was and as it is. No other node has these addresses.
func (p policies) override(was, is *pilasterv1.Hosting) {
	said := map[string]bool{}
	for _, o := range is.Overrides {
		said[o.Address] = true
		o = &pilasterv1.Override{Tenant: is.Tenant, Address: o.Address, App: o.App}
		if proto.Equal(p.overrides[is.Tenant][o.Address], o) {
			continue
		}
		if p.overrides[is.Tenant] == nil {
			p.overrides[is.Tenant] = map[string]*pilasterv1.Override{}
		}
		p.overrides[is.Tenant][o.Address] = o
		*p.changedOverrides = append(*p.changedOverrides, store.Event{Override: o})
	}
	for _, o := range was.GetOverrides() {
		if said[o.Address] {
			continue
		}
		if delete(p.overrides[is.Tenant], o.Address); len(p.overrides[is.Tenant]) == 0 {
			delete(p.overrides, is.Tenant)
		}
		*p.changedOverrides = append(
			*p.changedOverrides,
			store.Event{EndedOverride: &pilasterv1.Override{Tenant: is.Tenant, Address: o.Address}},
		)
	}
}

// takeOverrides takes what has changed of overrides.
func (p policies) takeOverrides() []store.Event {
	news := *p.changedOverrides
	*p.changedOverrides = nil
	return news
}

func policyTenantOf(e store.Event) string {
	return cmp.Or(e.Policy.GetTenant(), e.EndedPolicy.GetTenant(), e.Override.GetTenant(), e.EndedOverride.GetTenant())
}

// addWhole adds all of a tenant's.
func (p policies) addWhole(d *pilasterv1.Delta, tenant string) {
	d.Policies = slices.AppendSeq(d.Policies, maps.Values(p.of[tenant]))
	d.Overrides = slices.AppendSeq(d.Overrides, maps.Values(p.overrides[tenant]))
	d.WholePolicies = append(d.WholePolicies, tenant)
}

// appendPolicy adds an event, if it is of policies that the node is told of.
func (f *subscriber) policy(d *pilasterv1.Delta, e store.Event) bool {
	if !f.hosted[policyTenantOf(e)] {
		return false
	}
	switch {
	case e.Policy != nil:
		d.Policies = append(d.Policies, e.Policy)
	case e.EndedPolicy != nil:
		d.EndedPolicies = append(d.EndedPolicies, e.EndedPolicy)
	case e.Override != nil:
		d.Overrides = append(d.Overrides, e.Override)
	case e.EndedOverride != nil:
		d.EndedOverrides = append(d.EndedOverrides, e.EndedOverride)
	}
	return true
}

// eventCost is how much of what is remembered for streams events are: a policy may be as long as hundreds of other
// records.
func eventCost(events []store.Event) int {
	n := len(events)
	for _, e := range events {
		n += len(e.Policy.GetDocument()) / 512
	}
	return n
}

// maxPart is about how long each message of an event is that goes on in others, in bytes.
const maxPart = 4 << 20

// parts is an event in as many messages as its policies and overrides take. What else it has is in the first.
func parts(r *pilasterv1.FollowResponse) []*pilasterv1.FollowResponse {
	if proto.Size(r) <= maxPart {
		return []*pilasterv1.FollowResponse{r}
	}
	var policies []*pilasterv1.Policy
	var overrides []*pilasterv1.Override
	r = shallow(r)
	switch e := r.Event.(type) {
	case *pilasterv1.FollowResponse_Snapshot:
		policies, e.Snapshot.Policies = e.Snapshot.Policies, nil
		overrides, e.Snapshot.Overrides = e.Snapshot.Overrides, nil
	case *pilasterv1.FollowResponse_Delta:
		policies, e.Delta.Policies = e.Delta.Policies, nil
		overrides, e.Delta.Overrides = e.Delta.Overrides, nil
	}
	all := []*pilasterv1.FollowResponse{r}
	d, size := new(pilasterv1.Delta), 0
	part := func(n int) { // has room for one more
		n += 4 // what goes before it
		if size += n; size > maxPart && size > n {
			all = append(
				all,
				&pilasterv1.FollowResponse{
					SpreadMs:     r.SpreadMs,
					WithPolicies: r.WithPolicies,
					Event:        &pilasterv1.FollowResponse_Delta{Delta: d},
				},
			)
			d, size = new(pilasterv1.Delta), n
		}
	}
	for _, p := range policies {
		part(proto.Size(p))
		d.Policies = append(d.Policies, p)
	}
	for _, o := range overrides {
		part(proto.Size(o))
		d.Overrides = append(d.Overrides, o)
	}
	if size > 0 {
		all = append(
			all,
			&pilasterv1.FollowResponse{
				SpreadMs:     r.SpreadMs,
				WithPolicies: r.WithPolicies,
				Event:        &pilasterv1.FollowResponse_Delta{Delta: d},
			},
		)
	}
	revision := r.Revision
	for _, part := range all {
		part.Revision, part.More = 0, true
	}
	last := all[len(all)-1]
	last.Revision, last.More = revision, false
	return all
}

// shallow is an event of its own with the same records: others may have the event as well.
func shallow(r *pilasterv1.FollowResponse) *pilasterv1.FollowResponse {
	event := func(of proto.Message) proto.Message {
		to := of.ProtoReflect().New()
		of.ProtoReflect().
			Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool { to.Set(field, v); return true })
		return to.Interface()
	}
	r = event(r).(*pilasterv1.FollowResponse)
	switch e := r.Event.(type) {
	case *pilasterv1.FollowResponse_Snapshot:
		r.Event = &pilasterv1.FollowResponse_Snapshot{Snapshot: event(e.Snapshot).(*pilasterv1.Snapshot)}
	case *pilasterv1.FollowResponse_Delta:
		r.Event = &pilasterv1.FollowResponse_Delta{Delta: event(e.Delta).(*pilasterv1.Delta)}
	}
	return r
}
