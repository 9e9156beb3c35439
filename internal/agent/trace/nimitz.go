package trace

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// nimitz adds the stages of network nimitz, if an end is on this node. Addresses do not identify a tenant there.
func (r *run) nimitz(ctx context.Context, from, to []agent.OverlayMatch) error {
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
	if len(names) == 0 || r.Pipeline == nil {
		return nil
	}
	name := names[0]
	r.response.Network = tenant.Nimitz
	for _, e := range []*endpoint.Record{sender[name], receiver[name]} {
		if e != nil {
			r.response.Vni = uint32(e.TenantID)
		}
	}
	r.response.Source = r.overlayEnd(name, r.src, sender[name])
	r.response.Destination = r.overlayEnd(name, r.dst, receiver[name])
	entries, err := r.Pipeline(ctx)
	if err != nil {
		return fmt.Errorf("read the entries of network nimitz: %w", err)
	}
	stages := &stages{run: r, table: pipeline.Table{Region: r.Plan.Base, Entries: entries}}
	if e := sender[name]; e != nil {
		return stages.from(pipeline.Packet{From: pipeline.Port(e.ID), Src: r.src, Dst: r.dst},
			fmt.Sprintf("from %s", r.response.Source.Device))
	}
	vni := pipeline.VNI(receiver[name].TenantID)
	vtep := stages.nodeOf(vni, r.src)
	if node, err := vtep.Prefix(64); err == nil {
		r.response.Next = node.String()
	}
	return stages.from(pipeline.Packet{
		From: pipeline.VXLAN, Outer: vtep, VNI: vni, Identity: uint16(r.of.PeerApp),
		Src: r.src, Dst: r.dst,
	}, "")
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
	table pipeline.Table
}

// nodeOf returns the tunnel address of the node with an address of a tenant; it is invalid if this node does not know
// it.
func (s *stages) nodeOf(vni pipeline.VNI, of netip.Addr) (vtep netip.Addr) {
	longest := -1
	for _, e := range s.table.Entries {
		f, is := e.(pipeline.Forward)
		if is && f.VNI == vni && f.To.Contains(of) && f.To.Bits() > longest {
			longest, vtep = f.To.Bits(), f.VTEP
		}
	}
	return vtep
}

// from adds the steps of a packet.
func (s *stages) from(p pipeline.Packet, arrival string) error {
	if p.From != pipeline.VXLAN {
		s.step("container", arrival, "")
	}
	verdict, entries := s.table.Run(p)
	for _, e := range entries {
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
		if allowed, err := s.policies(policy.Egress); err != nil || !allowed {
			return err
		}
		s.step("deliver", "to this node's gateway, by "+pipeline.GatewayDevice, "")
		s.response.Verdict = Delivered
		return nil
	}
	// The rules of both ends are checked where the packet leaves the tunnel.
	if allowed, err := s.policies(policy.Egress, policy.Ingress); err != nil || !allowed {
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

// encap adds the steps of a packet to another node.
func (s *stages) encap(v pipeline.Verdict, entries []pipeline.Entry) error {
	outside := slices.ContainsFunc(entries, func(e pipeline.Entry) bool {
		f, is := e.(pipeline.Forward)
		return is && f.Outside
	})
	if outside {
		if allowed, err := s.policies(policy.Egress); err != nil || !allowed {
			return err
		}
	} else {
		s.step("policy", "checks the rules of both ends", "the receiver's node")
	}
	hop, err := s.Path.NextHop(pipeline.VTEP(s.Prefix), v.VTEP)
	if err != nil {
		s.drop("encap", dropreason.NoRoute, err.Error(), "FIB")
		return nil
	}
	s.step("encap", "next hop "+describeHop(hop),
		fmt.Sprintf("VXLAN to %v, VNI %d, identity %d", v.VTEP, v.VNI, v.Identity))
	node, err := v.VTEP.Prefix(64)
	s.response.Verdict, s.response.Next = Sent, node.String()
	return err
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
	if s.Switch == "ovs" {
		return "flow of Open vSwitch"
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
