package trace

import (
	"fmt"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// The way of a packet of an offload: the sender's node chooses a frontend, which looks up the rules; the backend, which
// has the session, decides.

// toFrontend adds the steps of a packet whose destination is offloaded, on the sender's node.
func (s *stages) toFrontend(o tenant.Offload, v pipeline.Verdict) error {
	if o.HasFrontend(s.Prefix) {
		return s.front(o)
	}
	s.offerTo(o)
	hop, err := s.Path.NextHop(s.ownVTEP(), pipeline.VTEP(o.Active()[0].Prefix))
	if err != nil {
		s.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	s.step("encap", "to "+choices(o)+", next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN in VNI %d, identity %d; offload %d of node %s", v.VNI, v.Identity, o.ID, o.Node))
	return nil
}

// offerTo says that the next part of the way is on one of the offload's frontends.
func (r *run) offerTo(o tenant.Offload) {
	for _, f := range o.Active() {
		r.response.Frontends = append(r.response.Frontends, f.Prefix.String())
	}
	r.response.Verdict, r.response.Next = Sent, r.response.Frontends[0]
}

// choices names the frontends that packets are sent to.
func choices(o tenant.Offload) string {
	var names []string
	for _, f := range o.Active() {
		names = append(names, f.Node)
	}
	if len(names) == 1 {
		return "frontend " + names[0]
	}
	return "frontend " + strings.Join(names, " or ") + ", by the hash of its tuple"
}

// fronted adds the steps of a packet for whose backend this node is a frontend, if there is one.
func (r *run) fronted() error {
	t, o, is := r.Core.Fronted(r.of)
	if !is || !o.Phase.Fronted() {
		return nil
	}
	r.response.Network, r.response.Vni = t.Network, uint32(t.Current().ID)
	r.response.Source = r.overlayEnd(t.Name, r.src, nil)
	r.response.Destination = r.overlayEnd(t.Name, r.dst, nil)
	r.step("decap", "for offload "+fmt.Sprint(o.ID)+" of node "+o.Node, "nim_fronted_v1")
	return r.front(o)
}

// front adds the steps of this node as a frontend: it never drops what the rules deny, because the backend may have a
// session.
func (r *run) front(o tenant.Offload) error {
	reasons, err := r.Core.Why(r.of)
	if err != nil {
		return err
	}
	pre := &pilasterv1.PreActions{Frontend: r.Node, Backend: o.Node, Revision: r.Revision()}
	for _, reason := range reasons {
		detail, entry := decision(reason)
		r.step("policy", detail, fmt.Sprintf("%s; policies of revision %d", entry, pre.Revision))
		if !reason.Allowed {
			pre.Denied = append(pre.Denied, reason.Direction.String())
		}
	}
	hop, err := r.Path.NextHop(pipeline.VTEP(r.Prefix), pipeline.VTEP(o.Prefix))
	if err != nil {
		r.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	r.step("nsh", "what the rules say to backend "+o.Node+", next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN-GPE to %v, offload %d, epoch %d", pipeline.VTEP(o.Prefix), o.ID, o.Epoch))
	r.response.Pre, r.response.Verdict, r.response.Next = pre, Sent, o.Prefix.String()
	return nil
}

// judged adds the decisions of the policies for some directions. It reports whether all allow the packet, and this node
// goes on with it.
func (s *stages) judged(directions ...policy.Direction) (allowed bool, err error) {
	if s.pre == nil {
		for _, e := range s.table.Entries {
			b, is := e.(pipeline.Backend)
			if !is || !b.Asks || b.VNI != pipeline.VNI(s.response.Vni) {
				continue
			}
			if o, known := s.Core.OffloadOf(s.response.Source.Tenant, b.Offload); known && len(o.Active()) > 0 {
				s.offerTo(o)
				s.step("nsh", "a question to "+choices(o)+": what do the rules say",
					fmt.Sprintf("offload %d, epoch %d", o.ID, o.Epoch))
				return false, nil
			}
		}
		return s.policies(directions...)
	}
	because := fmt.Sprintf("by what frontend %s says, with policies of revision %d, and the session here", s.pre.Frontend,
		s.pre.Revision)
	for _, d := range directions {
		if slices.Contains(s.pre.Denied, d.String()) {
			s.drop("policy", dropreason.PolicyDenied, d.String()+" denied", because)
			return false, nil
		}
		s.step("policy", d.String()+" allowed", because)
	}
	return true, nil
}
