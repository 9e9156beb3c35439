package dpapi

import (
	"net/netip"
	"time"
)

// Services fills and reads the tables of services. A node has those of the tenants that it hosts.
type Services interface {
	// PutServices creates or replaces frontends. New flows choose among the new backends at once. Flows of backends
	// that are in neither list choose anew (UDP), or are reset (TCP). After an error, which names the full table, the
	// frontends that are not written yet stay as they were.
	PutServices(frontends []Frontend) error
	// DeleteServices deletes frontends; packets to them are answered with an error.
	DeleteServices(keys []FrontendKey) error
	// KeepServices deletes the frontends of a tenant that are not listed: those in the prefix of its services, and the
	// exposed ones with the number in that prefix. An agent calls it once it knows all services of the tenant; until
	// then those that an earlier process wrote stay.
	KeepServices(prefix netip.Prefix, keys []FrontendKey) error
	// LookupService reads a frontend from the kernel; false if there is none.
	LookupService(key FrontendKey) (Frontend, bool, error)
	// LookupExposed reports whether an address has exposed ports, and whether it is one of the node's own.
	LookupExposed(a netip.Addr) (node, found bool, err error)
	// LookupTarget reports whether a port of a container of this node, at the address that it sees, is a backend of an
	// exposed frontend.
	LookupTarget(port netip.AddrPort, protocol uint8) (bool, error)
	// ChooseBackend returns what the first packet of a client's connection to an exposed frontend gets; false if the
	// frontend has no backend. With affinity, the client's port does not count.
	ChooseBackend(key FrontendKey, client netip.AddrPort) (Choice, bool, error)
	// ServiceCounts returns what clients on this node have done since the tables were made.
	ServiceCounts() (map[FrontendKey]ServiceCounts, error)
}

// FrontendKey is a port of a service.
type FrontendKey struct {
	Address  netip.AddrPort
	Protocol uint8
}

// Frontend is a port of a service with the endpoints that its clients get.
type Frontend struct {
	FrontendKey
	Exposed  Exposed       // zero: containers of the tenant are its clients
	Affinity time.Duration // 0: none; of exposed ports any other value: the client's address chooses the backend
	Backends []Backend     // of new flows
	Draining []Backend     // get no new flows; TCP connections go on
}

// Exposed says that hosts outside of the cluster reach a frontend.
type Exposed struct {
	Services uint32 // number of the tenant for services; 0: not exposed
	Node     bool   // the address is one of the node, whose other ports stay those of its processes
}

// Backend is a port of an endpoint.
type Backend struct {
	Plain netip.Addr // plaintext address
	Seen  netip.Addr // as containers of the tenant see it
	Port  uint16
}

// Choice is the backend that a connection to an exposed frontend gets.
type Choice struct {
	Backend
	Connected bool   // the client has a connection from this port, whose backend it keeps
	Slot      uint32 // of the table of Maglev; without a connection
}

// ServiceCounts counts new flows.
type ServiceCounts struct {
	Flows   uint64 // that got a backend
	Refused uint64 // packets without one: the service had no endpoints
}
