package api

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network"
)

func (s *Service) Status(
	ctx context.Context,
	_ *connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(s.status(ctx)), nil
}

func (s *Service) status(ctx context.Context) *pilasterv1.StatusResponse {
	link := s.config.Link()
	r := &pilasterv1.StatusResponse{
		Node: &pilasterv1.Node{
			Name:      s.config.Node.Name(),
			Uuid:      s.config.Node.UUID(),
			Version:   s.config.Version,
			Connected: link.Connected,
			Edge:      s.config.Edge,
		},
		Uplinks: s.config.Uplinks, Version: s.config.Version, Pid: uint32(os.Getpid()),
		Orchestrator: &pilasterv1.OrchestratorLink{
			Url: s.config.URL, Connected: link.Connected, Revision: link.Revision,
			Since: timestamppb.New(link.Since), LastError: link.LastError,
		},
	}
	if m, ok := s.config.Node.Membership(); ok {
		r.Node.Prefix = m.Prefix.String()
		r.Plan = &pilasterv1.Plan{
			BasePrefix: m.Plan.Base.String(), PrivatePrefix: m.Plan.Private.String(), Identifiers: m.Plan.Identifiers,
		}
		for _, gateway := range []netip.Prefix{m.Plan.Gateway4, m.Plan.Gateway6} {
			if gateway.IsValid() {
				r.Plan.GatewayPrefixes = append(r.Plan.GatewayPrefixes, gateway.String())
			}
		}
	}
	core := s.core.Load()
	if core == nil {
		r.Problems = append(r.Problems, s.waiting())
		return r
	}
	r.Endpoints = uint32(len(core.Endpoints()))
	for _, l := range core.Limits() {
		r.Limits = append(r.Limits, &pilasterv1.Limit{
			Name: l.Table, Used: uint32(l.Used), Capacity: uint32(l.Capacity), LargestTenant: l.Largest,
			LargestUsed: uint32(l.LargestUsed),
		})
	}
	r.Tenants = uint32(len(core.TenantNames()))
	blocked := core.blocked()
	if blocked != nil {
		r.Problems = append(r.Problems, blocked.Error())
	}
	s.addDatapath(ctx, r, core.Core)
	addPolicies(r, core.Core)
	s.addOffloads(r, core.Core)
	s.addEgress(r, core.Core)
	addServices(r, core.Core)
	for _, gateway := range core.Networks().Gateways() {
		addGateway(r, gateway)
	}
	if locator := core.Networks().Locator(); locator.IsValid() {
		r.Locator, r.Plan.Identifiers = locator.String(), true
	}
	pullers := core.Networks().Pullers()
	for _, name := range slices.Sorted(maps.Keys(pullers)) {
		r.Pulls = append(r.Pulls, pullToProto(name, pullers[name].PullStats()))
	}
	r.Problems = append(r.Problems, core.Problems()...)
	for _, reason := range link.NotTaken {
		r.Problems = append(
			r.Problems,
			"changed labels are not known to other nodes: "+reason+"\n  their policies use the container's initial "+
				"labels; recreate it",
		)
	}
	if lost := core.LostProblem(); lost != "" {
		r.Problems = append(r.Problems, lost)
	}
	// Other problems, such as a position behind other programs, are shown and do not affect readiness.
	r.Ready = blocked == nil && r.Datapath.GetHealthy()
	return r
}

// addGateway adds the gateway status. A node without a gateway is ready; only underlay services cannot be reached.
func addGateway(r *pilasterv1.StatusResponse, g network.Gateway) {
	r.Gateway = &pilasterv1.Gateway{
		UnderlayServices: uint32(g.UnderlayServices),
		Publications:     uint32(g.Publications),
		Missing:          g.Missing,
	}
	if g.Missing == "" {
		r.Gateway.Own, r.Gateway.Virtual = g.Own.String(), g.Virtual.String()
		return
	}
	if g.UnderlayServices+g.Publications > 0 {
		r.Problems = append(
			r.Problems,
			fmt.Sprintf(
				"this node has no gateway, so %s and %s of its tenants cannot be reached through it: %s",
				humanize.Of(
					g.UnderlayServices,
					"underlay service",
					"underlay services",
				),
				humanize.Of(g.Publications, "publication", "publications"),
				g.Missing,
			),
		)
	}
}

func (s *Service) addDatapath(ctx context.Context, r *pilasterv1.StatusResponse, core *agent.Core) {
	status, err := core.DatapathStatus(ctx)
	if err != nil {
		r.Problems = append(r.Problems, "reading the state of the packet path failed: "+err.Error())
		return
	}
	r.Problems = append(r.Problems, status.Problems...)
	r.Datapath = &pilasterv1.DatapathStatus{
		DeviceKind: status.DeviceKind, Programs: status.Programs, Healthy: status.Healthy,
		FirstInChain: status.FirstInChain,
		Guarded:      status.Guarded, DeviceWhy: status.DeviceWhy, Without: status.Without, Switches: status.Switches,
	}
	entries, err := core.Networks().Entries(ctx)
	if err != nil {
		r.Problems = append(r.Problems, "reading the tables of the packet path failed: "+err.Error())
	}
	for _, e := range entries {
		r.Datapath.Entries = append(r.Datapath.Entries, entriesToProto(e))
	}
	for _, drop := range status.Drops {
		r.Drops = append(
			r.Drops,
			&pilasterv1.DropCount{Reason: drop.Reason, Packets: drop.Packets, LastMinute: s.drops.Since(drop)},
		)
	}
}

func pullToProto(name string, s network.PullStats) *pilasterv1.Pull {
	return &pilasterv1.Pull{
		Network: name, Subscriptions: uint32(s.Subscriptions), Unknown: uint32(s.Unknown), Capacity: uint32(s.Capacity),
		Begun: s.Begun, Ignored: s.Ignored, Refused: s.Refused,
	}
}

func entriesToProto(e dpapi.Entries) *pilasterv1.Entries {
	return &pilasterv1.Entries{Table: e.Table, Used: uint32(e.Used), Capacity: uint32(e.Capacity), Cache: e.Cache}
}
