package sim

import (
	"context"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
)

// client is one node's. All nodes share what it is made of, which on machines of their own each has for itself.
type client struct {
	shared pilasterv1connect.NodeServiceClient
	caller *caller
}

// call makes a call as the node, with the deadline that any has.
func call[Q, R any](ctx context.Context, c client, do func(context.Context, *connect.Request[Q]) (*connect.Response[R], error), req *connect.Request[Q]) (*connect.Response[R], error) {
	ctx = context.WithValue(ctx, callerKey{}, c.caller)
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, join.CallTimeout)
		defer cancel()
	}
	return do(ctx, req)
}

func (c client) Join(ctx context.Context, req *connect.Request[pilasterv1.JoinRequest]) (*connect.Response[pilasterv1.JoinResponse], error) {
	return call(ctx, c, c.shared.Join, req)
}

func (c client) Renew(ctx context.Context, req *connect.Request[pilasterv1.RenewRequest]) (*connect.Response[pilasterv1.RenewResponse], error) {
	return call(ctx, c, c.shared.Renew, req)
}

func (c client) Register(ctx context.Context, req *connect.Request[pilasterv1.RegisterRequest]) (*connect.Response[pilasterv1.RegisterResponse], error) {
	return call(ctx, c, c.shared.Register, req)
}

func (c client) Resolve(ctx context.Context, req *connect.Request[pilasterv1.ResolveRequest]) (*connect.Response[pilasterv1.ResolveResponse], error) {
	return call(ctx, c, c.shared.Resolve, req)
}

func (c client) Allocate(ctx context.Context, req *connect.Request[pilasterv1.AllocateRequest]) (*connect.Response[pilasterv1.AllocateResponse], error) {
	return call(ctx, c, c.shared.Allocate, req)
}

func (c client) Free(ctx context.Context, req *connect.Request[pilasterv1.FreeRequest]) (*connect.Response[pilasterv1.FreeResponse], error) {
	return call(ctx, c, c.shared.Free, req)
}

func (c client) ListMappings(ctx context.Context, req *connect.Request[pilasterv1.ListMappingsRequest]) (*connect.Response[pilasterv1.ListMappingsResponse], error) {
	return call(ctx, c, c.shared.ListMappings, req)
}

func (c client) Follow(ctx context.Context) *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse] {
	return c.shared.Follow(context.WithValue(ctx, callerKey{}, c.caller))
}
