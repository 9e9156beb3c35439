// Package preflight checks whether this machine can be a node, before an agent is started on it. It leaves no changes
// on the machine, and reports what it could not check.
package preflight

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules"
)

// Config is the configuration with which the agent would be started.
type Config struct {
	Uplinks    []string
	Plan       address.Plan
	MTUReserve int // bytes
	Device     string
	Endpoints  []endpoint.Record // of this machine, sorted by number
	BPFFS      string
	NodePrefix netip.Prefix // of the node; zero if it has none yet
	URL, Token string       // of the orchestrator, and the join token; both empty to skip this check
}

// State is the outcome of a check.
type State string

const (
	OK   State = "ok"
	Warn State = "warn" // a node works, perhaps not as expected
	Fail State = "fail" // a node will not work
	Todo State = "todo" // not checked; the administrator has to
)

// Result of one check.
type Result struct {
	Check string `json:"check"`
	State State  `json:"state"`
	Says  string `json:"says"`
	Do    string `json:"do,omitempty"` // empty when there is nothing to do
}

// Run runs all checks in the namespaces of this process.
func Run(ctx context.Context, c Config) []Result {
	var all []Result
	add := func(check string, r Result) {
		r.Check = check
		all = append(all, r)
	}
	rights := privileges()
	add("privileges", rights)
	add("kernel", kernel())
	add("types", types())
	add("bpffs", bpffs(c.BPFFS))
	add("packet path", packetPath(ctx, rights))
	for _, m := range modules.All() {
		for _, c := range m.Checks {
			add(c.Name, ofNetwork(c, rights))
		}
	}
	names := c.Uplinks
	if err := datapath.CheckUplinkNames(names, c.Device); err != nil {
		add("uplinks", failed(err, "give --uplink once for each device to the fabric"))
		names = nil
	}
	var uplinks []netlink.Link
	for _, name := range names {
		uplink, found := findUplink(name)
		add("uplink", found)
		if uplink != nil {
			uplinks = append(uplinks, uplink)
			add("mtu", mtu(uplink, c.MTUReserve))
			add("other programs", otherPrograms(uplink, c.BPFFS, rights))
		}
	}
	if len(uplinks) > 0 {
		add("device", checkDevice(uplinks[0], c.Device, c.Endpoints))
		add("other interfaces", otherInterfaces(uplinks))
		way, uplink := wayToNodes(uplinks, c.Plan)
		add("way to nodes", way)
		add("way to hosts outside", wayOutside(uplinks))
		route, sources := fabric(ctx, uplink, c.Plan, c.NodePrefix)
		add("route to this node", route)
		add("source check", sources)
		if sources, other := sourcesOutside(ctx, uplinks, uplink, c.Plan, c.NodePrefix); other {
			add("source check, to hosts outside", sources)
		}
		if c.Plan.Egress.IsValid() {
			add("route of egress addresses", egressRoute(ctx, uplinks, c.Plan, c.NodePrefix))
		}
	}
	add("router advertisements", routerAdvertisements())
	add("private prefix", privatePrefix(c.Plan))
	add("base prefix", basePrefix(c.Plan, c.Uplinks))
	if c.Plan.Egress.IsValid() {
		add("egress prefix", egressPrefix(c.Plan, c.Uplinks))
	}
	if c.URL == "" {
		add("clock", ownClock())
		return all
	}
	peer, clock := orchestrator(ctx, c.URL, c.Token)
	add("orchestrator", peer)
	if clock != nil {
		add("clock", *clock)
	}
	return all
}

// Failed reports whether any check failed.
func Failed(all []Result) bool {
	for _, r := range all {
		if r.State == Fail {
			return true
		}
	}
	return false
}

func ok(format string, args ...any) Result {
	return Result{State: OK, Says: fmt.Sprintf(format, args...)}
}

func warn(do, format string, args ...any) Result {
	return Result{State: Warn, Says: fmt.Sprintf(format, args...), Do: do}
}

func fail(do, format string, args ...any) Result {
	return Result{State: Fail, Says: fmt.Sprintf(format, args...), Do: do}
}

func todo(do, format string, args ...any) Result {
	return Result{State: Todo, Says: fmt.Sprintf(format, args...), Do: do}
}

// unknown is the result of a check that could not run.
func unknown(err error) Result { return failed(err, "run it as root, in the node's namespaces") }

// failed is the result for an error. If the error contains advice, the advice replaces do.
func failed(err error, do string) Result {
	says, advice, _ := strings.Cut(err.Error(), "\n  ")
	if advice = strings.TrimPrefix(advice, "nothing was changed; "); advice != "" {
		do = advice
	}
	return fail(do, "%s", says)
}
