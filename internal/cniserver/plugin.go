package cniserver

import (
	"context"
	"errors"
	"io"
	"log/slog"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Error codes in addition to those of the specification.
const (
	codeNotAvailable  = 50 // STATUS: the agent cannot serve an ADD now
	codeUnknownTenant = 101
	codeFull          = 102
)

// Versions returns the supported versions of the CNI specification.
func Versions() version.PluginInfo { return version.PluginSupports("1.0.0", "1.1.0") }

// Agent is the part of AgentService that CNI needs.
type Agent interface {
	AddEndpoint(
		context.Context,
		*connect.Request[pilasterv1.AddEndpointRequest],
	) (*connect.Response[pilasterv1.AddEndpointResponse], error)
	DeleteEndpoint(
		context.Context,
		*connect.Request[pilasterv1.DeleteEndpointRequest],
	) (*connect.Response[pilasterv1.DeleteEndpointResponse], error)
	CheckEndpoint(
		context.Context,
		*connect.Request[pilasterv1.CheckEndpointRequest],
	) (*connect.Response[pilasterv1.CheckEndpointResponse], error)
	CollectGarbage(
		context.Context,
		*connect.Request[pilasterv1.CollectGarbageRequest],
	) (*connect.Response[pilasterv1.CollectGarbageResponse], error)
	Status(
		context.Context,
		*connect.Request[pilasterv1.StatusRequest],
	) (*connect.Response[pilasterv1.StatusResponse], error)
}

type plugin struct {
	agent Agent
	log   *slog.Logger
}

// run performs a call and writes the result to stdout.
func (p plugin) run(ctx context.Context, c call, stdout io.Writer) error {
	config, err := ParseConfig(c.config, c.args)
	if err != nil {
		return unusable(err)
	}
	switch c.verb {
	case "ADD":
		return p.add(ctx, c, config, stdout)
	case "DEL":
		_, err := p.agent.DeleteEndpoint(
			ctx,
			connect.NewRequest(&pilasterv1.DeleteEndpointRequest{ContainerId: c.containerID, Interface: c.name}),
		)
		return toCNI(err)
	case "CHECK":
		return p.check(ctx, c, config)
	case "GC":
		return p.collectGarbage(ctx, config)
	}
	return p.status(ctx)
}

func unusable(err error) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "the network configuration cannot be used", err.Error())
}

func (p plugin) add(ctx context.Context, c call, config Config, stdout io.Writer) error {
	name, labels, err := config.Identity()
	if err != nil {
		return unusable(err)
	}
	key, err := config.AddressKey()
	if err != nil {
		return unusable(err)
	}
	ports, _, err := config.HostPorts()
	if err != nil {
		return unusable(err)
	}
	if ignored := config.Ignored(); len(ignored) > 0 {
		p.log.Debug("annotations of the pod are ignored: the network configuration has \"annotations\": \"none\"",
			"pod", config.Pod, "container", c.containerID, "annotations", ignored)
	}
	resp, err := p.agent.AddEndpoint(ctx, connect.NewRequest(&pilasterv1.AddEndpointRequest{
		ContainerId: c.containerID, Interface: c.name, Netns: c.netns,
		Tenant: name, Labels: labels, Pod: config.Pod, CniNetwork: config.Network,
		AddressKey: key, HostPorts: ports,
	}))
	if err != nil {
		return toCNI(err)
	}
	r, err := result(resp.Msg.GetEndpoint(), c.netns)
	if err != nil {
		return err
	}
	converted, err := r.GetAsVersion(config.Version)
	if err != nil {
		return err
	}
	return converted.PrintTo(stdout)
}

func (p plugin) check(ctx context.Context, c call, config Config) error {
	addrs, err := config.claimed(c.name, c.netns)
	if err != nil {
		return unusable(err)
	}
	req := &pilasterv1.CheckEndpointRequest{
		ContainerId: c.containerID, Interface: c.name, Netns: c.netns, Addresses: addrs,
	}
	ports, given, err := config.HostPorts()
	if err != nil {
		return unusable(err)
	}
	if given {
		req.HostPorts = &pilasterv1.CheckEndpointRequest_HostPorts{All: ports}
	}
	_, err = p.agent.CheckEndpoint(ctx, connect.NewRequest(req))
	if err != nil && connect.CodeOf(err) == connect.CodeNotFound {
		return types.NewError(types.ErrUnknownContainer, message(err), "")
	}
	return toCNI(err)
}

func (p plugin) status(ctx context.Context) error {
	resp, err := p.agent.Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		return types.NewError(codeNotAvailable, message(err), "")
	}
	if resp.Msg.GetNode().GetEdge() {
		return types.NewError(codeNotAvailable, "this node is an Edge Switch, which cannot have containers", "")
	}
	if !resp.Msg.Ready {
		problem := "the agent is not ready"
		if len(resp.Msg.Problems) > 0 {
			problem = resp.Msg.Problems[0]
		}
		return types.NewError(codeNotAvailable, problem, "")
	}
	return nil
}

func (p plugin) collectGarbage(ctx context.Context, config Config) error {
	// A missing list means that no attachment is valid, because libcni omits an empty list.
	req := &pilasterv1.CollectGarbageRequest{CniNetwork: config.Network}
	for _, v := range config.ValidAttachments {
		req.Valid = append(
			req.Valid,
			&pilasterv1.CollectGarbageRequest_Valid{ContainerId: v.ContainerID, Interface: v.IfName},
		)
	}
	_, err := p.agent.CollectGarbage(ctx, connect.NewRequest(req))
	return toCNI(err)
}

// message returns the text of an error without its code.
func message(err error) string {
	var refused *connect.Error
	if errors.As(err, &refused) && refused.Message() != "" {
		return refused.Message()
	}
	return err.Error()
}

// toCNI converts an error to a CNI error. Its code determines whether the runtime retries.
func toCNI(err error) error {
	if err == nil {
		return nil
	}
	code := types.ErrInternal
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeCanceled, connect.CodeDeadlineExceeded, connect.CodeAborted:
		code = types.ErrTryAgainLater
	case connect.CodeNotFound:
		code = codeUnknownTenant
	case connect.CodeResourceExhausted:
		code = codeFull
	case connect.CodeInvalidArgument:
		code = types.ErrInvalidNetworkConfig
	}
	return types.NewError(code, message(err), "")
}
