package endpoint

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// HostPort is a port of the node by which hosts outside of the cluster reach a port of the container.
type HostPort struct {
	Host      uint16     `json:"host"`
	Container uint16     `json:"container"`
	Protocol  string     `json:"protocol"`         // TCP or UDP
	Address   netip.Addr `json:"address,omitzero"` // of the node; invalid: all of its addresses
}

// NewHostPort checks what a runtime or an operator has given. Without an address, or with the unspecified one of IPv4
// or IPv6, the port is at all addresses of the node. Whether the node has an address is not checked.
func NewHostPort(host, container int, protocol, address string) (p HostPort, err error) {
	if protocol = strings.ToUpper(protocol); protocol == "" {
		protocol = "TCP"
	}
	p = HostPort{Host: uint16(host), Container: uint16(container), Protocol: protocol}
	switch {
	case int(p.Host) != host || host == 0:
		return p, fmt.Errorf("host port %d: use 1 to 65535", host)
	case int(p.Container) != container || container == 0:
		return p, fmt.Errorf("host port %d: container port %d: use 1 to 65535", host, container)
	case address == "":
		return p, p.check()
	}
	if p.Address, err = netip.ParseAddr(address); err != nil {
		return p, fmt.Errorf("host port %d: %q is no IP address", host, address)
	}
	if p.Address.IsUnspecified() {
		p.Address = netip.Addr{}
	}
	return p, p.check()
}

func (p HostPort) check() error {
	a := p.Address
	switch {
	case p.Host == 0 || p.Container == 0:
		return fmt.Errorf("host port %d for port %d: use 1 to 65535 for both", p.Host, p.Container)
	case p.Protocol != "TCP" && p.Protocol != "UDP":
		return fmt.Errorf("host port %d: protocol %.20q: host ports are of tcp or udp only", p.Host, p.Protocol)
	case !a.IsValid():
		return nil
	case a.IsLoopback():
		return fmt.Errorf("host port %d at %v: hosts outside reach no loopback address, and processes of the node "+
			"reach host ports at its other addresses; leave the address out", p.Host, a)
	case a.Is4() || a.Is4In6():
		return fmt.Errorf("host port %d at %v: the network is IPv6; leave the address out, or use an IPv6 address of "+
			"this node", p.Host, a)
	case a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.Zone() != "":
		return fmt.Errorf("host port %d at %v: hosts outside reach no such address; leave it out, or use another one "+
			"of this node", p.Host, a)
	}
	return nil
}

// Overlaps reports whether two host ports cannot both be of one node.
func (p HostPort) Overlaps(q HostPort) bool {
	return p.Host == q.Host && p.Protocol == q.Protocol &&
		(p.Address == q.Address || !p.Address.IsValid() || !q.Address.IsValid())
}

// CheckHostPorts returns the host ports of one container, without those that are listed twice. It refuses those that
// exclude each other.
func CheckHostPorts(all []HostPort) (distinct []HostPort, err error) {
	for _, p := range all {
		if err := p.check(); err != nil {
			return nil, err
		}
		if slices.Contains(distinct, p) {
			continue // as with "0.0.0.0" and "::"
		}
		if i := slices.IndexFunc(distinct, p.Overlaps); i >= 0 {
			return nil, fmt.Errorf("host ports %v and %v exclude each other; use one of them", distinct[i], p)
		}
		distinct = append(distinct, p)
	}
	return distinct, nil
}

// At returns the port of the node as text: "8080/TCP", or "[2001:db8::1]:8080/TCP".
func (p HostPort) At() string {
	if p.Address.IsValid() {
		return fmt.Sprintf("[%v]:%d/%s", p.Address, p.Host, p.Protocol)
	}
	return fmt.Sprintf("%d/%s", p.Host, p.Protocol)
}

// String returns the host port as text: "8080/TCP to 80".
func (p HostPort) String() string { return fmt.Sprintf("%s to %d", p.At(), p.Container) }

// ParseHostPort reads "[ADDRESS:]HOSTPORT:PORT[/udp]", with an IPv6 address in brackets.
func ParseHostPort(text string) (HostPort, error) {
	ports, protocol, _ := strings.Cut(text, "/")
	address := ""
	if at := strings.LastIndex(ports, "]:"); at >= 0 && strings.HasPrefix(ports, "[") {
		address, ports = ports[1:at], ports[at+2:]
	}
	host, container, ok := strings.Cut(ports, ":")
	h, hostErr := strconv.Atoi(host)
	c, containerErr := strconv.Atoi(container)
	if !ok || errors.Join(hostErr, containerErr) != nil || strings.HasSuffix(text, "/") {
		return HostPort{}, fmt.Errorf("%.80q: use HOSTPORT:PORT, such as 8080:80, 5353:53/udp or "+
			"[2001:db8::1]:8080:80", text)
	}
	return NewHostPort(h, c, protocol, address)
}
