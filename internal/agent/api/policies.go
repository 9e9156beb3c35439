package api

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
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
		err = checkPort(req.Msg.Protocol, req.Msg.Port)
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
	reasons, err := core.Why(
		agent.Connection{
			Source:      ends[0],
			Destination: ends[1],
			Protocol:    uint8(req.Msg.Protocol),
			Port:        uint16(req.Msg.Port),
			Tenant:      req.Msg.Tenant,
			PeerApp:     address.AppID(req.Msg.PeerApp),
		},
	)
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.WhyResponse{}
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
		if r.Endpoint != nil {
			m.Endpoint = endpointToProto(core.Networks(), *r.Endpoint)
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
