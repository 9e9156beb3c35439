package orchestrator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// retryAfter, in seconds, is when a tenant that was asked about too often may be asked about again: by then it has a
// whole second's share.
const retryAfter = "1"

func (s *nodeService) Allocate(
	ctx context.Context,
	req *connect.Request[pilasterv1.AllocateRequest],
) (*connect.Response[pilasterv1.AllocateResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.cache.room(node.Name, 1); err != nil {
		return nil, err
	}
	given, err := s.store.Allocate(ctx, node, req.Msg.Tenant, req.Msg.Key)
	if err != nil {
		return nil, err
	}
	var resp pilasterv1.AllocateResponse
	for _, to := range given {
		resp.Prefixes = append(resp.Prefixes, to.String())
	}
	return connect.NewResponse(&resp), nil
}

func (s *nodeService) Free(
	ctx context.Context,
	req *connect.Request[pilasterv1.FreeRequest],
) (*connect.Response[pilasterv1.FreeResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.store.Free(ctx, node, req.Msg.Tenant, req.Msg.Key); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.FreeResponse{}), nil
}

// ListMappings tells a node of tenants that it hosts or carries, and of no others.
func (s *nodeService) ListMappings(
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
	if s.lists != nil && !s.lists.allow(name) {
		err := s.limiter.refuse(
			limitLists,
			connect.CodeResourceExhausted,
			"nodes ask for mappings of tenant %s more than %d times a second; nothing was changed: ask again, or allow more with the orchestrator's --list-rate",
			name,
			s.lists.rate,
		)
		if e := new(connect.Error); errors.As(err, &e) {
			e.Meta().Set("Retry-After", retryAfter)
		}
		return nil, err
	}
	if req.Msg.AfterRevision != 0 {
		return s.changedMappings(ctx, node, req.Msg)
	}
	page, ok := s.cache.page(name, req.Msg.PageToken)
	if !ok {
		if page, err = s.store.ListMappings(ctx, name, req.Msg.PageToken); err != nil {
			return nil, err
		}
	}
	for i, m := range page.Mappings {
		page.Mappings[i] = visible(m, node.Name)
	}
	return connect.NewResponse(
		&pilasterv1.ListMappingsResponse{Mappings: page.Mappings, Revision: page.Revision, NextPageToken: page.Next},
	), nil
}

// changedMappings tells what has changed after a revision, up to all that this orchestrator has changed before it was
// tenants.
func (s *nodeService) changedMappings(
	ctx context.Context,
	node pki.Node,
	req *pilasterv1.ListMappingsRequest,
) (*connect.Response[pilasterv1.ListMappingsResponse], error) {
	if req.PageToken != "" {
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf(
				"a page was asked for together with what changed after revision %d, which has no pages: say one of the two",
				req.AfterRevision,
			),
		)
	}
	made := s.store.Revision()
	if err := s.cache.await(ctx, func() bool { return s.cache.revision >= made }); err != nil {
		return nil, err
	}
	resp, ok := s.cache.changed(node.Name, req.Tenant, req.AfterRevision)
	if !ok {
		return nil, connect.NewError(
			connect.CodeAborted,
			fmt.Errorf(
				"what changed of tenant %s after revision %d is not known here, where the last %d changes are, of at most %d records; begin with the first page of its mappings",
				req.Tenant,
				req.AfterRevision,
				maxHistory,
				maxHistoryCost,
			),
		)
	}
	return connect.NewResponse(resp), nil
}

// changed is what of a tenant's mappings is another since a revision, or false when that is not remembered. Of each
// prefix the last counts.
func (m *cache) changed(node, tenant string, after int64) (*pilasterv1.ListMappingsResponse, bool) {
	m.mu.RLock()
	past, revision, ok := m.since(after)
	m.mu.RUnlock()
	if !ok {
		return nil, false
	}
	resp := &pilasterv1.ListMappingsResponse{Revision: revision}
	told := map[string]bool{}
	for _, b := range slices.Backward(past) {
		for _, e := range slices.Backward(b.Events) {
			of := cmp.Or(e.Mapping, e.EndedMapping)
			if of == nil || of.Tenant != tenant || told[of.To] {
				continue
			}
			told[of.To] = true
			if e.Mapping != nil {
				resp.Mappings = append(resp.Mappings, visible(of, node))
			} else {
				resp.EndedMappings = append(resp.EndedMappings, of)
			}
		}
	}
	return resp, true
}

// visible is a mapping as a node is told of it: whose container another node's is, is not its concern.
func visible(m *pilasterv1.Mapping, to string) *pilasterv1.Mapping {
	if m.Name == to || m.Key == "" {
		return m
	}
	return &pilasterv1.Mapping{Tenant: m.Tenant, To: m.To, Node: m.Node, Name: m.Name}
}

// hosting waits a moment for what another orchestrator has just noted.
func (s *nodeService) hosting(ctx context.Context, n pki.Node, tenant string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if s.cache.awaitNode(
		ctx,
		n.Name,
		func() bool { return s.cache.hostedBy[n.Name][tenant] || s.cache.transitTenants(n.Name)[tenant] },
	) != nil {
		return connect.NewError(
			connect.CodePermissionDenied,
			fmt.Errorf("node %s does not host tenant %s, and is told of it when it does", n.Name, tenant),
		)
	}
	return nil
}
