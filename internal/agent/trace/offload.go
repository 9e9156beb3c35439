package trace

import (
	"fmt"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/tenant"
)

// The way of a packet of an offload: the sender's node chooses a frontend, which looks up the rules; the backend, which
// has the session, decides.

// toFrontend adds the steps of a packet whose destination is offloaded, on the sender's node.
func (s *stages) toFrontend(o tenant.Offload, identity uint16) error {
	if o.HasFrontend(s.Prefix) {
		return s.front(o)
	}
	s.offerTo(o)
	hop, err := s.Path.NextHop(s.ownVTEP(), tenant.TunnelAddress(o.Active()[0].Prefix))
	if err != nil {
		s.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	s.step("encap", "to "+choices(o)+", next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN in VNI %d, identity %d; offload %d of node %s", s.response.Vni, identity, o.ID, o.Node))
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
	hop, err := r.Path.NextHop(tenant.TunnelAddress(r.Prefix), tenant.TunnelAddress(o.Prefix))
	if err != nil {
		r.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	r.step("nsh", "what the rules say to backend "+o.Node+", next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN-GPE to %v, offload %d, epoch %d", tenant.TunnelAddress(o.Prefix), o.ID, o.Epoch))
	r.response.Pre, r.response.Verdict, r.response.Next = pre, Sent, o.Prefix.String()
	return nil
}
