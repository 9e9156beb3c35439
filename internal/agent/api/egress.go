package api

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/gateways"
	"pilaster.io/pilaster/internal/tenant"
)

// ServeGateways makes status and metrics show the egress gateways of tenants here.
func (s *Service) ServeGateways(of *gateways.Prober) { s.gateways.Store(of) }

func (s *Service) addEgress(r *pilasterv1.StatusResponse, core *agent.Core) {
	out := &pilasterv1.Egress{Addresses: uint32(core.EgressUsed())}
	if prober := s.gateways.Load(); prober != nil {
		for _, g := range prober.States() {
			state := &pilasterv1.EgressGatewayState{Node: g.Node, Alive: g.Alive, Answered: !g.Answered.IsZero()}
			if state.Answered {
				state.AgoMs = uint32(time.Since(g.Answered).Milliseconds())
			}
			out.Gateways = append(out.Gateways, state)
			state.Silent = g.Silent
			if g.Silent {
				effect := "new connections use the other gateway of their rule"
				if g.Only {
					effect = "no other gateway of some rules does either, so their packets are lost"
				}
				r.Problems = append(r.Problems, fmt.Sprintf("egress gateway %s does not answer; %s\n  check that the "+
					"node runs, and the fabric between", g.Node, effect))
			}
		}
	}
	for _, r := range core.GatewayRoles() {
		out.Roles = append(out.Roles, &pilasterv1.EgressGatewayRole{Tenant: r.Tenant, Address: r.Address.String()})
	}
	if problem := s.sourceProblem(core); problem != "" {
		r.Problems = append(r.Problems, problem)
	}
	if out.Addresses > 0 || len(out.Gateways)+len(out.Roles) > 0 {
		r.Egress = out
	}
}

// sourceProblem says that processes of this node do not reach containers of other nodes, although a tenant here allows
// it, because their packets have another source than the node's address; "" if they do.
func (s *Service) sourceProblem(core *agent.Core) string {
	of, may := core.MayReachContainers()
	m, joined := s.config.Node.Membership()
	if !may || !joined || s.config.SourceTo == nil {
		return ""
	}
	other := m.Plan.Node(1)
	if other == m.Prefix {
		other = m.Plan.Node(2)
	}
	own := tenant.NodeAddress(m.Prefix)
	if source, err := s.config.SourceTo(tenant.NodeAddress(other)); err == nil && source != own {
		return fmt.Sprintf("processes of this node reach no containers of tenant %s on other nodes, because their "+
			"packets have the source %v and not %v\n  ip -6 route add %v via ROUTER src %v; or bind their sockets to "+
			"that address", of, source, own, m.Plan.Base, own)
	}
	return ""
}

// egressMetrics are those of how packets leave the cluster.
type egressMetrics struct{ addresses, alive, answered *prometheus.Desc }

func newEgressMetrics() egressMetrics {
	return egressMetrics{
		addresses: metric("egress_addresses", "Egress addresses of containers on this node, in use."),
		alive: metric(
			"egress_gateway_used",
			"1 if new connections use the egress gateway, 0 while it does not answer and another one does.",
			"gateway",
		),
		answered: metric(
			"egress_probe_age_seconds",
			"Since an egress gateway has last answered a probe of this agent; probes are sent every 0.1 s.",
			"gateway",
		),
	}
}

func (m egressMetrics) collect(ch chan<- prometheus.Metric, s *pilasterv1.StatusResponse) {
	send := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if s.Egress == nil {
		return
	}
	send(m.addresses, float64(s.Egress.Addresses))
	for _, g := range s.Egress.Gateways {
		send(m.alive, number(g.Alive), g.Node)
		if g.Answered {
			send(m.answered, float64(g.AgoMs)/1000, g.Node)
		}
	}
}

func (s *Service) FindEgressAddress(
	_ context.Context,
	req *connect.Request[pilasterv1.FindEgressAddressRequest],
) (*connect.Response[pilasterv1.FindEgressAddressResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	a, err := address.ParseAny(req.Msg.Address)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	had, since, err := core.FindEgressAddress(a)
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.FindEgressAddressResponse{Node: s.config.Node.Name(), Since: timeToProto(since)}
	for _, e := range had {
		if req.Msg.At == nil || e.Had(req.Msg.At.AsTime()) {
			resp.Holders = append(resp.Holders, &pilasterv1.EgressHolder{
				Tenant: e.Tenant, ContainerId: e.Container, Interface: e.Interface, Pod: e.Pod,
				From: timeToProto(e.From), Until: timeToProto(e.Until),
			})
		}
	}
	return connect.NewResponse(resp), nil
}

// timeToProto returns nil for the zero time.
func timeToProto(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
