package nimitz

import (
	"cmp"
	"path/filepath"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// folders are where a node has its Open vSwitch and its gateway.
type folders struct{ ovsRunDir, gatewayNetns string }

func (f *folders) bind(c *cobra.Command) {
	c.Flags().StringVar(&f.ovsRunDir, "ovs-run-dir", "/run/openvswitch", "folder of the sockets of Open vSwitch")
	_ = c.MarkFlagDirname("ovs-run-dir")
	c.Flags().
		StringVar(&f.gatewayNetns, "gateway-netns", "", "file of the namespace of the gateway of network nimitz; "+
			"created if it does not exist (default: \"gateway\" in --run-dir)")
	_ = c.MarkFlagFilename("gateway-netns")
}

func (f *folders) gateway(runDir string) string {
	return cmp.Or(f.gatewayNetns, filepath.Join(runDir, "gateway"))
}

// reset has the network's flags of node reset.
type reset struct{ folders }

func (r *reset) Bind(c *cobra.Command) { r.bind(c) }

// Before lists the bridges of Open vSwitch.
func (r *reset) Before() ([]network.StaleState, error) { return ovs.Leftovers(r.ovsRunDir) }

// After lists the gateway's namespace.
func (r *reset) After(runDir string) []network.StaleState {
	return gateway.Leftovers(r.gateway(runDir))
}
