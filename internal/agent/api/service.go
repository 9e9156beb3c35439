package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/gateways"
	"pilaster.io/pilaster/internal/agent/monitor"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/cniserver"
	"pilaster.io/pilaster/internal/debugserver"
	"pilaster.io/pilaster/internal/dpapi"
)

// Service implements AgentService on a Core. Until the core is ready, its answers say what the agent waits for.
type Service struct {
	config   Config
	core     atomic.Pointer[running]
	tracer   atomic.Pointer[trace.Tracer]    // nil if the packet path cannot be traced
	sharing  atomic.Pointer[Sharing]         // nil if the node cannot be in offloads
	gateways atomic.Pointer[gateways.Prober] // nil if containers here cannot use egress gateways
	events   monitor.Hub
	calls    *prometheus.HistogramVec
	drops    monitor.DropWindow
}

// Config has the parts of a Service besides the core.
type Config struct {
	Node    *state.Node
	Link    func() agent.LinkStatus // state of the link to the orchestrator
	URL     string                  // of the orchestrator
	Uplinks []string
	Edge    bool // the node is an Edge Switch
	Version string
	Log     *slog.Logger
	Metrics []prometheus.Collector // exported beside those of the service
	// SourceTo returns the source of packets of the node's processes to an address; nil: not known.
	SourceTo func(netip.Addr) (netip.Addr, error)
}

// running exists once the node has its prefix.
type running struct {
	*agent.Core
	blocked func() error // returns why ADDs are refused now, or nil
}

func New(c Config) *Service {
	return &Service{config: c, calls: newCalls()}
}

// Handler serves the agent's socket: the CNI plugin, AgentService, and observer.
func (s *Service) Handler(observer http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/cni", cniserver.Handler(s, s.config.Log, s.timedCNI))
	mux.Handle(pilasterv1connect.NewAgentServiceHandler(s, connect.WithInterceptors(s.Timed())))
	mux.Handle("/", observer)
	mux.HandleFunc("/debug/goroutines", debugserver.Goroutines)
	mux.HandleFunc("/debug/memory", debugserver.ServeMemory)
	return mux
}

// Serve makes calls reach the core. blocked returns why new endpoints are refused; nil means never.
func (s *Service) Serve(core *agent.Core, blocked func() error) {
	if blocked == nil {
		blocked = func() error { return nil }
	}
	s.core.Store(&running{core, blocked})
}

func (s *Service) ready() (*running, error) {
	if r := s.core.Load(); r != nil {
		return r, nil
	}
	return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("%s", s.waiting()))
}

func (s *Service) waiting() string {
	if _, ok := s.config.Node.Membership(); ok {
		return "the agent is starting; try again in a moment"
	}
	return fmt.Sprintf(
		"this node has no prefix yet: the orchestrator at %s has not answered (%s)\n  start it, or correct "+
			"--orchestrator",
		s.config.URL,
		s.config.Link().LastError,
	)
}

// RunEvents delivers events of the packet path to Monitor and RecentEvents until ctx ends.
func (s *Service) RunEvents(ctx context.Context, path dpapi.Events, log *slog.Logger) error {
	return s.events.Run(ctx, path, log)
}

// RunDrops samples the drop counters until ctx ends, and reconciles device settings by keepSettings as often.
func (s *Service) RunDrops(ctx context.Context, core *agent.Core, keepSettings func() error, log *slog.Logger) {
	tick := time.NewTicker(monitor.SampleEvery)
	defer tick.Stop()
	s.drops.Run(ctx, keepSettings, core.DatapathStatus, tick.C, log)
}

// fdPath is a path to reopen the namespace while the file is open.
func fdPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

func (s *Service) AddEndpoint(
	ctx context.Context,
	req *connect.Request[pilasterv1.AddEndpointRequest],
) (*connect.Response[pilasterv1.AddEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	if err := core.blocked(); err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, err)
	}
	ports, err := hostPortsFromProto(req.Msg.HostPorts)
	if err != nil {
		return nil, err
	}
	netns, err := openNetns(ctx, req.Msg.Netns)
	if err != nil {
		return nil, toConnect(err)
	}
	defer netns.Close()
	r, err := core.Add(ctx, agent.AddRequest{
		ContainerID: req.Msg.ContainerId, Interface: req.Msg.Interface,
		Netns: req.Msg.Netns, OpenNetns: fdPath(netns),
		Tenant: req.Msg.Tenant, Labels: req.Msg.Labels, Pod: req.Msg.Pod, CNINetwork: req.Msg.CniNetwork,
		AddressKey: req.Msg.AddressKey, HostPorts: ports,
	})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.AddEndpointResponse{Endpoint: endpointToProto(core.Networks(), r)}), nil
}

func (s *Service) DeleteEndpoint(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteEndpointRequest],
) (*connect.Response[pilasterv1.DeleteEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	if err := core.Delete(ctx, req.Msg.ContainerId, req.Msg.Interface); err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.DeleteEndpointResponse{}), nil
}

func (s *Service) CheckEndpoint(
	ctx context.Context,
	req *connect.Request[pilasterv1.CheckEndpointRequest],
) (*connect.Response[pilasterv1.CheckEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	q := agent.CheckRequest{ContainerID: req.Msg.ContainerId, Interface: req.Msg.Interface, Netns: req.Msg.Netns}
	for _, a := range req.Msg.Addresses {
		p, err := netip.ParsePrefix(a)
		if err != nil {
			return nil, connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf("address %q does not have the form fc00::1/128", a),
			)
		}
		q.Addresses = append(q.Addresses, p)
	}
	if req.Msg.HostPorts != nil {
		ports, err := hostPortsFromProto(req.Msg.HostPorts.All)
		if err != nil {
			return nil, err
		}
		q.HostPorts = &ports
	}
	netns, err := openNetns(ctx, req.Msg.Netns)
	if err != nil {
		return nil, toConnect(refusal.New(refusal.ErrCheck, "%v", err))
	}
	defer netns.Close()
	q.OpenNetns = fdPath(netns)
	if err := core.Check(ctx, q); err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.CheckEndpointResponse{}), nil
}

func (s *Service) CollectGarbage(
	ctx context.Context,
	req *connect.Request[pilasterv1.CollectGarbageRequest],
) (*connect.Response[pilasterv1.CollectGarbageResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	if req.Msg.CniNetwork == "" {
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf("the CNI network is missing; nothing was removed"),
		)
	}
	valid := make(map[[2]string]bool, len(req.Msg.Valid))
	for _, v := range req.Msg.Valid {
		valid[[2]string{v.ContainerId, v.Interface}] = true
	}
	removed, err := core.CollectGarbage(
		ctx,
		req.Msg.CniNetwork,
		func(containerID, iface string) bool { return valid[[2]string{containerID, iface}] },
	)
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.CollectGarbageResponse{
		Removed: endpointsToProto(core.Networks(), removed),
	}), nil
}

func (s *Service) ListEndpoints(
	context.Context,
	*connect.Request[pilasterv1.ListEndpointsRequest],
) (*connect.Response[pilasterv1.ListEndpointsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.ListEndpointsResponse{
		Endpoints: endpointsToProto(core.Networks(), core.Endpoints()),
	}), nil
}

func (s *Service) GetEndpoint(
	_ context.Context,
	req *connect.Request[pilasterv1.GetEndpointRequest],
) (*connect.Response[pilasterv1.GetEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	r, err := core.Find(req.Msg.Key)
	if err != nil {
		return nil, toConnect(err)
	}
	e := endpointToProto(core.Networks(), r)
	if node, ok := core.NodeSeenBy(r); ok {
		e.NodeAddress = node.String()
	}
	e.Moved = core.Moved(r)
	return connect.NewResponse(&pilasterv1.GetEndpointResponse{Endpoint: e}), nil
}

func (s *Service) Explain(
	_ context.Context,
	req *connect.Request[pilasterv1.ExplainRequest],
) (*connect.Response[pilasterv1.ExplainResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	addr, err := address.ParseAny(req.Msg.Address)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	e := core.Explain(addr)
	resp := &pilasterv1.ExplainResponse{Tenant: e.Tenant}
	if e.Plaintext.IsValid() {
		resp.Plaintext = e.Plaintext.String()
	}
	if e.App != nil {
		resp.App = &pilasterv1.App{Tenant: e.Tenant, Id: uint32(e.App.ID), Labels: e.App.Labels}
	}
	if e.Endpoint != nil {
		resp.Endpoint = endpointToProto(core.Networks(), *e.Endpoint)
	}
	if resp.Tenant = cmp.Or(resp.Tenant, e.Gateway); e.Outside != nil {
		resp.Tenant, resp.Endpoint = e.Outside.Tenant, endpointToProto(core.Networks(), *e.Outside)
	}
	for _, o := range e.Overlays {
		m := &pilasterv1.Overlaid{Tenant: o.Tenant, Cidr: o.CIDR.String(), Region: o.Region}
		if o.Endpoint != nil {
			m.Endpoint = endpointToProto(core.Networks(), *o.Endpoint)
		}
		resp.Overlaid = append(resp.Overlaid, m)
	}
	for _, s := range e.UnderlayServices {
		resp.UnderlayServices = append(
			resp.UnderlayServices,
			&pilasterv1.UnderlayService{
				Tenant:  s.Tenant,
				Name:    s.Name,
				Virtual: s.Virtual.String(),
				Real:    s.Real.String(),
			},
		)
	}
	for _, s := range e.Services {
		resp.Services = append(resp.Services, s.Proto())
	}
	for _, r := range e.Publishers {
		resp.Publishers = append(resp.Publishers, endpointToProto(core.Networks(), r))
	}
	if e.Published != nil {
		resp.Publication, resp.Published = e.Publisher+"/"+e.Published.Name, e.Published.Container.String()
	}
	return connect.NewResponse(resp), nil
}

func (s *Service) Monitor(
	ctx context.Context,
	req *connect.Request[pilasterv1.MonitorRequest],
	stream *connect.ServerStream[pilasterv1.MonitorResponse],
) error {
	core, err := s.ready()
	if err != nil {
		return err
	}
	events, stop := s.events.Watch()
	defer stop()
	// The headers tell the client that no event after them is missed.
	if err := stream.Send(nil); err != nil {
		return err
	}
	for {
		select {
		case e := <-events:
			if len(req.Msg.Types) > 0 && !slices.Contains(req.Msg.Types, e.Type) {
				continue
			}
			if err := stream.Send(eventToProto(core.Core, e)); err != nil {
				return err
			}
		case <-ctx.Done():
			return connect.NewError(
				connect.CodeUnavailable,
				errors.New("the agent is stopping"),
			) // or the client has gone
		}
	}
}

func (s *Service) RecentEvents(
	context.Context,
	*connect.Request[pilasterv1.RecentEventsRequest],
) (*connect.Response[pilasterv1.RecentEventsResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	resp := &pilasterv1.RecentEventsResponse{}
	for _, e := range s.events.Recent() {
		resp.Events = append(resp.Events, eventToProto(core.Core, e))
	}
	return connect.NewResponse(resp), nil
}

func eventToProto(core *agent.Core, e dpapi.Event) *pilasterv1.MonitorResponse {
	name, tenant := core.NameOf(e.Endpoint)
	m := &pilasterv1.MonitorResponse{
		Time: timestamppb.New(e.Time), Type: e.Type, Reason: e.Reason, Count: e.Count, Hook: e.Hook,
		Protocol: uint32(e.Protocol), SourcePort: uint32(e.SourcePort), DestinationPort: uint32(e.DestinationPort),
		Length: uint32(
			e.Length,
		), EndpointId: uint32(e.Endpoint), Endpoint: name, Tenant: tenant, Ifindex: uint32(e.Ifindex),
		LostEvents: e.Lost,
		Rule:       ruleToProto(core.RuleOf(e)),
	}
	if e.Source.IsValid() {
		m.Source, m.SourceEnd = e.Source.String(), endToProto(core.EndOf(e.Source, tenant))
	}
	if e.Destination.IsValid() {
		m.Destination, m.DestinationEnd = e.Destination.String(), endToProto(core.EndOf(e.Destination, tenant))
	}
	return m
}

func endToProto(e agent.End) *pilasterv1.PacketEnd {
	if e == (agent.End{}) {
		return nil
	}
	end := &pilasterv1.PacketEnd{Endpoint: e.Name}
	if e.Address.IsValid() {
		end.Address = e.Address.String()
	}
	if e.Plaintext.IsValid() {
		end.Plaintext = e.Plaintext.String()
	}
	return end
}

func (s *Service) LabelEndpoint(
	ctx context.Context,
	req *connect.Request[pilasterv1.LabelEndpointRequest],
) (*connect.Response[pilasterv1.LabelEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	r, err := core.Label(ctx, req.Msg.Key, agent.LabelChange{Set: req.Msg.Set, Remove: req.Msg.Remove})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.LabelEndpointResponse{Endpoint: endpointToProto(core.Networks(), r)}), nil
}

func (s *Service) SetEndpoint(
	ctx context.Context,
	req *connect.Request[pilasterv1.SetEndpointRequest],
) (*connect.Response[pilasterv1.SetEndpointResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	r, err := core.SetConditions(ctx, req.Msg.Key, agent.ConditionChange{
		Ready: req.Msg.Ready, Terminating: req.Msg.Terminating,
	})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&pilasterv1.SetEndpointResponse{Endpoint: endpointToProto(core.Networks(), r)}), nil
}
