package overlay

import (
	"errors"
	"path"
	"strings"

	"github.com/vishvananda/netlink"
)

// Containers says which devices are the node's sides of containers' veths: the ports of a bridge, or those whose name
// matches a pattern. One of the fields is empty.
type Containers struct{ Bridge, Pattern string }

// ParseContainers reads "bridge:NAME" or "veth:PATTERN"; the pattern is that of path.Match.
func ParseContainers(s string) (Containers, error) {
	kind, value, _ := strings.Cut(s, ":")
	_, err := path.Match(value, "")
	switch {
	case kind == "bridge" && value != "":
		return Containers{Bridge: value}, nil
	case kind == "veth" && value != "" && err == nil:
		return Containers{Pattern: value}, nil
	}
	return Containers{}, errors.New("use bridge:NAME, such as bridge:cni0, or veth:PATTERN, such as 'veth:cali*'")
}

func (c Containers) String() string {
	if c.Bridge != "" {
		return "bridge:" + c.Bridge
	}
	return "veth:" + c.Pattern
}

// Has reports whether a device is a container's. bridge is the index of the bridge, or 0.
func (c Containers) Has(l netlink.Link, bridge int) bool {
	if l.Type() != "veth" {
		return false
	}
	if c.Bridge != "" {
		return bridge != 0 && l.Attrs().MasterIndex == bridge
	}
	match, _ := path.Match(c.Pattern, l.Attrs().Name)
	return match
}
