package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/server"
)

// Settings of sessions.
const (
	ConnectRetry = 5   // seconds
	MaxTTL       = 255 // of packets to an external peer: a router of the underlay or a route server, often not on-link
)

// NewServer returns a GoBGP server that does not run yet. It logs warnings and errors, at a limited rate. If below is
// set, it gets the records of lower levels.
func NewServer(log *slog.Logger, below func(slog.Record)) *server.BgpServer {
	level := new(slog.LevelVar)
	level.Set(slog.LevelWarn)
	return server.NewBgpServer(server.LoggerOption(slog.New(newLimitedHandler(log.Handler(), below)), level))
}

// Start starts a server that connects to its peers and listens for none.
func Start(ctx context.Context, s *server.BgpServer, asn uint32, routerID netip.Addr) error {
	if err := s.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: asn, RouterId: routerID.String(), ListenPort: -1,
	}}); err != nil {
		return fmt.Errorf("start BGP with router ID %v: %w", routerID, err)
	}
	if err := rejectImports(ctx, s); err != nil {
		return fmt.Errorf("set the import policy of BGP: %w", err)
	}
	return nil
}

// rejectImports keeps the routes of peers out of GoBGP's own table.
func rejectImports(ctx context.Context, s *server.BgpServer) error {
	const name = "announced"
	if err := s.AddPolicy(ctx, &api.AddPolicyRequest{Policy: &api.Policy{
		Name: name,
		Statements: []*api.Statement{{
			Name:       name,
			Conditions: &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL},
			Actions:    &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT},
		}},
	}}); err != nil {
		return err
	}
	return s.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{Assignment: &api.PolicyAssignment{
		Name:          "global",
		Direction:     api.PolicyDirection_POLICY_DIRECTION_IMPORT,
		Policies:      []*api.Policy{{Name: name}},
		DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT,
	}})
}
