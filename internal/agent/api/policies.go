package api

import (
	"context"
	"fmt"
	"math"
	"net/netip"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

func (s *Service) ListRuleHits(
	_ context.Context,
	req *connect.Request[pilasterv1.ListRuleHitsRequest],
) (*connect.Response[pilasterv1.ListRuleHitsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	hits, err := core.RuleHits(req.Msg.Tenant)
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.ListRuleHitsResponse{Hits: hitsToProto(hits)}), nil
}

func hitsToProto(hits []agent.RuleHits) (all []*pilasterv1.RuleHits) {
	for _, h := range hits {
		all = append(all, &pilasterv1.RuleHits{Tenant: h.Tenant, Rule: ruleToProto(&h.Rule), Packets: h.Packets})
	}
	return all
}

// addPolicies adds the policy status, if there are policies.
func addPolicies(r *pilasterv1.StatusResponse, core *agent.Core) {
	s, ok := core.PolicyStatus()
	if !ok {
		return
	}
	r.Policies = &pilasterv1.Policies{
		Tenants: uint32(s.Tenants), Rules: uint32(s.Rules), Hits: hitsToProto(s.Hits),
	}
	for _, e := range s.Entries {
		r.Policies.Entries = append(r.Policies.Entries, entriesToProto(e))
	}
	r.Problems = append(r.Problems, s.Problems...)
	if s.Sessions == nil {
		return
	}
	r.Policies.Sessions = &pilasterv1.Sessions{
		Capacity:        uint32(s.Sessions.Capacity),
		Used:            uint32(s.Sessions.Used),
		HalfOpen:        uint32(s.Sessions.HalfOpen),
		Begun:           s.Sessions.Begun,
		Evicted:         s.Sessions.Evicted,
		Refused:         s.Sessions.Refused,
		LargestEndpoint: uint32(s.Sessions.Largest),
		Largest:         s.Largest,
		LargestUsed:     uint32(s.Sessions.Most),

		LargestTenant:     s.LargestTenant,
		LargestTenantUsed: uint32(s.Sessions.MostOfTenant),
	}
}

func (s *Service) Why(
	_ context.Context,
	req *connect.Request[pilasterv1.WhyRequest],
) (*connect.Response[pilasterv1.WhyResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	ends, err := parseAddresses(req.Msg.Source, req.Msg.Destination)
	if err == nil {
		err = checkPort(req.Msg.Protocol, req.Msg.Port, req.Msg.SourcePort)
	}
	if err != nil {
		return nil, err
	}
	if req.Msg.PeerApp >= uint32(address.FirstReservedApp) {
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf("app %d: choose 1 to %d", req.Msg.PeerApp, address.FirstReservedApp-1),
		)
	}
	of := agent.Connection{
		Source:      ends[0],
		Destination: ends[1],
		Protocol:    uint8(req.Msg.Protocol),
		Port:        uint16(req.Msg.Port),
		Tenant:      req.Msg.Tenant,
		PeerApp:     address.AppID(req.Msg.PeerApp),
		SourcePort:  uint16(req.Msg.SourcePort),
	}
	reasons, err := core.Why(of)
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.WhyResponse{}
	if _, o, is := core.Fronted(of); is && o.Phase.Fronted() && len(reasons) > 0 {
		resp.Pre = &pilasterv1.PreActions{
			Frontend: s.config.Node.Name(), Backend: o.Node, Revision: s.config.Link().Revision,
		}
	}
	for _, r := range reasons {
		m := &pilasterv1.Reason{
			Direction: r.Direction.String(),
			Tenant:    r.Tenant,
			Peer:      r.Peer.String(),
			Policed:   r.HasPolicies,
			Strangers: r.CrossTenant,
			App: uint32(
				r.Own,
			),
			PeerApp: uint32(r.Far),
			Allowed: r.Allowed,
			Rule:    ruleToProto(r.By),
			Audit:   ruleToProto(r.Audit),
		}
		if r.Backend.IsValid() {
			m.Backend = r.Backend.String()
		}
		if r.Access != "" {
			m.Rule = &pilasterv1.RuleName{Rule: r.Access}
		}
		if r.Endpoint != nil {
			m.Endpoint = endpointToProto(core.Networks(), *r.Endpoint)
		}
		if resp.Pre != nil && !r.Allowed {
			resp.Pre.Denied = append(resp.Pre.Denied, m.Direction)
		}
		resp.Reasons = append(resp.Reasons, m)
	}
	return connect.NewResponse(resp), nil
}

func ruleToProto(n *policy.RuleName) *pilasterv1.RuleName {
	if n == nil {
		return nil
	}
	return &pilasterv1.RuleName{Policy: n.Policy, Rule: n.String(), Audit: n.Audit}
}

func (s *Service) ExportSessions(
	_ context.Context,
	req *connect.Request[pilasterv1.ExportSessionsRequest],
) (*connect.Response[pilasterv1.ExportSessionsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	all, err := core.ExportSessions(req.Msg.Key)
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.ExportSessionsResponse{}
	for _, is := range all {
		resp.Sessions = append(resp.Sessions, &pilasterv1.Session{
			Local: is.Local.String(), Remote: is.Remote.String(), Tenant: is.Tenant, Protocol: uint32(is.Protocol),
			Direction: uint32(is.Direction), Version: uint32(is.State.Version), First: uint32(is.State.First),
			Seen: uint32(is.State.Seen), StateProtocol: uint32(is.State.Protocol), Nat: is.State.NAT,
		})
	}
	return connect.NewResponse(resp), nil
}

func (s *Service) ImportSessions(
	ctx context.Context,
	req *connect.Request[pilasterv1.ImportSessionsRequest],
) (*connect.Response[pilasterv1.ImportSessionsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	var all []dpapi.Session
	for _, p := range req.Msg.Sessions {
		is, err := sessionFromProto(p)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%w; no session was added", err))
		}
		all = append(all, is)
	}
	left, waiting, err := core.ImportSessions(ctx, req.Msg.ContainerId, req.Msg.Interface, all)
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.ImportSessionsResponse{Waiting: waiting, Left: uint32(left)}), nil
}

func sessionFromProto(p *pilasterv1.Session) (is dpapi.Session, err error) {
	if is.Local, err = netip.ParseAddrPort(p.Local); err != nil {
		return is, fmt.Errorf("session from %.60q: %w", p.Local, err)
	}
	if is.Remote, err = netip.ParseAddrPort(p.Remote); err != nil {
		return is, fmt.Errorf("session to %.60q: %w", p.Remote, err)
	}
	if max(p.Protocol, p.Direction, p.Version, p.First, p.Seen, p.StateProtocol) > math.MaxUint8 {
		return is, fmt.Errorf("session %v has fields that are no bytes", p)
	}
	is.Tenant, is.Protocol, is.Direction = p.Tenant, uint8(p.Protocol), uint8(p.Direction)
	is.State = dpapi.SessionState{
		Version: uint8(p.Version), First: uint8(p.First), Seen: uint8(p.Seen), Protocol: uint8(p.StateProtocol),
		NAT: p.Nat,
	}
	return is, nil
}
