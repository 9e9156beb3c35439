package service

import (
	"net/netip"
	"strings"
	"time"
)

// Limits. Those of the cluster are checked before anything changes.
const (
	MaxServices       = 10_000  // of a cluster
	MaxEndpoints      = 100_000 // of a cluster
	MaxPorts          = 64      // of a service
	MaxSliceEndpoints = 1_000   // of a slice
	MaxAffinity       = 24 * time.Hour
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
	Created         time.Time
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
