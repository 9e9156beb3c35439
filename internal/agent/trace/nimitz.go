package trace

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
)

// pipelined adds the stages of network nimitz, or of another network that has them, if an end is on this node.
// Addresses do not identify a tenant there.
func (r *run) pipelined(ctx context.Context, from, to []agent.OverlayMatch) error {
	sender, receiver := r.ofTenant(from), r.ofTenant(to)
	known := map[string]bool{}
	for _, side := range []map[string]*endpoint.Record{sender, receiver} {
		for name := range side {
			known[name] = true
		}
	}
	names := slices.Sorted(maps.Keys(known))
	if len(names) > 1 {
		return refusal.New(refusal.ErrNever,
			"containers of tenants %s on this node use %v or %v; select one, for example --tenant %s",
			strings.Join(names, ", "), r.of.Source, r.of.Destination, names[0])
	}
	if len(names) == 0 {
		return r.fronted()
	}
	name := names[0]
	stages, found := r.stagesOf(sender[name], receiver[name])
	if !found {
		return nil
	}
	r.response.Network = stages.network
	for _, e := range []*endpoint.Record{sender[name], receiver[name]} {
		if e != nil {
			r.response.Vni = uint32(e.TenantID)
		}
	}
	r.response.Source = r.overlayEnd(name, r.src, sender[name])
	r.response.Destination = r.overlayEnd(name, r.dst, receiver[name])
	var err error
	if stages.table.Entries, err = stages.its.Entries(ctx); err != nil {
		return fmt.Errorf("read the entries of network %s: %w", stages.network, err)
	}
	if e := sender[name]; e != nil {
		return stages.from(pipeline.Packet{From: pipeline.Port(e.ID), Src: r.src, Dst: r.dst},
			fmt.Sprintf("from %s", r.response.Source.Device))
	}
	vni := pipeline.VNI(receiver[name].TenantID)
	back := stages.routeTo(vni, r.src)
	r.response.Next = stages.nodeWith(back.VTEP)
	return stages.from(pipeline.Packet{
		From: pipeline.VXLAN, Outer: back.VTEP, VNI: cmp.Or(back.Wire, vni), Identity: uint16(r.of.PeerApp),
		Src: r.src, Dst: r.dst,
	}, "")
}

// stagesOf returns the stages of the network of which an end on this node has its address; false if there are none.
func (r *run) stagesOf(sender, receiver *endpoint.Record) (*stages, bool) {
	for _, end := range []struct {
		e *endpoint.Record
		a netip.Addr
	}{{sender, r.src}, {receiver, r.dst}} {
		if end.e == nil {
			continue
		}
		for _, at := range end.e.Attachments {
			if its, found := r.Pipelines[at.Network]; found && at.Address == end.a {
				table := pipeline.Table{Region: r.Plan.Base, Pool: its.Pool}
				return &stages{run: r, network: at.Network, its: its, table: table}, true
			}
		}
	}
	return nil, false
}

// ofTenant returns the endpoints of this node among the matches, by tenant.
func (r *run) ofTenant(matches []agent.OverlayMatch) map[string]*endpoint.Record {
	here := map[string]*endpoint.Record{}
	for _, m := range matches {
		if m.Endpoint != nil && (r.of.Tenant == "" || r.of.Tenant == m.Tenant) {
			here[m.Tenant] = m.Endpoint
		}
	}
	return here
}

func (r *run) overlayEnd(name string, address netip.Addr, e *endpoint.Record) *pilasterv1.TraceEnd {
	end := &pilasterv1.TraceEnd{Address: address.String(), Tenant: name}
	if e != nil {
		r.addEndpoint(end, *e)
	}
	return end
}

// stages is a run through the stages of network nimitz.
type stages struct {
	*run
	network string
	its     Pipeline
	table   pipeline.Table
}

// routeTo returns the entry of an address of a tenant; an empty one if this node does not know it.
func (s *stages) routeTo(vni pipeline.VNI, of netip.Addr) (best pipeline.Forward) {
	for _, e := range s.table.Entries {
		f, is := e.(pipeline.Forward)
		if is && f.VNI == vni && f.To.Contains(of) && (!best.To.IsValid() || f.To.Bits() > best.To.Bits()) {
			best = f
		}
	}
	return best
}

// nodeWith returns the prefix of the node with a tunnel address; empty if it is no node's.
func (s *stages) nodeWith(vtep netip.Addr) string {
	if !s.its.Pool.IsValid() {
		if node, err := vtep.Prefix(64); err == nil {
			return node.String()
		}
		return ""
	}
	number, is := address.VTEP4Node(s.its.Pool, vtep)
	if !is {
		return ""
	}
	return s.Plan.Node(number).String()
}

// ownVTEP returns this node's tunnel address.
func (s *stages) ownVTEP() netip.Addr {
	if own, is := address.VTEP4(s.its.Pool, s.Plan.NodeNumber(s.Prefix)); is {
		return own
	}
	return pipeline.VTEP(s.Prefix)
}

// from adds the steps of a packet.
func (s *stages) from(p pipeline.Packet, arrival string) error {
	if s.way.Pre != nil {
		s.step("nsh", "from frontend "+s.way.Pre.Frontend, "what its rules say")
	} else if p.From != pipeline.VXLAN {
		s.step("container", arrival, "")
	} else if s.its.Pool.IsValid() { // every VTEP may send; what it may send is checked next
		s.step("decap", fmt.Sprintf("from VTEP %v in VNI %d", p.Outer, p.VNI), "")
	}
	verdict, entries := s.table.Run(p)
	for _, e := range entries {
		if s.way.Pre != nil && e.Stage() < pipeline.NAT {
			continue // done before the frontend was asked, or by the sender
		}
		switch e := e.(type) {
		case pipeline.DNAT:
			s.dst = e.Real
		case pipeline.SNAT:
			s.src = e.Virtual
		}
		stage, detail, _ := strings.Cut(e.String(), ": ")
		s.step(stage, detail, s.tableOf(e))
	}
	if verdict.Drop != 0 {
		s.drop(stageOf(verdict.Drop), verdict.Drop, verdict.Drop.Text(), s.tableOf(nil))
		return nil
	}
	switch verdict.To {
	case pipeline.VXLAN:
		return s.encap(verdict, entries)
	case pipeline.Gateway:
		if allowed, err := s.checked(policy.Egress); err != nil || !allowed {
			return err
		}
		s.step("deliver", "to this node's gateway, by "+pipeline.GatewayDevice, "")
		s.response.Verdict = Delivered
		return nil
	}
	// The rules of both ends are checked where the packet leaves the tunnel.
	if allowed, err := s.checked(policy.Egress, policy.Ingress); err != nil || !allowed {
		return err
	}
	for _, e := range s.Core.Endpoints() {
		if e.ID == endpoint.ID(verdict.To) {
			name, _ := s.Core.NameOf(e.ID)
			s.step("deliver", fmt.Sprintf("to %s by %s", name, e.Device.HostName), "")
		}
	}
	s.response.Verdict = Delivered
	return nil
}

// checked adds the decisions of the policies for some directions. It reports whether all allow the packet, and this
// node goes on with it.
func (s *stages) checked(directions ...policy.Direction) (allowed bool, err error) {
	if s.way.Pre == nil {
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
	because := fmt.Sprintf("by what frontend %s says, with policies of revision %d, and the session here",
		s.way.Pre.Frontend, s.way.Pre.Revision)
	for _, d := range directions {
		if slices.Contains(s.way.Pre.Denied, d.String()) {
			s.drop("policy", dropreason.PolicyDenied, d.String()+" denied", because)
			return false, nil
		}
		s.step("policy", d.String()+" allowed", because)
	}
	return true, nil
}

// encap adds the steps of a packet to another node.
func (s *stages) encap(v pipeline.Verdict, entries []pipeline.Entry) error {
	var to pipeline.Forward
	for _, e := range entries {
		if f, is := e.(pipeline.Forward); is {
			to = f
		}
	}
	if offload, is := s.Core.OffloadOf(s.response.Source.Tenant, to.Offload); is && offload.Phase.Fronted() {
		return s.toFrontend(offload, v.Identity)
	}
	if to.Outside {
		if allowed, err := s.checked(policy.Egress); err != nil || !allowed {
			return err
		}
	} else {
		s.step("policy", "checks the rules of both ends", "the receiver's node")
	}
	hop, err := s.Path.NextHop(s.ownVTEP(), v.VTEP)
	if err != nil {
		s.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	s.step("encap", "next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN to %v, VNI %d, identity %d", v.VTEP, v.VNI, v.Identity))
	s.response.Verdict, s.response.Next = Sent, s.nodeWith(v.VTEP)
	return nil
}

// stageOf returns the stage that drops a packet for a reason.
func stageOf(why dropreason.Reason) string {
	switch why {
	case dropreason.PeerUnknown:
		return pipeline.Decap.String()
	case dropreason.ForeignUnknown, dropreason.SrcNotOwn:
		return pipeline.Register.String()
	}
	return pipeline.Forwarding.String()
}

// tableOf names where an entry is.
func (s *stages) tableOf(e pipeline.Entry) string {
	if s.its.Switch == "ovs" {
		return "flow of Open vSwitch"
	}
	if s.its.Pool.IsValid() { // tables of its own (bpf/net/evpn/tables.h)
		switch e.(type) {
		case pipeline.Sender:
			return s.network + "_senders_v1"
		case pipeline.Foreign:
			return s.network + "_foreign_v1"
		case pipeline.Forward:
			return s.network + "_forward_v1"
		}
		return ""
	}
	switch e.(type) {
	case pipeline.Peer:
		return "nim_peers_v1"
	case pipeline.Sender:
		return "nim_senders_v1"
	case pipeline.Foreign:
		return "nim_foreign_v1"
	case pipeline.NorthSouth:
		return "nim_outside_v1"
	case pipeline.DNAT:
		return "nim_dnat_v1"
	case pipeline.SNAT:
		return "nim_snat_v1"
	case pipeline.Forward:
		return "nim_forward_v1"
	}
	return ""
}
