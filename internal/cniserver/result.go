package cniserver

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// result returns the CNI result for an endpoint, without plaintext addresses. netns is the path from the runtime.
func result(e *pilasterv1.Endpoint, netns string) (*types100.Result, error) {
	if len(e.GetAttachments()) == 0 {
		return nil, errors.New("the agent's response is invalid: the endpoint has no address")
	}
	r := &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{{Name: e.Interface, Mac: e.ContainerMac, Mtu: int(e.Mtu), Sandbox: netns}},
	}
	inside := 0
	if e.HostDevice != "" {
		r.Interfaces, inside = slices.Insert(r.Interfaces, 0, &types100.Interface{Name: e.HostDevice}), 1
	}
	for _, a := range e.Attachments {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil {
			return nil, fmt.Errorf("the agent's response is invalid: %w", err)
		}
		gateway := net.ParseIP(a.Gateway)
		r.IPs = append(r.IPs, &types100.IPConfig{
			Interface: &inside,
			Address:   net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
			Gateway:   gateway,
		})
		for _, route := range a.Routes {
			_, dst, err := net.ParseCIDR(route)
			if err != nil {
				return nil, fmt.Errorf("the agent's response is invalid: %w", err)
			}
			r.Routes = append(r.Routes, &types.Route{Dst: *dst, GW: gateway})
		}
	}
	return r, nil
}

// claimed returns the interface's addresses in the prevResult of the configuration.
func (c Config) claimed(iface, netns string) ([]string, error) {
	if c.file.RawPrevResult == nil {
		return nil, errors.New("the configuration has no prevResult, which CHECK needs")
	}
	if err := version.ParsePrevResult(&c.file.PluginConf); err != nil {
		return nil, fmt.Errorf("prevResult: %w", err)
	}
	prev, err := types100.NewResultFromResult(c.file.PrevResult)
	if err != nil {
		return nil, fmt.Errorf("prevResult: %w", err)
	}
	var addrs []string
	for _, ip := range prev.IPs {
		if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(prev.Interfaces) {
			continue
		}
		if i := prev.Interfaces[*ip.Interface]; i.Name == iface && i.Sandbox == netns {
			addrs = append(addrs, ip.Address.String())
		}
	}
	return addrs, nil
}
