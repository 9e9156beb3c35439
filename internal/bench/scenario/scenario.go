// Package scenario builds the paths from a client to a server that benchmarks compare: two nodes, as network namespaces
// on one veth link, with containers on NETPILA, NIMITZ, kernel routing, kernel VXLAN, a cache of ONCache's design, or
// bare devices. To benchmark a new network, add its scenario here.
package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// Scenario is one path from a client to a server. A run compares the other scenarios with its first scenario.
type Scenario struct {
	Name  string
	About string
	// Build creates a pair over two fresh nodes; closing the wire removes it.
	Build func(*Wire) (Pair, error)
	// Of is another scenario to compare this one with; "" means the first of the run.
	Of string
	// Uncached is the scenario that is the same without the cache for VXLAN overlays; "" if this one has no such cache.
	Uncached string
	// Paper is what a paper reports of the comparison with Of, by metric.
	Paper map[string]string
	// Lacks returns the reason why this kernel does not support the scenario. The field is nil if every kernel supports
	// it.
	Lacks func() error
}

// ID returns the name.
func (s Scenario) ID() string { return s.Name }

// Pair has the namespaces of client and server, and the address that the client connects to.
type Pair struct {
	Client, Server *netns.Namespace
	Target         netip.Addr
	Port           uint16 // that the server listens on; 0: any
	// Expose makes a server that listens on a port of Target reachable at another address, which the client connects
	// to. It is nil if the client connects to the server itself.
	Expose func(port uint16) (netip.AddrPort, error)
	// Fresh empties the caches of the path, so that the next packet is a first packet. Fresh is nil if the path has no
	// cache; then a run does the same work on an unused map.
	Fresh func() error
	// Runs returns the statistics of our programs on both nodes; nil if there are none.
	Runs func() (datapath.ProgStats, error)
	// Processes are processes that forward packets. They run on the CPU of client and server, so that their time counts
	// too.
	Processes []int
	// Work returns the statistics of these processes on both nodes; nil if there are none.
	Work func(context.Context) (ovs.Work, error)
}

// Scenarios returns all scenarios, in the order of reports. Add the scenario of a new network here.
func Scenarios() []Scenario {
	return slices.Concat([]Scenario{
		{Name: "native", About: "node to node, no container", Build: Native},
		{Name: "route", About: "containers behind veth pairs, routed by the kernels of both nodes", Build: route},
		{
			Name:  "vxlan",
			About: "containers on kernel bridges, between the nodes kernel VXLAN as Flannel sets it up",
			Build: vxlan,
		},
		{
			Name:     "oncache",
			About:    "the same with a cache of ONCache's design over it, in our own programs",
			Build:    cachedVXLAN,
			Uncached: "vxlan",
		},
		{
			Name:  "vxlan-tuned",
			About: "vxlan without outer UDP checksums, and with room for outer headers, as oncache has it",
			Build: tunedVXLAN,
			Of:    "vxlan",
		},
		{
			Name:  "oncache-no-headroom",
			About: "oncache without room for outer headers in the packets of containers",
			Build: cachedWithoutRoom,
			Of:    "oncache",
		},
		{
			Name:  "bound-veth",
			About: "the devices that netpila's packets pass, joined by a redirect of tc, no BPF",
			Build: boundVeth,
		},
		{Name: "bound-macvlan", About: "containers on macvlan devices in private mode, no BPF", Build: boundMacvlan},
		{
			Name:  "bound-netkit",
			About: "bound-veth with netkit for the containers' pairs, where the kernel has it",
			Build: boundNetkit,
			Lacks: device.HasNetkit,
		},
		{
			Name:  "floor-veth",
			About: "the same devices with programs where netpila's are, which only redirect",
			Build: floorVeth,
		},
		{
			Name:  "floor-macvlan",
			About: "bound-macvlan with programs where netpila's are, which do nothing",
			Build: floorMacvlan,
		},
		{
			Name:  "floor-local",
			About: "two containers of one node on veth devices, with programs that only redirect",
			Build: floorLocal,
		},
		Netpila(),
		{
			Name:  "netpila-macvlan",
			About: "netpila with containers on macvlan devices",
			Build: netpila(Variant{device: endpoint.Macvlan}),
		},
		{
			Name:  "netpila-netkit",
			About: "netpila with containers on netkit devices, where the kernel has them",
			Build: netpila(Variant{device: endpoint.Netkit}),
			Lacks: device.HasNetkit,
		},
		{
			Name:  "netpila-clear",
			About: "netpila for a tenant with clear addresses: nothing is translated",
			Build: netpila(Variant{clear: true}),
		},
		{
			Name:  "netpila-nocache",
			About: "netpila with its flow cache off: every packet is a first one",
			Build: netpila(Variant{noCache: true}),
		},
		{
			Name:  "ila",
			About: "identifier-locator addresses: both are translated, and no checksum changes",
			Build: onILA,
		},
		{
			Name:  "evpn",
			About: "NIMITZ's programs with tunnels over IPv4, as other EVPN speakers have them",
			Build: onEVPN,
		},
		{
			Name:  "nimitz-ebpf",
			About: "the second network, NIMITZ, by programs around a VXLAN device of the kernel",
			Build: nimitzEBPF(Variant{}),
		},
		{
			Name:  "nimitz-oncache",
			About: "the same with --accelerate oncache: programs push and pull the headers of the tunnel",
			Build: nimitzEBPF(Variant{direct: true}), Uncached: "nimitz-ebpf",
		},
		{
			Name:  "nimitz-ovs",
			About: "the second network by Open vSwitch, whose datapath is the one in user space",
			Build: nimitzOVS,
			Lacks: OVSMissing,
		},
		{Name: "loopback", About: "within one node, no container", Build: loopback},
		{
			Name:  "netpila-local",
			About: "netpila between two containers of one node",
			Build: netpila(Variant{local: true}),
		},
		{
			Name:  "netpila-local-macvlan",
			About: "the same on macvlan devices",
			Build: netpila(Variant{local: true, device: endpoint.Macvlan}),
		},
	}, EgressScenarios(), ServiceScenarios(), RuleScenarios())
}

// Netpila returns the scenario of our datapath, used as by an agent.
func Netpila() Scenario {
	return Scenario{
		Name:  "netpila",
		About: "containers of an encrypted tenant on our datapath",
		Build: netpila(Variant{}),
	}
}

func Native(w *Wire) (Pair, error) {
	return Pair{Client: w.Nodes[0].NS, Server: w.Nodes[1].NS, Target: w.Nodes[1].Underlay}, nil
}

func loopback(w *Wire) (Pair, error) {
	return Pair{Client: w.Nodes[0].NS, Server: w.Nodes[0].NS, Target: w.Nodes[0].Underlay}, nil
}

func route(w *Wire) (Pair, error) {
	return w.containers((*Node).addRouted)
}

// Offered returns the scenarios that this kernel supports, and the reasons for leaving out the others.
func Offered(all []Scenario) (offered []Scenario, leftOut []string) {
	for _, s := range all {
		if s.Lacks != nil {
			if err := s.Lacks(); err != nil {
				leftOut = append(leftOut, fmt.Sprintf("%s: %v", s.Name, err))
				continue
			}
		}
		offered = append(offered, s)
	}
	return offered, leftOut
}

// Names returns the names of scenarios or metrics.
func Names[T interface{ ID() string }](all []T) []string {
	names := make([]string, len(all))
	for i, x := range all {
		names[i] = x.ID()
	}
	return names
}

// Pick selects by name, in the order of all; the error names the first unknown name.
func Pick[T interface{ ID() string }](all []T, names []string) ([]T, error) {
	for _, name := range names {
		if !slices.Contains(Names(all), name) {
			return nil, fmt.Errorf("%q; use some of %s", name, strings.Join(Names(all), ", "))
		}
	}
	return slices.DeleteFunc(all, func(x T) bool { return !slices.Contains(names, x.ID()) }), nil
}
