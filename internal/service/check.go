package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// Check refuses a name that is no DNS label, in a namespace that is none.
func (n Name) Check() error {
	if err := checkLabel("service name", n.Name); err != nil {
		return err
	}
	if n.Namespace == "" {
		return nil
	}
	return checkLabel("namespace", n.Namespace)
}

// checkLabel refuses what is no DNS label (RFC 1123), as Kubernetes does.
func checkLabel(what, s string) error {
	if tenant.CheckName(s) != nil {
		return fmt.Errorf("%s %.80q: 1 to 63 lower-case letters, digits or -, not - at either end", what, s)
	}
	return nil
}

// Check refuses an invalid service. Whether its address is one of the tenant's is not checked.
func (s Service) Check() error {
	if err := s.Name.Check(); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return fmt.Errorf("service %s: %w", s.Name, err)
	}
	return nil
}

func (s Service) check() error {
	switch {
	case s.Headless && s.Address.IsValid():
		return fmt.Errorf("it is headless, so it has no address, and %v was wanted", s.Address)
	case len(s.Ports) == 0 && !s.Headless:
		return fmt.Errorf("it has no port: set at least one, or make it headless")
	case len(s.Ports) > MaxPorts:
		return fmt.Errorf("it has %d ports, and the maximum is %d", len(s.Ports), MaxPorts)
	case s.Address.IsValid() && (!s.Address.Is6() || s.Address.Is4In6() || s.Address.Zone() != ""):
		return fmt.Errorf("address %v is not an IPv6 address", s.Address)
	case s.Affinity < 0 || s.Affinity > MaxAffinity || s.Affinity%time.Second != 0:
		return fmt.Errorf("affinity of %v: use whole seconds, at most %v", s.Affinity, MaxAffinity)
	case !slices.Contains([]Distribution{Anywhere, PreferSameZone, PreferSameNode}, s.Distribution):
		return fmt.Errorf("distribution %.80q: use %s or %s, or leave it out", s.Distribution, PreferSameZone,
			PreferSameNode)
	}
	if err := s.checkPorts(); err != nil {
		return err
	}
	if err := s.checkExposed(); err != nil {
		return err
	}
	for key := range s.Selector {
		if strings.HasPrefix(key, tenant.NamespaceKey) {
			return fmt.Errorf("selector: a service selects containers of its own namespace, and not by %.80q", key)
		}
	}
	if err := tenant.CheckLabels(s.Selector); err != nil {
		return fmt.Errorf("selector: %w", err)
	}
	return nil
}

func (s Service) checkPorts() error {
	names, ports := map[string]bool{}, map[string]bool{}
	for _, p := range s.Ports {
		what := fmt.Sprintf("port %d/%s", p.Port, p.Protocol)
		switch {
		case p.Port == 0 || p.Target == 0:
			return fmt.Errorf("%s with target %d: ports are 1 to 65535", what, p.Target)
		case p.Name == "" && len(s.Ports) > 1:
			return fmt.Errorf("%s has no name: with several ports each has one", what)
		case p.Name != "" && checkLabel("", p.Name) != nil:
			return fmt.Errorf("%s: %w", what, checkLabel("name", p.Name))
		case names[p.Name]:
			return fmt.Errorf("it has two ports with the name %q", p.Name)
		case ports[what]:
			return fmt.Errorf("it has %s twice", what)
		}
		names[p.Name], ports[what] = true, true
	}
	return nil
}

// checkExposed checks what hosts outside of the cluster reach. Whether addresses and node ports are free is not
// checked.
func (s Service) checkExposed() error {
	switch {
	case s.TrafficPolicy != Cluster && s.TrafficPolicy != Local:
		return fmt.Errorf("traffic policy %.80q: use %v or %v", string(s.TrafficPolicy), Cluster, Local)
	case s.Headless && s.IsExposed():
		return fmt.Errorf("it is headless, so hosts outside of the cluster cannot reach it: leave external " +
			"addresses, node ports and the load balancer out, or give it an address")
	case s.TrafficPolicy == Local && !s.IsExposed():
		return fmt.Errorf("traffic policy %v is for hosts outside of the cluster: give it an external address, node "+
			"ports or a load balancer, or leave the policy out", s.TrafficPolicy)
	case s.LoadBalancerIP.IsValid() && !s.LoadBalancer:
		return fmt.Errorf("it has load-balancer address %v and no load balancer: give it one (type LoadBalancer), or "+
			"leave the address out", s.LoadBalancerIP)
	case s.LoadBalancerIP.IsValid() && !isOutside(s.LoadBalancerIP):
		return fmt.Errorf("load-balancer address %v is not a global unicast IPv6 address", s.LoadBalancerIP)
	case len(s.ExternalIPs) > MaxExternalIPs:
		return fmt.Errorf("it has %d external addresses, and the maximum is %d", len(s.ExternalIPs), MaxExternalIPs)
	}
	for i, a := range s.ExternalIPs {
		if !isOutside(a) {
			return fmt.Errorf("external address %v is not a global unicast IPv6 address", a)
		}
		if slices.Contains(s.ExternalIPs[:i], a) {
			return fmt.Errorf("it has external address %v twice", a)
		}
	}
	taken := map[string]bool{}
	for _, p := range s.Ports {
		what := fmt.Sprintf("%d/%s", p.NodePort, p.Protocol)
		switch {
		case p.NodePort == 0:
			continue
		case !s.NodePorts:
			return fmt.Errorf("port %d/%s has node port %d, and the service has no node ports: give it node ports "+
				"(type NodePort), or leave the number out", p.Port, p.Protocol, p.NodePort)
		case p.NodePort < FirstNodePort || p.NodePort > LastNodePort:
			return fmt.Errorf("port %d/%s with node port %d: node ports are %d to %d", p.Port, p.Protocol, p.NodePort,
				FirstNodePort, LastNodePort)
		case taken[what]:
			return fmt.Errorf("it has node port %s twice", what)
		}
		taken[what] = true
	}
	return nil
}

// isOutside reports whether hosts outside of the cluster can have a route to an address.
func isOutside(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && a.Zone() == "" && a.IsGlobalUnicast()
}

// CheckPool refuses what is no pool of load-balancer addresses.
func CheckPool(p netip.Prefix) error {
	const shortest = 64
	switch {
	case !p.IsValid() || !isOutside(p.Addr()):
		return fmt.Errorf("pool %v is not a prefix of global unicast IPv6 addresses", p)
	case p.Bits() < shortest:
		return fmt.Errorf("pool %v: pools are /%d to /128", p, shortest)
	case p != p.Masked():
		return fmt.Errorf("pool %v has host bits set: write %v", p, p.Masked())
	}
	return nil
}

// maxEndpointName is the maximum length of the name of an endpoint: that of a pod.
const maxEndpointName = 253

// Check refuses an invalid slice. The addresses must be plaintext addresses of the tenant's containers; that is not
// checked.
func (s Slice) Check() error {
	if err := s.Service.Check(); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return fmt.Errorf("endpoints %.300s of service %s: %w", s.Name, s.Service, err)
	}
	return nil
}

func (s Slice) check() error {
	if s.Node == "" {
		if err := checkLabel("name of fixed endpoints", s.Name); err != nil {
			return err
		}
	} else if !s.IsOf(s.Node) {
		return fmt.Errorf("node %s writes endpoints with names %s.0, %[1]s.1 and so on", s.Node, s.Node)
	}
	if s.Zone != "" {
		if err := checkLabel("zone", s.Zone); err != nil {
			return err
		}
	}
	if len(s.Endpoints) > MaxSliceEndpoints {
		return fmt.Errorf("%d endpoints, and the maximum is %d: use several slices", len(s.Endpoints),
			MaxSliceEndpoints)
	}
	seen := map[netip.Addr]bool{}
	for _, e := range s.Endpoints {
		switch {
		case !e.Address.Is6() || e.Address.Is4In6() || e.Address.Zone() != "":
			return fmt.Errorf("%v is not an IPv6 address", e.Address)
		case seen[e.Address]:
			return fmt.Errorf("%v is there twice", e.Address)
		case len(e.Name) > maxEndpointName || strings.ContainsFunc(e.Name, notInEndpointName):
			return fmt.Errorf("%v: name %.80q: at most %d letters, digits or . _ - / are allowed", e.Address, e.Name,
				maxEndpointName)
		}
		seen[e.Address] = true
	}
	return nil
}

func notInEndpointName(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("._-/", r))
}

// EndpointName returns a name of a pod or container as Check accepts it.
func EndpointName(of string) string {
	name := strings.Map(func(r rune) rune {
		if notInEndpointName(r) {
			return '-'
		}
		return r
	}, of)
	return name[:min(len(name), maxEndpointName)]
}

// maxSliceNumber is the maximum number of digits in the name of a node's slice.
const maxSliceNumber = 4

// IsOf reports whether a slice has a name that only this node writes: "NODE.k".
func (s Slice) IsOf(node string) bool {
	i := strings.LastIndexByte(s.Name, '.')
	if i < 0 || s.Name[:i] != node {
		return false
	}
	number := s.Name[i+1:]
	return number != "" && len(number) <= maxSliceNumber && strings.Trim(number, "0123456789") == ""
}
