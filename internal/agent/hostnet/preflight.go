package hostnet

import (
	"fmt"
	"net/netip"
)

// CheckPrivate refuses a private prefix as the agent does at its start: if the network namespace of the calling thread
// uses it for something else.
func CheckPrivate(private netip.Prefix) error {
	all, err := localPrefixes()
	if err != nil {
		return err
	}
	return checkOverlap(private, all)
}

// CheckBase refuses a base prefix of which this node has a part elsewhere than on the fabric: the uplink has the routes
// to other nodes, lo the node's own address, and devices of networks, for which onFabric returns true, their tunnels.
func CheckBase(base netip.Prefix, uplink string, onFabric func(device string) bool) error {
	all, err := localPrefixes()
	if err != nil {
		return err
	}
	for _, f := range all {
		if f.prefix.Bits() > 0 && f.prefix.Overlaps(base) && f.device != uplink && f.device != "lo" &&
			!onFabric(f.device) {
			return fmt.Errorf(
				"base prefix %v overlaps %v on %s\n  nothing was changed; take that off this node, or set up the "+
					"cluster with another --base-prefix",
				base,
				f.prefix,
				f.device,
			)
		}
	}
	return nil
}
