package hostnet

import (
	"fmt"
	"net/netip"
	"slices"
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

// CheckBase refuses a base prefix of which this node has a part elsewhere than on the fabric: the uplinks have the
// routes to other nodes, lo the node's own address, and devices of networks, for which onFabric returns true, their
// tunnels.
func CheckBase(base netip.Prefix, uplinks []string, onFabric func(device string) bool) error {
	return checkElsewhere("base prefix", base, "set up the cluster with another --base-prefix",
		func(device string) bool {
			return slices.Contains(uplinks, device) || device == "lo" || onFabric(device)
		})
}

// CheckReserved refuses the prefix of locators and identifiers, which follows from the base prefix, if this node has a
// part of it elsewhere than on the fabric. No address of the node is in it.
func CheckReserved(reserved netip.Prefix, uplinks []string) error {
	return checkElsewhere("prefix of locators", reserved, "set up the cluster with another --base-prefix",
		func(device string) bool { return slices.Contains(uplinks, device) })
}

// CheckEgress refuses the prefix of egress addresses if this node has a part of it elsewhere than on the fabric.
func CheckEgress(egress netip.Prefix, uplinks []string) error {
	return checkElsewhere("egress prefix", egress, "set up the cluster with another --egress-prefix",
		func(device string) bool { return slices.Contains(uplinks, device) })
}

// checkElsewhere refuses a prefix if a device has a part of it that may have none.
func checkElsewhere(name string, prefix netip.Prefix, advice string, may func(device string) bool) error {
	all, err := localPrefixes()
	if err != nil {
		return err
	}
	for _, f := range all {
		if f.prefix.Bits() > 0 && f.prefix.Overlaps(prefix) && !may(f.device) {
			return fmt.Errorf(
				"%s %v overlaps %v on %s\n  nothing was changed; name %[4]s with --uplink too if it leads to other "+
					"nodes; else take that off this node, or %[5]s",
				name,
				prefix,
				f.prefix,
				f.device,
				advice,
			)
		}
	}
	return nil
}
