package service

import (
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// FromProto parses a service; Check checks it.
func FromProto(m *pilasterv1.Service) (s Service, err error) {
	s = Service{
		Tenant:          m.GetTenant(),
		Name:            Name{m.GetNamespace(), m.GetName()},
		Selector:        m.GetSelector(),
		Affinity:        time.Duration(m.GetAffinitySeconds()) * time.Second,
		PublishNotReady: m.GetPublishNotReady(),
		Distribution:    Distribution(m.GetDistribution()),
		Headless:        m.GetHeadless(),
		NodePorts:       m.GetNodePorts(),
		TrafficPolicy:   ParseTrafficPolicy(m.GetTrafficPolicy()),
		LoadBalancer:    m.GetLoadBalancer(),
	}
	if m.GetCreated() != nil {
		s.Created = m.Created.AsTime()
	}
	if m.GetAddress() != "" {
		if s.Address, err = netip.ParseAddr(m.Address); err != nil {
			return s, fmt.Errorf("service %.300s: %.80q is not an address", s.Name, m.Address)
		}
	}
	for _, text := range m.GetExternalIps() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return s, fmt.Errorf("service %.300s: external address %.80q is not an address", s.Name, text)
		}
		s.ExternalIPs = append(s.ExternalIPs, a)
	}
	if text := m.GetLoadBalancerIp(); text != "" {
		if s.LoadBalancerIP, err = netip.ParseAddr(text); err != nil {
			return s, fmt.Errorf("service %.300s: load-balancer address %.80q is not an address", s.Name, text)
		}
	}
	for _, p := range m.GetPorts() {
		port, err := portFromProto(p)
		if err != nil {
			return s, fmt.Errorf("service %.300s: %w", s.Name, err)
		}
		s.Ports = append(s.Ports, port)
	}
	return s, nil
}

func portFromProto(m *pilasterv1.ServicePort) (p Port, err error) {
	const most = 1<<16 - 1
	if m.GetPort() > most || m.GetTarget() > most {
		return p, fmt.Errorf("port %d with target %d: ports are 1 to %d", m.GetPort(), m.GetTarget(), most)
	}
	if m.GetNodePort() > most {
		return p, fmt.Errorf("port %d with node port %d: node ports are %d to %d", m.GetPort(), m.GetNodePort(),
			FirstNodePort, LastNodePort)
	}
	p = Port{
		Name: m.GetName(), Port: uint16(m.GetPort()), Target: uint16(m.GetTarget()), NodePort: uint16(m.GetNodePort()),
	}
	if p.Target == 0 {
		p.Target = p.Port
	}
	p.Protocol, err = ParseProtocol(m.GetProtocol())
	return p, err
}

// ParseProtocol is the inverse of String. No text means TCP.
func ParseProtocol(s string) (Protocol, error) {
	switch s {
	case "", TCP.String():
		return TCP, nil
	case UDP.String():
		return UDP, nil
	}
	return 0, fmt.Errorf("protocol %.40q: use TCP or UDP", s)
}

// Proto is the inverse of FromProto.
func (s Service) Proto() *pilasterv1.Service {
	m := &pilasterv1.Service{
		Tenant: s.Tenant, Namespace: s.Namespace, Name: s.Name.Name,
		Selector:        s.Selector,
		AffinitySeconds: uint32(s.Affinity / time.Second),
		PublishNotReady: s.PublishNotReady,
		Distribution:    string(s.Distribution),
		Headless:        s.Headless,
		NodePorts:       s.NodePorts,
		TrafficPolicy:   string(s.TrafficPolicy),
		LoadBalancer:    s.LoadBalancer,
	}
	if !s.Created.IsZero() {
		m.Created = timestamppb.New(s.Created)
	}
	if s.Address.IsValid() {
		m.Address = s.Address.String()
	}
	for _, a := range s.ExternalIPs {
		m.ExternalIps = append(m.ExternalIps, a.String())
	}
	if s.LoadBalancerIP.IsValid() {
		m.LoadBalancerIp = s.LoadBalancerIP.String()
	}
	for _, p := range s.Ports {
		m.Ports = append(m.Ports, &pilasterv1.ServicePort{
			Name: p.Name, Protocol: p.Protocol.String(), Port: uint32(p.Port), Target: uint32(p.Target),
			NodePort: uint32(p.NodePort),
		})
	}
	return m
}

// SliceFromProto parses a slice; Check checks it.
func SliceFromProto(m *pilasterv1.EndpointSlice) (s Slice, err error) {
	s = Slice{
		Tenant:      m.GetTenant(),
		Service:     ParseName(m.GetService()),
		Name:        m.GetName(),
		Node:        m.GetNode(),
		Zone:        m.GetZone(),
		Unreachable: m.GetUnreachable(),
	}
	for _, e := range m.GetEndpoints() {
		a, err := netip.ParseAddr(e.GetAddress())
		if err != nil {
			return s, fmt.Errorf("endpoints %.300s of service %.300s: %.80q is not an address", s.Name, s.Service,
				e.GetAddress())
		}
		s.Endpoints = append(s.Endpoints, Endpoint{
			Address: a, Name: e.GetName(), NotReady: e.GetNotReady(), Terminating: e.GetTerminating(),
		})
	}
	return s, nil
}

// Proto is the inverse of SliceFromProto.
func (s Slice) Proto() *pilasterv1.EndpointSlice {
	m := &pilasterv1.EndpointSlice{
		Tenant: s.Tenant, Service: s.Service.String(), Name: s.Name, Node: s.Node, Zone: s.Zone,
		Unreachable: s.Unreachable,
	}
	for _, e := range s.Endpoints {
		m.Endpoints = append(m.Endpoints, &pilasterv1.ServiceEndpoint{
			Address: e.Address.String(), Name: e.Name, NotReady: e.NotReady, Terminating: e.Terminating,
		})
	}
	return m
}
