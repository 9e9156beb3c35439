package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// resolveTimeout is how long an ADD waits for an answer of the orchestrator.
const resolveTimeout = 5 * time.Second

// Resolve implements Resolver.
func (l *Link) Resolve(
	ctx context.Context, name string, identity map[string]string, exposes bool,
) (agent.Resolved, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	client, err := l.dial(ctx)
	if err == nil {
		var resp *connect.Response[pilasterv1.ResolveResponse]
		resp, err = client.Resolve(
			ctx,
			connect.NewRequest(
				&pilasterv1.ResolveRequest{
					Tenant: name, Labels: identity, Sequence: l.config.Node.Sequence(), Exposes: exposes,
				},
			),
		)
		if err == nil {
			return resolved(resp.Msg, l.plan())
		}
	}
	return agent.Resolved{}, l.resolveError(err, l.missingState(name, identity, exposes))
}

// resolveError is the refusal of an ADD that needs something from the orchestrator.
func (l *Link) resolveError(err error, lacking string) error {
	var remote *connect.Error
	if errors.As(err, &remote) {
		switch remote.Code() {
		case connect.CodeNotFound:
			return refusal.New(refusal.ErrNotFound, "%s", remote.Message())
		case connect.CodeInvalidArgument:
			return refusal.New(refusal.ErrInvalid, "%s", remote.Message())
		case connect.CodeResourceExhausted:
			return refusal.New(refusal.ErrExhausted, "%s", remote.Message())
		}
	}
	return refusal.New(
		refusal.ErrUnavailable,
		"%s, and the request to the orchestrator at %s failed: %s\n  nothing was changed; try again when it answers",
		lacking,
		l.config.URL,
		unixrpc.Words(err),
	)
}

// missingState names what this node does not know.
func (l *Link) missingState(name string, identity map[string]string, exposes bool) string {
	t, _, known := l.config.Tenants.Get(name)
	if known && exposes && t.Tenant.ServicesNumber == 0 {
		return fmt.Sprintf("host ports need a number of tenant %s for services, which it does not have yet", name)
	}
	if known {
		return fmt.Sprintf(
			"this node does not know the app of labels %q in tenant %s",
			tenant.Canonical(identity),
			name,
		)
	}
	return fmt.Sprintf("this node does not know tenant %s", name)
}

func resolved(r *pilasterv1.ResolveResponse, plan address.Plan) (agent.Resolved, error) {
	t, err := tenantFromProto(r.GetTenant(), plan)
	if err != nil {
		return agent.Resolved{}, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
	}
	a, err := appFromProto(r.GetApp())
	if err != nil {
		return agent.Resolved{}, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
	}
	return agent.Resolved{
		Tenant: t, App: a.ID, Policies: r.HasPolicies, Retiring: retiringFromProto(r.GetTenant().GetRetiringApps()),
	}, nil
}
