package cache

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// maxPart is the approximate size in bytes above which an event is sent in several messages.
const maxPart = 4 << 20

// Parts splits a large event into several messages. The first message has everything but the policies and overrides;
// deltas with these follow.
func Parts(r *pilasterv1.FollowResponse) []*pilasterv1.FollowResponse {
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
	part := func(n int) { // starts a new message if a record of n bytes does not fit into the current one
		n += 4 // tag and length
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
