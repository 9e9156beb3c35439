// Package preflight checks whether this machine can be a node before an agent is started on it.
// It leaves no changes behind. It reports what it cannot check from here.
package preflight

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

// Config is what the agent would be started with.
type Config struct {
	Uplink     string
	Plan       address.Plan
	MTUReserve int // bytes
	Device     string
	Endpoints  []endpoint.Record // that this machine has, by their numbers
	BPFFS      string
	NodePrefix netip.Prefix // the node's; zero where it has none yet
	URL, Token string       // of the orchestrator, and the token's text; both empty to leave it out
}

// State is how a check ended.
type State string

const (
	OK   State = "ok"
	Warn State = "warn" // a node works, and this may surprise
	Fail State = "fail" // a node will not work
	Todo State = "todo" // could not be checked here; the administrator has to
)

// Result of one check.
type Result struct {
	Check string `json:"check"`
	State State  `json:"state"`
	Says  string `json:"says"`
	Do    string `json:"do,omitempty"` // empty when there is nothing to do
}

// Run makes every check on the node whose namespaces this process is in.
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
	add("gateway", gatewayRules(rights))
	uplink, found := findUplink(c.Uplink)
	add("uplink", found)
	if uplink != nil {
		add("mtu", mtu(uplink, c.MTUReserve))
		add("device", checkDevice(uplink, c.Device, c.Endpoints))
		add("other programs", otherPrograms(uplink, c.BPFFS, rights))
		add("other interfaces", otherInterfaces(uplink))
		add("way to nodes", wayToNodes(uplink, c.Plan))
		route, sources := fabric(ctx, uplink, c.Plan, c.NodePrefix)
		add("route to this node", route)
		add("source check", sources)
	}
	add("router advertisements", routerAdvertisements())
	add("private prefix", privatePrefix(c.Plan))
	add("base prefix", basePrefix(c.Plan, c.Uplink))
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

// unknown is a check that could not be made.
func unknown(err error) Result { return failed(err, "run it as root, in the node's namespaces") }

// failed is an error of the agent's own check; where it says what to do, that is what to do.
func failed(err error, do string) Result {
	says, advice, _ := strings.Cut(err.Error(), "\n  ")
	if advice = strings.TrimPrefix(advice, "nothing was changed; "); advice != "" {
		do = advice
	}
	return fail(do, "%s", says)
}
