package overlay

import (
	"errors"
	"fmt"
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

// BridgeIndex returns the index of the bridge, 0 for veths without a bridge.
func (c Containers) BridgeIndex() (int, error) {
	if c.Bridge == "" {
		return 0, nil
	}
	l, err := netlink.LinkByName(c.Bridge)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.Bridge, err)
	}
	if l.Type() != "bridge" {
		return 0, fmt.Errorf("%s is a device of type %s, not bridge", c.Bridge, l.Type())
	}
	return l.Attrs().Index, nil
}
