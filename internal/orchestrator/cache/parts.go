package cache

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// maxPart is the approximate size in bytes above which an event is sent in several messages.
const maxPart = 4 << 20

// Parts splits a large event into several messages. The first message has everything but the policies, overrides,
// services and slices; deltas with these follow.
func Parts(r *pilasterv1.FollowResponse) []*pilasterv1.FollowResponse {
	if proto.Size(r) <= maxPart {
		return []*pilasterv1.FollowResponse{r}
	}
	r = shallow(r)
	var large pilasterv1.Delta
	switch e := r.Event.(type) {
	case *pilasterv1.FollowResponse_Snapshot:
		s := e.Snapshot
		large = pilasterv1.Delta{Policies: s.Policies, Overrides: s.Overrides, Services: s.Services, Slices: s.Slices}
		s.Policies, s.Overrides, s.Services, s.Slices = nil, nil, nil, nil
	case *pilasterv1.FollowResponse_Delta:
		d := e.Delta
		large = pilasterv1.Delta{Policies: d.Policies, Overrides: d.Overrides, Services: d.Services, Slices: d.Slices}
		d.Policies, d.Overrides, d.Services, d.Slices = nil, nil, nil, nil
	}
	p := parts{of: r, all: []*pilasterv1.FollowResponse{r}}
	distribute(&p, large.Policies, func(d *pilasterv1.Delta) *[]*pilasterv1.Policy { return &d.Policies })
	distribute(&p, large.Overrides, func(d *pilasterv1.Delta) *[]*pilasterv1.Override { return &d.Overrides })
	distribute(&p, large.Services, func(d *pilasterv1.Delta) *[]*pilasterv1.Service { return &d.Services })
	distribute(&p, large.Slices, func(d *pilasterv1.Delta) *[]*pilasterv1.EndpointSlice { return &d.Slices })
	revision := r.Revision
	for _, part := range p.all {
		part.Revision, part.More = 0, true
	}
	last := p.all[len(p.all)-1]
	last.Revision, last.More = revision, false
	return p.all
}

// parts are the messages of a large event.
type parts struct {
	of   *pilasterv1.FollowResponse
	all  []*pilasterv1.FollowResponse
	size int // of the last message, unless it is the first
}

// distribute adds records to the messages, to a field of their deltas.
func distribute[R proto.Message](p *parts, records []R, in func(*pilasterv1.Delta) *[]R) {
	for _, is := range records {
		n := proto.Size(is) + 4 // tag and length
		if p.size += n; len(p.all) == 1 || p.size > maxPart && p.size > n {
			p.size = n
			p.all = append(p.all, &pilasterv1.FollowResponse{
				SpreadMs:     p.of.SpreadMs,
				WithPolicies: p.of.WithPolicies,
				WithServices: p.of.WithServices,
				Event:        &pilasterv1.FollowResponse_Delta{Delta: new(pilasterv1.Delta)},
			})
		}
		to := in(p.all[len(p.all)-1].GetDelta())
		*to = append(*to, is)
	}
}

// shallow copies an event but not its records. Other streams may share the event.
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
