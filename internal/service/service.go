package service

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Limits. Those of the cluster are checked before anything changes.
const (
	MaxServices       = 10_000  // of a cluster
	MaxEndpoints      = 100_000 // of a cluster
	MaxPorts          = 64      // of a service
	MaxExternalIPs    = 8       // of a service
	MaxPools          = 16      // of load-balancer addresses, of a cluster
	MaxSliceEndpoints = 1_000   // of a slice
	MaxAffinity       = 24 * time.Hour
)

// Node ports are in this range, as in Kubernetes.
const (
	FirstNodePort = 30000
	LastNodePort  = 32767
)

// DefaultAffinity is how long a client keeps its endpoint with ClientIP affinity, as in Kubernetes.
const DefaultAffinity = 3 * time.Hour

// Name is the name of a service within its tenant.
type Name struct{ Namespace, Name string }

// String returns "namespace/name", or "name" without a namespace.
func (n Name) String() string {
	if n.Namespace == "" {
		return n.Name
	}
	return n.Namespace + "/" + n.Name
}

// ParseName is the inverse of String.
func ParseName(s string) Name {
	namespace, name, both := strings.Cut(s, "/")
	if !both {
		return Name{Name: s}
	}
	return Name{namespace, name}
}

// Service is one stable address for many containers of a tenant.
type Service struct {
	Tenant string
	Name
	Address         netip.Addr // invalid if headless
	Ports           []Port
	Selector        map[string]string // labels of containers; empty: only fixed endpoints
	Affinity        time.Duration     // a client keeps its endpoint for this long after its last connection; 0: no
	PublishNotReady bool
	Distribution    Distribution
	Headless        bool
	ExternalIPs     []netip.Addr // more addresses, at which hosts outside of the cluster reach it
	NodePorts       bool         // each port has a node port, at which these hosts reach it at addresses of nodes
	TrafficPolicy   TrafficPolicy
	LoadBalancer    bool       // hosts outside of the cluster reach it at an address of a pool
	LoadBalancerIP  netip.Addr // this address; invalid: in a request any, or the one that it has
	Created         time.Time
}

// IsExposed reports whether hosts outside of the cluster reach a service.
func (s Service) IsExposed() bool { return s.NodePorts || s.LoadBalancer || len(s.ExternalIPs) > 0 }

// Outside returns the addresses at which hosts outside of the cluster reach each port by its own number: the
// load-balancer address and the external ones.
func (s Service) Outside() []netip.Addr {
	if !s.LoadBalancerIP.IsValid() || slices.Contains(s.ExternalIPs, s.LoadBalancerIP) {
		return s.ExternalIPs
	}
	return append([]netip.Addr{s.LoadBalancerIP}, s.ExternalIPs...)
}

// TrafficPolicy says which endpoints hosts outside of the cluster get: Kubernetes' externalTrafficPolicy.
type TrafficPolicy string

// Traffic policies.
const (
	Cluster TrafficPolicy = ""      // those on all nodes
	Local   TrafficPolicy = "Local" // those on the node that a connection comes in by
)

// String returns the name that Kubernetes has for it.
func (p TrafficPolicy) String() string {
	if p == Cluster {
		return "Cluster"
	}
	return string(p)
}

// ParseTrafficPolicy is the inverse of String. No text means Cluster. It does not check other names.
func ParseTrafficPolicy(s string) TrafficPolicy {
	if s == Cluster.String() {
		return Cluster
	}
	return TrafficPolicy(s)
}

// Distribution says which endpoints a client gets first.
type Distribution string

// Distributions, as Kubernetes names them.
const (
	Anywhere       Distribution = ""
	PreferSameZone Distribution = "PreferSameZone"
	PreferSameNode Distribution = "PreferSameNode"
)

// Protocol is TCP or UDP, by its number.
type Protocol uint8

// Protocols.
const (
	TCP Protocol = 6
	UDP Protocol = 17
)

// String returns the name.
func (p Protocol) String() string {
	if p == UDP {
		return "UDP"
	}
	return "TCP"
}

// Port is a port of a service.
type Port struct {
	Name         string
	Protocol     Protocol
	Port, Target uint16 // Target: of the endpoints
	NodePort     uint16 // 0: none, or, if the service has node ports and the port is not stored yet, any
}

// Slice has endpoints of a service: the selected containers of one node, or fixed ones.
type Slice struct {
	Tenant      string
	Service     Name
	Name        string
	Node        string // that has written it; empty: fixed endpoints
	Zone        string // of the node
	Unreachable bool   // the node does not answer
	Endpoints   []Endpoint
}

// Endpoint is a container behind a service.
type Endpoint struct {
	Address     netip.Addr // plaintext
	Name        string     // of pod or container
	NotReady    bool
	Terminating bool
}
