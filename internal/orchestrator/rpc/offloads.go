package rpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// Offloads is the controller of offloads.
type Offloads interface {
	// Choose returns the best frontends for a new offload, or an error that says why fewer than n fit.
	Choose(tenant, node string, n int) ([]string, error)
	// Describe adds to offloads what is known about them, and returns the problems of the cluster and of nodes.
	Describe([]*pilasterv1.OffloadStatus) (problems []string)
	// Ended returns the offloads that it ended in the last minute.
	Ended() []*pilasterv1.EndedOffload
	// Doubt says that most frontends are reported as lost; it is empty if they are not.
	Doubt() string
}

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
	if doubt := s.Offloads.Doubt(); doubt != "" && !m.Force && !m.DryRun {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(
			"%s; no offload starts meanwhile, and nothing was changed: use --force to start it all the same", doubt))
	}
	if is.Count = len(is.Frontends); is.Count == 0 {
		is.Count = int(m.Count)
		if is.Frontends, err = s.Offloads.Choose(m.Tenant, m.Node, min(is.Count, tenant.MaxActive)); err != nil {
			is.Lack = err.Error() // the store may have a better reason to refuse
			for is.Fit = min(is.Count, tenant.MaxActive) / 2; is.Fit > 0; is.Fit /= 2 {
				if _, err := s.Offloads.Choose(m.Tenant, m.Node, is.Fit); err == nil {
					break
				}
			}
		}
	}
	gain, estimate := s.estimate(of, m.Node, is.Count)
	is.Loss = loss(gain, estimate, m.Force)
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
		s.Offloads.Describe([]*pilasterv1.OffloadStatus{resp.Offload})
	}
	return connect.NewResponse(resp), nil
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
	if node := req.Msg.Node; node != "" && s.Cache.Node(node) == nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf(
			"there is no node %q; `pilaster node list` lists the nodes", node))
	}
	for _, t := range tenants {
		for _, o := range t.Offloads {
			if req.Msg.Node == "" || o.Node == req.Msg.Node {
				resp.Offloads = append(resp.Offloads, &pilasterv1.OffloadStatus{Tenant: t.Name, Offload: o})
			}
		}
	}
	resp.Problems = s.Offloads.Describe(resp.Offloads)
	resp.Ended = s.Offloads.Ended()
	resp.Automatic = s.Cache.AutomaticOffloads()
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
	status := &pilasterv1.OffloadStatus{Tenant: req.Msg.Tenant, Offload: is}
	s.Offloads.Describe([]*pilasterv1.OffloadStatus{status})
	return connect.NewResponse(&pilasterv1.StopOffloadResponse{Offload: status}), nil
}

func (s *OperatorService) SetOffloadAuto(
	ctx context.Context,
	req *connect.Request[pilasterv1.SetOffloadAutoRequest],
) (*connect.Response[pilasterv1.SetOffloadAutoResponse], error) {
	if err := s.Store.SetOffloadAuto(ctx, req.Msg.On); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.SetOffloadAutoResponse{}), nil
}

// Limits of a report of loads, which the store may keep.
const (
	MaxFrontingLoads = 1024
	maxLoad          = 1000 // in parts of the budget
	maxBudget        = 1 << 16
)

// LoadWrites is how many reports of loads an orchestrator records in a second. The others wait for the node's next one.
const LoadWrites = 50

// mayRecord reports whether a report can be recorded now. Half of what is left is for nodes that report often.
func (s *NodeService) mayRecord(often bool) bool {
	l := s.LoadWrites
	return l == nil || (often || l.Tokens() >= float64(l.Burst())/2) && l.Allow()
}

func (s *NodeService) ReportLoad(
	ctx context.Context,
	req *connect.Request[pilasterv1.ReportLoadRequest],
) (*connect.Response[pilasterv1.ReportLoadResponse], error) {
	if err := s.registered(ctx); err != nil {
		return nil, err
	}
	node, _ := admission.Caller(ctx)
	load := req.Msg.GetLoad()
	if load == nil {
		load = &pilasterv1.NodeLoad{}
	}
	load.Node = node.Name
	if err := checkLoad(load); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	next, measure, record := s.Cache.NextLoad(time.Now(), load)
	if record && s.mayRecord(next == cache.OftenLoad) {
		if err := s.Store.RecordLoad(ctx, node, admission.Instance(ctx), load); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&pilasterv1.ReportLoadResponse{
		NextMs: uint32(next.Milliseconds()), Measure: measure,
	}), nil
}

// checkLoad refuses a report that no valid agent sends.
func checkLoad(l *pilasterv1.NodeLoad) error {
	valid := func(x, most float64) bool { return x >= 0 && x <= most && !math.IsNaN(x) }
	if !valid(l.Budget, maxBudget) || !valid(l.Own, maxLoad) || len(l.Fronting) > MaxFrontingLoads ||
		len(l.Tenants) > MaxTenants {
		return errors.New("the report of the node's load has values out of range; nothing was recorded")
	}
	for _, t := range l.Tenants {
		if !valid(t.Load, maxLoad) {
			return fmt.Errorf("the load of tenant %.64q is out of range; nothing was recorded", t.Tenant)
		}
		if err := tenant.CheckName(t.Tenant); err != nil {
			return err
		}
	}
	for _, f := range l.Fronting {
		if !valid(f.Load, maxLoad) {
			return fmt.Errorf("the load for node %.64q is out of range; nothing was recorded", f.Backend)
		}
		if err := errors.Join(tenant.CheckName(f.Tenant), store.CheckNodeName(f.Backend)); err != nil {
			return err
		}
	}
	slices.SortFunc(l.Fronting, func(a, b *pilasterv1.FrontingLoad) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Backend, b.Backend))
	})
	return nil
}
