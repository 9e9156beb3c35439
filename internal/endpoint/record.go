package endpoint

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
)

// Versions of the file, raised when its meaning changes. A record that uses nothing newer than version 1 is written as
// version 1, so that older builds read it.
const (
	firstVersion   = 1
	withNetworks   = 2  // attachments without a plaintext address, with IPv4, a subnet or an overhead
	withLeft       = 3  // addresses in Left
	withAppNow     = 4  // a current app (AppNow) that differs from the one in the addresses
	withLocator    = 5  // attachments with a locator
	withKey        = 6  // an address key
	withSecond     = 7  // an attachment on a second network
	withEgress     = 8  // an egress address, or a route to hosts outside
	withConditions = 9  // conditions for services
	recordVersion  = 10 // host ports
)

func (r Record) version() int {
	switch {
	case len(r.HostPorts) > 0:
		return recordVersion
	case r.Conditions != Conditions{}:
		return withConditions
	case slices.ContainsFunc(r.Attachments, Attachment.leaves):
		return withEgress
	case slices.ContainsFunc(r.Attachments, func(a Attachment) bool { return a.Also != "" }):
		return withSecond
	case r.AddressKey != "":
		return withKey
	case slices.ContainsFunc(r.Attachments, func(a Attachment) bool { return a.Locator.IsValid() }):
		return withLocator
	case r.AppNow != 0:
		return withAppNow
	case len(r.Left) > 0:
		return withLeft
	}
	for _, a := range r.Attachments {
		if !a.Plaintext.IsValid() || a.Subnet.IsValid() || a.Overhead != 0 {
			return withNetworks
		}
	}
	return firstVersion
}

// leaves reports whether the container may send to hosts outside of the cluster.
func (a Attachment) leaves() bool {
	return a.Egress.IsValid() || slices.ContainsFunc(a.Routes, a.LeadsOutside)
}

// recordFile is the format of a record on disk.
type recordFile struct {
	Version  int    `json:"version"`
	Endpoint Record `json:"endpoint"`
}

// DecodeRecord reads a record file's content and refuses incomplete or ambiguous records.
func DecodeRecord(b []byte) (Record, error) {
	var f recordFile
	if err := statefile.DecodeSince(b, firstVersion, recordVersion, &f); err != nil {
		return Record{}, err
	}
	return f.Endpoint, f.Endpoint.validate()
}

func (r Record) validate() error {
	switch {
	case r.ID < 1 || r.ID > MaxID:
		return fmt.Errorf("endpoint id %d is not in 1..%d", r.ID, MaxID)
	case r.ContainerID == "" || r.Interface == "":
		return errors.New("container id or interface is missing")
	case r.Tenant == "" || r.TenantID < 1 || r.TenantID > address.MaxTenantID:
		return fmt.Errorf("tenant %q with id %d is invalid", r.Tenant, r.TenantID)
	case max(r.App, r.AppNow) >= address.FirstReservedApp:
		return fmt.Errorf("app %#x is reserved", max(r.App, r.AppNow))
	case !slices.Contains([]State{Preparing, Active, Lost, Deleting}, r.State):
		return fmt.Errorf("state %q is unknown", r.State)
	case len(r.Attachments) == 0:
		return errors.New("no attachment")
	}
	for _, a := range r.Attachments {
		if err := a.validate(); err != nil {
			return err
		}
		if (a.Sequence != 0) != (r.AddressKey != "") {
			return fmt.Errorf("attachment %v has sequence %d with address key %q", a.Address, a.Sequence, r.AddressKey)
		}
	}
	for _, a := range r.Left {
		if !isPlain(a) {
			return fmt.Errorf("address left %v is invalid", a)
		}
	}
	_, err := CheckHostPorts(r.HostPorts)
	return err
}

// maxOverhead is far above the outer headers of any network, and far below any MTU.
const maxOverhead = 512

// validate checks what every network requires. The attachment's own network checks more.
func (a Attachment) validate() error {
	switch {
	case a.Network == "" || a.Also == a.Network || !isPlain(a.Address) || !isPlain(a.Gateway),
		a.Address.Is4() != a.Gateway.Is4(),
		a.Plaintext.IsValid() && !(isPlain(a.Plaintext) && a.Plaintext.Is6()):
		return fmt.Errorf("attachment %+v is incomplete", a)
	case a.Subnet.IsValid() && (a.Subnet != a.Subnet.Masked() || !a.Subnet.Contains(a.Address)):
		return fmt.Errorf("attachment %v is not of the subnet %v", a.Address, a.Subnet)
	case a.Locator != netip.Prefix{} && !isLocator(a.Locator):
		return fmt.Errorf("attachment %v has the locator %v, which is not an IPv6 /64", a.Address, a.Locator)
	case a.Egress.IsValid() && !(isPlain(a.Egress) && a.Egress.Is6() && a.Plaintext.IsValid()):
		return fmt.Errorf("attachment %v has the egress address %v", a.Address, a.Egress)
	case a.Overhead < 0 || a.Overhead > maxOverhead:
		return fmt.Errorf("attachment %v has an overhead of %d bytes", a.Address, a.Overhead)
	}
	for _, route := range a.Routes {
		if !route.IsValid() || route.Addr().Is4() != a.Address.Is4() {
			return fmt.Errorf("attachment %v has an invalid route", a.Address)
		}
	}
	return nil
}

// isPlain reports whether an address is valid, not IPv4-mapped, and has no zone.
func isPlain(a netip.Addr) bool { return a.IsValid() && !a.Is4In6() && a.Zone() == "" }

func isLocator(p netip.Prefix) bool {
	return p.Bits() == address.NodeBits && p.Addr().Is6() && p == p.Masked()
}

// firstKind is the kind of a device without a kind in its file.
const firstKind = "veth"

// deviceFile is a Device with its MACs as text.
type deviceFile struct {
	Kind         string `json:"kind,omitempty"`
	HostName     string `json:"hostName"`
	HostIfindex  int    `json:"hostIfindex"`
	HostMAC      string `json:"hostMac"`
	ContainerMAC string `json:"containerMac"`
	MTU          int    `json:"mtu"`
}

func (d Device) MarshalJSON() ([]byte, error) {
	kind := d.Kind
	if kind == firstKind {
		kind = "" // older builds know no other kind, and refuse the field
	}
	return json.Marshal(deviceFile{kind, d.HostName, d.HostIfindex, d.HostMAC.String(), d.ContainerMAC.String(), d.MTU})
}

func (d *Device) UnmarshalJSON(b []byte) error {
	var f deviceFile
	if err := statefile.Decode(b, &f); err != nil {
		return err
	}
	host, err := parseMAC(f.HostMAC)
	if err != nil {
		return err
	}
	container, err := parseMAC(f.ContainerMAC)
	if err != nil {
		return err
	}
	*d = Device{cmp.Or(f.Kind, firstKind), f.HostName, f.HostIfindex, host, container, f.MTU}
	return nil
}

// parseMAC reads a MAC; a device that does not exist yet has none.
func parseMAC(s string) (net.HardwareAddr, error) {
	if s == "" {
		return nil, nil
	}
	return net.ParseMAC(s)
}
