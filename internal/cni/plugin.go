package cni

import (
	"context"
	"errors"
	"io"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Codes of errors beyond those the spec names.
const (
	codeNotAvailable  = 50 // STATUS: an ADD would not be taken now
	codeUnknownTenant = 101
	codeFull          = 102
)

// Versions of the spec that the plugin speaks.
func Versions() version.PluginInfo { return version.PluginSupports("1.0.0", "1.1.0") }

// Funcs are the verbs; results are printed to stdout.
func Funcs(stdout io.Writer) skel.CNIFuncs {
	return skel.CNIFuncs{
		Add: func(args *skel.CmdArgs) error { return add(args, stdout) },
		Del: del, Check: check, Status: status, GC: collectGarbage,
	}
}

// begin reads the configuration and finds the agent.
func begin(args *skel.CmdArgs) (Config, agent, error) {
	c, err := ParseConfig(args.StdinData, args.Args)
	if err != nil {
		return c, agent{}, unusable(err)
	}
	return c, agent{c.AgentSocket}, nil
}

func unusable(err error) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "the network configuration cannot be used", err.Error())
}

func add(args *skel.CmdArgs, stdout io.Writer) error {
	c, a, err := begin(args)
	if err != nil {
		return err
	}
	name, labels, err := c.Identity()
	if err != nil {
		return unusable(err)
	}
	req := &pilasterv1.AddEndpointRequest{
		ContainerId: args.ContainerID, Interface: args.IfName, Netns: args.Netns,
		Tenant: name, Labels: labels, Pod: c.Pod, CniNetwork: c.Network,
	}
	resp := &pilasterv1.AddEndpointResponse{}
	if err := a.call(context.Background(), "AddEndpoint", req, resp); err != nil {
		return toCNI(err)
	}
	r, err := result(resp.GetEndpoint(), args.Netns)
	if err != nil {
		return err
	}
	converted, err := r.GetAsVersion(c.Version)
	if err != nil {
		return err
	}
	return converted.PrintTo(stdout)
}

func del(args *skel.CmdArgs) error {
	_, a, err := begin(args)
	if err != nil {
		return err
	}
	req := &pilasterv1.DeleteEndpointRequest{ContainerId: args.ContainerID, Interface: args.IfName}
	return toCNI(a.call(context.Background(), "DeleteEndpoint", req, &pilasterv1.DeleteEndpointResponse{}))
}

func check(args *skel.CmdArgs) error {
	c, a, err := begin(args)
	if err != nil {
		return err
	}
	addrs, err := c.claimed(args.IfName, args.Netns)
	if err != nil {
		return unusable(err)
	}
	req := &pilasterv1.CheckEndpointRequest{ContainerId: args.ContainerID, Interface: args.IfName, Netns: args.Netns, Addresses: addrs}
	err = a.call(context.Background(), "CheckEndpoint", req, &pilasterv1.CheckEndpointResponse{})
	if refused := (*agentError)(nil); errors.As(err, &refused) && refused.Code == "not_found" {
		return types.NewError(types.ErrUnknownContainer, refused.Message, "")
	}
	return toCNI(err)
}

func status(args *skel.CmdArgs) error {
	_, a, err := begin(args)
	if err != nil {
		return err
	}
	resp := &pilasterv1.StatusResponse{}
	if err := a.call(context.Background(), "Status", &pilasterv1.StatusRequest{}, resp); err != nil {
		return types.NewError(codeNotAvailable, err.Error(), "")
	}
	if !resp.Ready {
		problem := "the agent is not ready"
		if len(resp.Problems) > 0 {
			problem = resp.Problems[0]
		}
		return types.NewError(codeNotAvailable, problem, "")
	}
	return nil
}

func collectGarbage(args *skel.CmdArgs) error {
	c, a, err := begin(args)
	if err != nil {
		return err
	}
	// No list means that nothing is valid: so libcni asks when its caller has no list.
	req := &pilasterv1.CollectGarbageRequest{CniNetwork: c.Network}
	for _, v := range c.ValidAttachments {
		req.Valid = append(req.Valid, &pilasterv1.CollectGarbageRequest_Valid{ContainerId: v.ContainerID, Interface: v.IfName})
	}
	return toCNI(a.call(context.Background(), "CollectGarbage", req, &pilasterv1.CollectGarbageResponse{}))
}

// toCNI gives an error the code that tells a runtime what to do about it.
func toCNI(err error) error {
	if err == nil {
		return nil
	}
	if away := (*unreachable)(nil); errors.As(err, &away) {
		return types.NewError(types.ErrTryAgainLater, err.Error(), "")
	}
	refused := (*agentError)(nil)
	if !errors.As(err, &refused) {
		return types.NewError(types.ErrInternal, err.Error(), "")
	}
	code := types.ErrInternal
	switch refused.Code {
	case "unavailable", "canceled", "deadline_exceeded", "aborted":
		code = types.ErrTryAgainLater
	case "not_found":
		code = codeUnknownTenant
	case "resource_exhausted":
		code = codeFull
	case "invalid_argument":
		code = types.ErrInvalidNetworkConfig
	}
	return types.NewError(code, refused.Message, "")
}
