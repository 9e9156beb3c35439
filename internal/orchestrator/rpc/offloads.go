package rpc

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

func (s *OperatorService) StartOffload(
	ctx context.Context,
	req *connect.Request[pilasterv1.StartOffloadRequest],
) (*connect.Response[pilasterv1.StartOffloadResponse], error) {
	m := req.Msg
	is := store.Offloading{Tenant: m.Tenant, Node: m.Node, Frontends: m.Frontends, DryRun: m.DryRun}
	of, _, _, err := s.tenant(m.Tenant)
	if err != nil {
		return nil, err
	}
	if is.Count = len(is.Frontends); is.Count == 0 {
		is.Count = int(m.Count)
		is.Frontends = chooseFrontends(
			s.Cache.AllNodes(), s.Cache.AllTenants(), of.Network, m.Node, min(is.Count, tenant.MaxActive))
	}
	gain, estimate := s.modelledGain(of, is.Count)
	if gain > 0 && gain < 1 && !m.Force {
		is.Loss = estimate
	}
	made, err := s.Store.StartOffload(ctx, is)
	if err != nil {
		return nil, err
	}
	resp := &pilasterv1.StartOffloadResponse{
		Offload:  &pilasterv1.OffloadStatus{Tenant: m.Tenant, Offload: made},
		Prefixes: s.Cache.PrefixesOf(m.Tenant, m.Node), Gain: gain, Estimate: estimate,
	}
	if !m.DryRun {
		s.await(ctx)
		resp.Offload = s.offloadStatus(m.Tenant, made)
	}
	return connect.NewResponse(resp), nil
}

// chooseFrontends returns at most n nodes that can be frontends of a node, for tenants of a network: those of its rack
// first, then those that are frontends of the fewest offloads, then by name.
func chooseFrontends(
	nodes []*pilasterv1.Node,
	tenants []*pilasterv1.Tenant,
	network, backend string,
	n int,
) (names []string) {
	rack, serves := "", map[string]int{}
	for _, node := range nodes {
		if node.Name == backend {
			rack = node.Rack
		}
	}
	for _, t := range tenants {
		for _, o := range t.Offloads {
			for _, f := range o.Frontends {
				serves[f.Node]++
			}
		}
	}
	nodes = slices.DeleteFunc(slices.Clone(nodes), func(node *pilasterv1.Node) bool {
		return node.Name == backend || node.Edge || !node.Offloads || !node.Connected ||
			!slices.Contains(node.Enforces, network)
	})
	away := func(node *pilasterv1.Node) int {
		if rack != "" && node.Rack == rack {
			return 0
		}
		return 1
	}
	slices.SortFunc(nodes, func(a, b *pilasterv1.Node) int {
		return cmp.Or(
			cmp.Compare(away(a), away(b)),
			cmp.Compare(serves[a.Name], serves[b.Name]),
			cmp.Compare(a.Name, b.Name),
		)
	})
	for _, node := range nodes[:min(n, len(nodes))] {
		names = append(names, node.Name)
	}
	return names
}

func (s *OperatorService) ListOffloads(
	_ context.Context,
	req *connect.Request[pilasterv1.ListOffloadsRequest],
) (*connect.Response[pilasterv1.ListOffloadsResponse], error) {
	var resp pilasterv1.ListOffloadsResponse
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	for _, t := range tenants {
		for _, o := range t.Offloads {
			if req.Msg.Node == "" || o.Node == req.Msg.Node {
				resp.Offloads = append(resp.Offloads, s.offloadStatus(t.Name, o))
			}
		}
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) StopOffload(
	ctx context.Context,
	req *connect.Request[pilasterv1.StopOffloadRequest],
) (*connect.Response[pilasterv1.StopOffloadResponse], error) {
	is, err := s.Store.StopOffload(ctx, req.Msg.Tenant, req.Msg.Node, req.Msg.Now)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.StopOffloadResponse{Offload: s.offloadStatus(req.Msg.Tenant, is)}), nil
}

// offloadStatus returns an offload with what the nodes have reported about it.
func (s *OperatorService) offloadStatus(name string, o *pilasterv1.Offload) *pilasterv1.OffloadStatus {
	is := &pilasterv1.OffloadStatus{Tenant: name, Offload: o}
	s.Cache.Mu.RLock()
	defer s.Cache.Mu.RUnlock()
	hosting := s.Cache.Hosting[name]
	for _, a := range store.Awaited(o, hosting, s.Cache.Connected) {
		is.Awaited = append(is.Awaited, &pilasterv1.AwaitedNode{Node: a.Node, Reason: a.Reason})
	}
	is.LostFrontends = hosting[o.Node].GetLostFrontends()
	return is
}

// ReportLoad is not implemented yet.
func (s *NodeService) ReportLoad(
	context.Context, *connect.Request[pilasterv1.ReportLoadRequest],
) (*connect.Response[pilasterv1.ReportLoadResponse], error) {
	return nil, connect.NewError(connect.CodeUnimplemented, errors.New("loads are not recorded yet"))
}

// SetOffloadAuto is not implemented yet.
func (s *OperatorService) SetOffloadAuto(
	context.Context, *connect.Request[pilasterv1.SetOffloadAutoRequest],
) (*connect.Response[pilasterv1.SetOffloadAutoResponse], error) {
	return nil, connect.NewError(connect.CodeUnimplemented, errors.New("automatic offloads do not exist yet"))
}
