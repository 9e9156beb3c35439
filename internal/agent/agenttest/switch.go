package agenttest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Switch is a fake switch of network nimitz: it keeps the entries it receives, and allocates subnets and addresses.
type Switch struct {
	Mu      sync.Mutex
	Has     map[any]pipeline.Entry
	Ports   map[pipeline.Port]string
	Fail    error
	Given   byte
	Subnets []netip.Prefix // of the node
	During  func(call string)
	LinkMTU int
	Dropped map[dropreason.Reason]uint64

	Unpoliced error
}

// NewSwitch returns an empty switch.
func NewSwitch() *Switch {
	return &Switch{
		Has:     map[any]pipeline.Entry{},
		Ports:   map[pipeline.Port]string{},
		Subnets: []netip.Prefix{netip.MustParsePrefix("10.0.3.0/24")},
	}
}

func (s *Switch) Plug(_ context.Context, p pipeline.Port, device pipeline.Device) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Ports[p] = device.Name
	return nil
}

func (s *Switch) Unplug(_ context.Context, p pipeline.Port) error {
	if s.During != nil {
		s.During("Unplug")
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	delete(s.Ports, p)
	return nil
}

func (s *Switch) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	if s.During != nil {
		s.During("Apply")
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Fail != nil {
		return s.Fail
	}
	for _, e := range remove {
		delete(s.Has, e.Match())
	}
	for _, e := range add {
		s.Has[e.Match()] = e
	}
	return nil
}

func (s *Switch) Check(_ context.Context, p pipeline.Port, device pipeline.Device, entries []pipeline.Entry) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if name, plugged := s.Ports[p]; !plugged || name != device.Name {
		return fmt.Errorf("%s is not %v", device.Name, p)
	}
	for _, e := range entries {
		if s.Has[e.Match()] != e {
			return fmt.Errorf("%v is not there", e)
		}
	}
	return nil
}

func (s *Switch) Drops(context.Context) (map[dropreason.Reason]uint64, error) {
	return s.Dropped, s.Fail
}

func (s *Switch) PolicyError() error { return s.Unpoliced }

func (s *Switch) Lacks() []string { return []string{"traceroute"} }

func (s *Switch) SetMTU(mtu int) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.LinkMTU = mtu
	return nil
}

func (s *Switch) Entries(context.Context) (all []pipeline.Entry, _ error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, e := range s.Has {
		all = append(all, e)
	}
	return all, nil
}

// Remote returns which node's VTEP each prefix of a VNI leads to, sorted: "10.0.2.0/24 fd70:696c:6100:2::2".
func (s *Switch) Remote(vni uint32) string {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var words []string
	for _, e := range s.Has {
		if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN && uint32(f.VNI) == vni {
			words = append(words, fmt.Sprint(f.To, " ", f.VTEP))
		}
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

func (s *Switch) NodeCIDRs(context.Context, string) ([]netip.Prefix, error) {
	return s.Subnets, nil
}

func (s *Switch) Allocate(context.Context, string, string, address.AppID) ([]netip.Addr, error) {
	s.Given++
	return []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 77, s.Given})}, nil
}

func (s *Switch) Free(context.Context, string, string) error { return nil }
