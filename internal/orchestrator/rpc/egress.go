package rpc

import (
	"context"
	"fmt"
	"net/netip"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

func (s *OperatorService) SetEgressRule(
	ctx context.Context,
	req *connect.Request[pilasterv1.SetEgressRuleRequest],
) (*connect.Response[pilasterv1.SetEgressRuleResponse], error) {
	to, err := prefixes(req.Msg.To)
	if err != nil {
		return nil, err
	}
	var via []tenant.EgressGateway
	for _, g := range req.Msg.Gateways {
		gateway := tenant.EgressGateway{Node: g.Node}
		if g.Address != "" {
			if gateway.Address, err = netip.ParseAddr(g.Address); err != nil {
				return nil, connect.NewError(
					connect.CodeInvalidArgument,
					fmt.Errorf("%.80q is not an address such as 2001:db8:7::9; nothing was changed", g.Address),
				)
			}
		}
		via = append(via, gateway)
	}
	rules, err := s.Store.SetEgressRules(ctx, req.Msg.Tenant, to, req.Msg.Allow, via)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.SetEgressRuleResponse{Rules: rules}), nil
}

func (s *OperatorService) DeleteEgressRule(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteEgressRuleRequest],
) (*connect.Response[pilasterv1.DeleteEgressRuleResponse], error) {
	to, err := prefixes(req.Msg.To)
	if err != nil {
		return nil, err
	}
	if err := s.Store.DeleteEgressRules(ctx, req.Msg.Tenant, to); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteEgressRuleResponse{}), nil
}

func (s *OperatorService) ListEgressRules(
	_ context.Context,
	req *connect.Request[pilasterv1.ListEgressRulesRequest],
) (*connect.Response[pilasterv1.ListEgressRulesResponse], error) {
	var resp pilasterv1.ListEgressRulesResponse
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	for _, t := range tenants {
		if len(t.Egress) > 0 {
			resp.Tenants = append(resp.Tenants, &pilasterv1.TenantEgress{Tenant: t.Name, Rules: t.Egress})
		}
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) SetTenantNodes(
	ctx context.Context,
	req *connect.Request[pilasterv1.SetTenantNodesRequest],
) (*connect.Response[pilasterv1.SetTenantNodesResponse], error) {
	nodes, err := prefixes(req.Msg.Prefixes)
	if err != nil {
		return nil, err
	}
	set, err := s.Store.SetTenantNodes(ctx, req.Msg.Tenant, nodes, req.Msg.All)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.SetTenantNodesResponse{Prefixes: set}), nil
}

func (s *OperatorService) ChangeProtected(
	ctx context.Context,
	req *connect.Request[pilasterv1.ChangeProtectedRequest],
) (*connect.Response[pilasterv1.ChangeProtectedResponse], error) {
	add, err := prefixes(req.Msg.Add)
	if err != nil {
		return nil, err
	}
	remove, err := prefixes(req.Msg.Remove)
	if err != nil {
		return nil, err
	}
	all, err := s.Store.ChangeProtected(ctx, add, remove)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.ChangeProtectedResponse{Prefixes: texts(all)}), nil
}

func (s *OperatorService) ListProtected(
	context.Context,
	*connect.Request[pilasterv1.ListProtectedRequest],
) (*connect.Response[pilasterv1.ListProtectedResponse], error) {
	always := tenant.AlwaysProtected(withReservations(s.Store.Cluster().Plan, s.Cache))
	return connect.NewResponse(
		&pilasterv1.ListProtectedResponse{Prefixes: s.Cache.Protected(), Always: texts(always)},
	), nil
}

// prefixes parses prefixes of a request. Unlike tenant.ParsePrefixes it leaves host bits to the store.
func prefixes(texts []string) (all []netip.Prefix, err error) {
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf("%.80q is not a prefix such as 2001:db8:9::/48; nothing was changed", text),
			)
		}
		all = append(all, p)
	}
	return all, nil
}

func texts(prefixes []netip.Prefix) (all []string) {
	for _, p := range prefixes {
		all = append(all, p.String())
	}
	return all
}
