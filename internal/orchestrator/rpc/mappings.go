package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// retryAfter, in seconds, is when a node may query a tenant beyond its rate again: by then the limiter has a full
// second's worth of tokens.
const retryAfter = "1"

func (s *NodeService) Allocate(
	ctx context.Context,
	req *connect.Request[pilasterv1.AllocateRequest],
) (*connect.Response[pilasterv1.AllocateResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Cache.CheckRoom(node.Name, 1); err != nil {
		return nil, err
	}
	given, err := s.Store.AllocateFor(ctx, node, req.Msg.Tenant, store.Endpoint{
		Key: req.Msg.Key, App: req.Msg.App, AddressKey: req.Msg.AddressKey, Sequence: req.Msg.Sequence,
	})
	if err != nil {
		return nil, err
	}
	resp := pilasterv1.AllocateResponse{
		Sequence: given.Sequence, Elsewhere: given.Elsewhere, FormerNode: given.FormerNode,
	}
	for _, to := range given.Prefixes {
		resp.Prefixes = append(resp.Prefixes, to.String())
	}
	return connect.NewResponse(&resp), nil
}

func (s *NodeService) Free(
	ctx context.Context,
	req *connect.Request[pilasterv1.FreeRequest],
) (*connect.Response[pilasterv1.FreeResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Store.Free(ctx, node, req.Msg.Tenant, req.Msg.Key); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.FreeResponse{}), nil
}

// ListMappings serves mappings of tenants that the node hosts or needs for transit.
func (s *NodeService) ListMappings(
	ctx context.Context,
	req *connect.Request[pilasterv1.ListMappingsRequest],
) (*connect.Response[pilasterv1.ListMappingsResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	name := req.Msg.Tenant
	if err := s.hosting(ctx, node, name); err != nil {
		return nil, err
	}
	if s.Lists != nil && !s.Lists.Allow(name) {
		err := s.Limiter.Refuse(
			admission.LimitLists,
			connect.CodeResourceExhausted,
			"nodes query mappings of tenant %s more than %d times a second; nothing was changed: retry, or raise the "+
				"orchestrator's --list-rate",
			name,
			s.Lists.PerSecond,
		)
		if e := new(connect.Error); errors.As(err, &e) {
			e.Meta().Set("Retry-After", retryAfter)
		}
		return nil, err
	}
	if req.Msg.Own {
		made := s.Store.Revision()
		if err := s.Cache.Await(ctx, func() bool { return s.Cache.Revision >= made }); err != nil {
			return nil, err
		}
		return connect.NewResponse(s.Cache.OwnMappings(node.Name, name)), nil
	}
	if req.Msg.AfterRevision != 0 {
		return s.changedMappings(ctx, node, req.Msg)
	}
	page, ok := s.Cache.Page(name, req.Msg.PageToken)
	if !ok {
		if page, err = s.Store.ListMappings(ctx, name, req.Msg.PageToken); err != nil {
			return nil, err
		}
	}
	for i, m := range page.Mappings {
		page.Mappings[i] = cache.Visible(m, node.Name)
	}
	return connect.NewResponse(
		&pilasterv1.ListMappingsResponse{Mappings: page.Mappings, Revision: page.Revision, NextPageToken: page.Next},
	), nil
}

// changedMappings returns the changes after a revision. It includes all changes that this orchestrator committed before
// the call.
func (s *NodeService) changedMappings(
	ctx context.Context,
	node pki.Node,
	req *pilasterv1.ListMappingsRequest,
) (*connect.Response[pilasterv1.ListMappingsResponse], error) {
	if req.PageToken != "" {
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf(
				"a page token and after_revision %d exclude each other: changes have no pages",
				req.AfterRevision,
			),
		)
	}
	made := s.Store.Revision()
	if err := s.Cache.Await(ctx, func() bool { return s.Cache.Revision >= made }); err != nil {
		return nil, err
	}
	resp, ok := s.Cache.ChangedMappings(node.Name, req.Tenant, req.AfterRevision)
	if !ok {
		return nil, connect.NewError(
			connect.CodeAborted,
			fmt.Errorf(
				"the changes of tenant %s after revision %d are no longer in the history of the last %d changes and "+
					"at most %d records; begin with the first page of its mappings",
				req.Tenant,
				req.AfterRevision,
				cache.MaxHistory,
				cache.MaxHistoryCost,
			),
		)
	}
	return connect.NewResponse(resp), nil
}

// hosting refuses a node that does not host the tenant. First it waits for a moment: another orchestrator may just have
// recorded that the node hosts the tenant.
func (s *NodeService) hosting(ctx context.Context, n pki.Node, tenant string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if s.Cache.AwaitNode(
		ctx,
		n.Name,
		func() bool { return s.Cache.HostedBy[n.Name][tenant] || s.Cache.TransitTenants(n.Name)[tenant] },
	) != nil {
		return connect.NewError(
			connect.CodePermissionDenied,
			fmt.Errorf("node %s does not host tenant %s; it receives its mappings once it does", n.Name, tenant),
		)
	}
	return nil
}
