// Package module is what a network adds to the programs of this build: the agent, node reset, preflight, labs and
// simulations. Each network has a module in a folder beside this one; package modules lists them. What the tenants of a
// network have is in package tenant, and what the agent asks of an open network in package network.
package module

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/specfile"
)

// Module is a network. Name and NewAgent are required; everything else is empty for a network that does not need it.
type Module struct {
	Name string // the one in package tenant
	// NewAgent returns the network's part of one agent.
	NewAgent func() Agent
	// NewReset returns what else `pilaster node reset` removes.
	NewReset func() Reset
	// Checks are tests of kernel features that only this network needs.
	Checks []Check
	// FabricDevices are prefixes of names of the network's devices that have routes or addresses of the fabric.
	FabricDevices []string
	// Addresses returns the network's allocation of addresses alone, for simulations, which only count entries.
	Addresses func(network.Node) (network.Addresses, error)
	// LabHelp describes the network's tenants and keys in a lab's spec, for `pilaster lab up --help`.
	LabHelp string
	// AgentArguments turn the network on, on a node that gets so many mappings; nil for a network that is always on.
	AgentArguments func(mappings int) []string
	// SimulatedEntries returns the tables that a node would have, for a network with mappings; without services.
	SimulatedEntries func([]Hosted) []network.Entries
}

// Agent is a network's part of an agent. NoFlags has all of its methods but Open, for a network that every node has.
type Agent interface {
	// Bind adds the network's flags. A network that not every node has is turned on by the flag of its name.
	Bind(*cobra.Command)
	// Check rejects flags that are wrong, or wrong together. Nothing was done by then.
	Check(Settings) error
	// Enabled reports whether the flags turn the network on.
	Enabled() bool
	// With names the flags that turn the network on, for messages.
	With() string
	// Ready returns an error if something that the network uses on this machine does not answer. The node has not
	// joined by then.
	Ready(context.Context) error
	// Configure sets what the data path must know of the network before it is opened, such as sizes of maps.
	Configure(*datapath.Config)
	// Open opens the network. An error ends the agent.
	Open(context.Context, Host, network.Node) (network.Network, error)
}

// Settings are the agent's flags that networks ask for.
type Settings struct {
	Device  string // kind of new containers' devices
	Uplinks []string
	RunDir  string
	Edge    bool // the node is the Edge Switch of its region
}

// Host is the agent that opens a network.
type Host struct {
	Settings
	Path *datapath.Datapath
	Log  *slog.Logger
}

// NoFlags is the part of an Agent that depends on flags, for a network without flags.
type NoFlags struct{}

func (NoFlags) Bind(*cobra.Command)         {}
func (NoFlags) Check(Settings) error        { return nil }
func (NoFlags) Enabled() bool               { return true }
func (NoFlags) With() string                { return "" }
func (NoFlags) Ready(context.Context) error { return nil }
func (NoFlags) Configure(*datapath.Config)  {}

// Reset is a network's part of `pilaster node reset`.
type Reset interface {
	// Bind adds the network's flags.
	Bind(*cobra.Command)
	// Before lists what is removed before the data path.
	Before() ([]network.StaleState, error)
	// After lists what is removed after the data path. It may be in the agent's run folder.
	After(runDir string) []network.StaleState
}

// Check is a test of preflight.
type Check struct {
	Name    string
	Try     func(dir string) error // in a folder that exists; it leaves nothing behind
	Proves  string                 // what works if it succeeds
	Without string                 // what a node lacks otherwise; a node works without it
	Advice  string
}

// Hosted counts what a simulated node has of one tenant.
type Hosted struct {
	Overlays  int // of the tenant
	Addresses int // of containers on the node
	Remote    int // mappings to other nodes
}

// LabKeys are the keys that a network adds to a lab's spec.
type LabKeys interface {
	// Check returns the first error, at its path in the spec; nil if there is none.
	Check(nodes []string) *specfile.Error
	// Enabled reports whether the keys turn the network on, on a node. used means that tenants or regions need it.
	Enabled(node string, used bool) bool
	// NeedsOVS reports whether an Open vSwitch must run on the node.
	NeedsOVS(node string, used bool) bool
	// Arguments returns arguments of the node's agent; ovsDir is the folder of the node's Open vSwitch.
	Arguments(node string, used bool, ovsDir string) []string
}
