package cli

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

func newStatusCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the status of this node",
		Long: "Show the status that this node's agent reports. The exit status is 1 if the agent would refuse new " +
			"endpoints.",
		Example: "  pilaster status\n  pilaster status -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			resp, err := socket.client().Status(c.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
			if err != nil {
				return err
			}
			v := viewStatus(resp.Msg)
			if err := out.print(env.Stdout, v, v.textAt(time.Now())); err != nil {
				return err
			}
			if !v.Ready {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	socket.bind(c)
	out.bind(c)
	return c
}

// statusView is a node's status, for text and JSON.
type statusView struct {
	Node         nodeStatusView `json:"node"`
	Ready        bool           `json:"ready"`
	Problems     []string       `json:"problems"`
	Orchestrator linkView       `json:"orchestrator"`
	Datapath     *datapathView  `json:"datapath"` // null before the node has its prefix
	Gateway      *gatewayView   `json:"gateway"`  // null without a network that has gateways
	Locator      string         `json:"locator,omitempty"`
	Pulls        []pullView     `json:"pulls,omitempty"`
	Endpoints    uint32         `json:"endpoints"`
	Limits       []limitView    `json:"limits"`
	Tenants      uint32         `json:"tenants"`
	Policies     *policiesView  `json:"policies"` // null if no tenant on this node has policies
	Offloads     []roleView     `json:"offloads,omitempty"`
	Load         *loadView      `json:"load,omitempty"`     // absent while it is not measured
	Egress       *outsideView   `json:"egress,omitempty"`   // absent if no packets of containers leave the cluster
	Services     *servicesView  `json:"services,omitempty"` // absent if no tenant of containers here has any
	Drops        []dropView     `json:"drops"`
	Version      string         `json:"version"`
	PID          uint32         `json:"pid"`
}

type nodeStatusView struct {
	Name    string   `json:"name"`
	UUID    string   `json:"uuid"`
	Prefix  string   `json:"prefix"`
	Uplinks []string `json:"uplinks"`
	Base    string   `json:"basePrefix"`
	Private string   `json:"privatePrefix"`
	Edge    bool     `json:"edge,omitempty"` // the node is an Edge Switch
}

type linkView struct {
	URL       string `json:"url"`
	Connected bool   `json:"connected"`
	Revision  int64  `json:"revision"`
	Since     string `json:"since"`
	LastError string `json:"lastError,omitempty"`
}

type datapathView struct {
	DeviceKind   string            `json:"deviceKind"`
	DeviceWhy    string            `json:"deviceWhy,omitempty"` // the reason, if the agent has chosen the kind
	Programs     string            `json:"programs"`
	Healthy      bool              `json:"healthy"`
	FirstInChain bool              `json:"firstInChain"`
	Guarded      []string          `json:"guarded"`  // other interfaces where the agent checks packets
	Switches     map[string]string `json:"switches"` // switch of each network that has a choice
	Without      []string          `json:"without"`  // features that containers lack on this node and have on other nodes
	Entries      []entryView       `json:"entries"`
}

// gatewayView is the node's gateway, for underlay services and publications. Without a gateway it has no addresses.
type gatewayView struct {
	Own              string `json:"own,omitempty"`     // source address for underlay services
	Virtual          string `json:"virtual,omitempty"` // source address for published containers
	UnderlayServices uint32 `json:"services"`
	Publications     uint32 `json:"publications"`
	Missing          string `json:"missing,omitempty"` // why there is no gateway
}

func (g gatewayView) text() (state, rest string) {
	if g.Missing != "" {
		return "none", strings.ReplaceAll(g.Missing, "\n  ", "; ")
	}
	return "open", fmt.Sprintf("%s to the underlay, %s to containers; %s, %s", g.Own, g.Virtual,
		humanize.Of(g.UnderlayServices, "underlay service", "underlay services"),
		humanize.Of(g.Publications, "publication", "publications"))
}

// pullView describes the subscriptions of a network to mappings.
type pullView struct {
	Network       string `json:"network"`
	Subscriptions uint32 `json:"subscriptions"`
	Unknown       uint32 `json:"unknown"`
	Capacity      uint32 `json:"capacity"`
	Begun         uint64 `json:"begun"`
	Ignored       uint64 `json:"ignored"`
	Refused       uint64 `json:"refused"`
}

func (p pullView) text() string {
	return fmt.Sprintf("%s of %s subscriptions, %s without a mapping; cache misses: %s begun, %s refused",
		humanize.Grouped(p.Subscriptions), humanize.Grouped(p.Capacity), humanize.Grouped(p.Unknown),
		humanize.Grouped(p.Begun), humanize.Grouped(p.Refused))
}

// roleView is the node's part in an offload.
type roleView struct {
	Tenant    string   `json:"tenant"`
	ID        uint32   `json:"id"`
	Role      string   `json:"role"` // backend or frontend
	Phase     string   `json:"phase"`
	Node      string   `json:"node"` // the backend
	Frontends []string `json:"frontends"`
	Draining  bool     `json:"draining,omitempty"`
	Lost      []string `json:"lostFrontends,omitempty"` // of a backend: they do not answer
	Packets   uint64   `json:"packets"`                 // of a frontend: sent to the backend
	Answered  uint64   `json:"answered"`                // of a frontend: questions of the backend
	Asked     uint64   `json:"asked"`                   // of a backend: questions
}

// loadView is the node's packet load, in parts of its CPUs for packets.
type loadView struct {
	Budget   float64            `json:"budget"` // CPUs
	Own      float64            `json:"own"`
	Tenants  map[string]float64 `json:"tenants,omitempty"`  // parts of Own
	Fronting map[string]float64 `json:"fronting,omitempty"` // by tenant and backend
}

// viewLoad returns nil if no packet load was measured.
func viewLoad(l *pilasterv1.NodeLoad) *loadView {
	v := loadView{Budget: l.GetBudget(), Own: l.GetOwn(), Tenants: map[string]float64{}, Fronting: map[string]float64{}}
	for _, t := range l.GetTenants() {
		v.Tenants[t.Tenant] = t.Load
	}
	for _, f := range l.GetFronting() {
		v.Fronting[f.Tenant+" "+f.Backend] = f.Load
	}
	if v.Own == 0 && len(v.Fronting) == 0 {
		return nil
	}
	return &v
}

func (v loadView) text() string {
	fronting := 0.0
	for _, l := range v.Fronting {
		fronting += l
	}
	return fmt.Sprintf("%.0f %% of %g CPUs by own containers, %.0f %% as a frontend", 100*v.Own, v.Budget, 100*fronting)
}

func viewRole(r *pilasterv1.OffloadRole) roleView {
	v := roleView{
		Tenant: r.GetTenant(), ID: r.GetId(), Role: choose(r.GetBackend(), "backend", "frontend"), Phase: "unknown",
		Node: r.GetNode(), Frontends: append([]string{}, r.GetFrontends()...), Draining: r.GetDraining(),
		Lost: r.GetLostFrontends(), Packets: r.GetPackets(), Answered: r.GetAnswered(), Asked: r.GetAsked(),
	}
	if i := int(r.GetPhase()); i > 0 && i < len(tenant.OffloadPhases) {
		v.Phase = string(tenant.OffloadPhases[i])
	}
	return v
}

func (v roleView) text() string {
	at := "frontends " + strings.Join(v.Frontends, ", ")
	if v.Role == "frontend" {
		at = "backend " + v.Node + choose(v.Draining, ", draining", "")
	} else if len(v.Lost) > 0 {
		at += "; without an answer: " + strings.Join(v.Lost, ", ")
	}
	return fmt.Sprintf("tenant %s, offload %d, %s: %s", v.Tenant, v.ID, v.Phase, at)
}

// servicesView is the state of services of tenants on the node.
type servicesView struct {
	Services  uint32 `json:"services"`
	Endpoints uint32 `json:"endpoints"` // of them, on all nodes
	Own       uint32 `json:"own"`       // of these, on this node
}

func (v servicesView) text() string {
	return fmt.Sprintf("%s with %s, %s of them here", humanize.Of(v.Services, "service", "services"),
		humanize.Of(v.Endpoints, "endpoint", "endpoints"), humanize.Grouped(v.Own))
}

// outsideView is how packets of the node's containers leave the cluster.
type outsideView struct {
	Addresses uint32               `json:"addresses"` // of containers, in use
	Gateways  []outsideGatewayView `json:"gateways,omitempty"`
	GatewayOf []gatewayRole        `json:"gatewayOf,omitempty"`
}

// outsideGatewayView is an egress gateway as the node sees it.
type outsideGatewayView struct {
	Node       string  `json:"node"`
	Used       bool    `json:"used"`                 // by new connections; also if no gateway of a rule answers
	Silent     bool    `json:"silent,omitempty"`     // it does not answer
	AnsweredMs *uint32 `json:"answeredMs,omitempty"` // milliseconds since its last answer; absent if it never has
}

func viewOutside(e *pilasterv1.Egress) *outsideView {
	if e == nil {
		return nil
	}
	v := &outsideView{Addresses: e.Addresses}
	for _, g := range e.Gateways {
		view := outsideGatewayView{Node: g.Node, Used: g.Alive, Silent: g.Silent}
		if g.Answered {
			view.AnsweredMs = &g.AgoMs
		}
		v.Gateways = append(v.Gateways, view)
	}
	for _, r := range e.Roles {
		v.GatewayOf = append(v.GatewayOf, gatewayRole{r.Tenant, r.Address})
	}
	return v
}

func (v outsideView) rows(row func(name, value, state, rest string)) {
	row("egress", "", "addresses", humanize.Grouped(v.Addresses)+" in use")
	for _, g := range v.Gateways {
		answer := "has not answered"
		if g.AnsweredMs != nil {
			answer = fmt.Sprintf("answered %v ago", time.Duration(*g.AnsweredMs)*time.Millisecond)
		}
		row("", "", "gateway", g.Node+" "+answer+choose(g.Silent, "; it does not answer", "")+
			choose(g.Used, "", "; new connections avoid it"))
	}
	for _, r := range v.GatewayOf {
		row("", "", "gateway of", "tenant "+r.Tenant+" at "+r.Address)
	}
}

type entryView struct {
	Table    string `json:"table"`
	Used     uint32 `json:"used"`
	Capacity uint32 `json:"capacity"`
	Cache    bool   `json:"cache"`
}

func (e entryView) text() string {
	switch {
	case e.Cache:
		return "a cache of " + humanize.Grouped(e.Capacity) + " slots"
	case e.Capacity == 0:
		return humanize.Of(e.Used, "entry", "entries")
	}
	return humanize.Grouped(e.Used) + " of " + humanize.Grouped(e.Capacity) + " entries"
}

// limitView is a limit. The agent rejects an ADD that exceeds it.
type limitView struct {
	Name          string `json:"name"`
	Used          uint32 `json:"used"`
	Capacity      uint32 `json:"capacity"`
	LargestTenant string `json:"largestTenant,omitempty"`
	LargestUsed   uint32 `json:"largestUsed,omitempty"`
}

func (l limitView) text() string {
	s := humanize.Grouped(l.Used) + " of " + humanize.Grouped(l.Capacity)
	if l.LargestUsed > 1 {
		s += fmt.Sprintf(", of which tenant %s has %s", l.LargestTenant, humanize.Grouped(l.LargestUsed))
	}
	return s
}

type dropView struct {
	Reason     string `json:"reason"`
	Packets    uint64 `json:"packets"`
	LastMinute uint64 `json:"lastMinute"`
}

func viewStatus(s *pilasterv1.StatusResponse) statusView {
	o := s.GetOrchestrator()
	v := statusView{
		Node: nodeStatusView{
			Name: s.GetNode().
				GetName(),
			UUID: s.GetNode().GetUuid(), Prefix: s.GetNode().GetPrefix(), Uplinks: s.GetUplinks(),
			Base: s.GetPlan().GetBasePrefix(), Private: s.GetPlan().GetPrivatePrefix(),
			Edge: s.GetNode().GetEdge(),
		},
		Ready: s.GetReady(), Problems: append([]string{}, s.GetProblems()...),
		Orchestrator: linkView{o.GetUrl(), o.GetConnected(), o.GetRevision(), timeText(o.GetSince()), o.GetLastError()},
		Endpoints:    s.GetEndpoints(), Limits: []limitView{}, Tenants: s.GetTenants(),
		Drops: []dropView{}, Version: s.GetVersion(), PID: s.GetPid(),
	}
	if d := s.GetDatapath(); d != nil {
		v.Datapath = &datapathView{
			d.DeviceKind,
			d.DeviceWhy,
			d.Programs,
			d.Healthy,
			d.FirstInChain,
			append([]string{}, d.Guarded...),
			maps.Clone(d.Switches),
			append([]string{}, d.Without...),
			[]entryView{},
		}
		for _, e := range d.Entries {
			v.Datapath.Entries = append(v.Datapath.Entries, entryView{e.Table, e.Used, e.Capacity, e.Cache})
		}
	}
	if g := s.GetGateway(); g != nil {
		v.Gateway = &gatewayView{g.Own, g.Virtual, g.UnderlayServices, g.Publications, g.Missing}
	}
	v.Locator = s.GetLocator()
	for _, p := range s.GetPulls() {
		v.Pulls = append(v.Pulls, pullView{
			p.Network, p.Subscriptions, p.Unknown, p.Capacity, p.Begun, p.Ignored, p.Refused,
		})
	}
	v.Policies = viewPolicies(s.GetPolicies())
	for _, r := range s.GetOffloads() {
		v.Offloads = append(v.Offloads, viewRole(r))
	}
	v.Load = viewLoad(s.GetLoad())
	v.Egress = viewOutside(s.GetEgress())
	if is := s.GetServices(); is != nil {
		v.Services = &servicesView{is.Services, is.Endpoints, is.Own}
	}
	for _, l := range s.GetLimits() {
		v.Limits = append(v.Limits, limitView{l.Name, l.Used, l.Capacity, l.LargestTenant, l.LargestUsed})
	}
	for _, d := range s.GetDrops() {
		v.Drops = append(v.Drops, dropView{d.Reason, d.Packets, d.LastMinute})
	}
	return v
}

func (v statusView) textAt(now time.Time) func(io.Writer) {
	return func(w io.Writer) { v.text(w, now) }
}

func (v statusView) text(w io.Writer, now time.Time) {
	row := func(name, value, state, rest string) {
		fmt.Fprintf(w, "%s\t%s\t%s\n", strings.TrimSpace(name+" "+value), state, rest)
	}
	if v.Node.Prefix == "" {
		row("node", v.Node.Name, "not ready", "no prefix yet")
	} else {
		row("node", v.Node.Name, choose(v.Ready, "ready", "not ready"),
			fmt.Sprintf("%s on %s, pilaster %s", v.Node.Prefix, strings.Join(v.Node.Uplinks, ", "), v.Version))
		// The packet path does not count packets from the fabric, so the agent cannot report that the route works.
		row("", "", "fabric",
			"route to this node: not verified; test it with: pilaster preflight --uplink "+
				strings.Join(v.Node.Uplinks, " --uplink "))
	}
	if v.Locator != "" {
		row("", "", "locator", v.Locator+", which the fabric must route to this node too")
	}
	if v.Node.Edge {
		row("edge", "", "open", "between this region and others; no containers")
	}
	for i, l := range v.Limits {
		row(choose(i == 0, "limits", ""), "", l.Name, l.text())
	}
	row("orchestrator", "", choose(v.Orchestrator.Connected, "connected", "away"), v.Orchestrator.text(now))
	if g := v.Gateway; g != nil {
		state, rest := g.text()
		row("gateway", "", state, rest)
	}
	if d := v.Datapath; d != nil {
		row("datapath", "", choose(d.Healthy, "healthy", "broken"), fmt.Sprintf("%s, programs %s, %s",
			d.DeviceKind, d.Programs, choose(d.FirstInChain, "first in chain", "not first in chain")))
		if d.DeviceWhy != "" {
			row("", "", "device", d.DeviceKind+": "+d.DeviceWhy)
		}
		if len(d.Guarded) > 0 {
			row("", "", "guarded", strings.Join(d.Guarded, ", "))
		}
		for _, network := range slices.Sorted(maps.Keys(d.Switches)) {
			row("", "", "switch", network+": "+d.Switches[network])
		}
		for _, lack := range d.Without {
			row("", "", "without", lack)
		}
		for _, e := range d.Entries {
			row("", "", e.Table, e.text())
		}
		for _, p := range v.Pulls {
			row("", "", p.Network+"-pull", p.text())
		}
		v.Policies.rows(row)
		for i, r := range v.Offloads {
			row(choose(i == 0, "offloads", ""), "", r.Role, r.text())
		}
		if v.Egress != nil {
			v.Egress.rows(row)
		}
		if v.Services != nil {
			row("services", "", "in use", v.Services.text())
		}
		if v.Load != nil {
			row("packets", "", "load", v.Load.text())
		}
		fmt.Fprintf(w, "drops\t%s\n", v.dropText())
	}
	for _, p := range v.Problems {
		fmt.Fprintf(w, "problem\t%s\n", strings.ReplaceAll(p, "\n  ", "\n\t"))
	}
}

func (l linkView) text(now time.Time) string {
	since, err := time.Parse(time.RFC3339, l.Since)
	if err != nil {
		return l.URL
	}
	age := now.Sub(since).Round(time.Second)
	if l.Connected {
		return fmt.Sprintf("%s, revision %s, for %v", l.URL, humanize.Grouped(l.Revision), age)
	}
	return fmt.Sprintf(
		"%s, for %v: %s; existing tenants and containers keep working",
		l.URL,
		age,
		strings.ReplaceAll(l.LastError, "\n  ", "; "),
	)
}

// dropText lists the reasons with drops, most packets first.
func (v statusView) dropText() string {
	var total, lastMinute uint64
	var reasons []dropView
	for _, d := range v.Drops {
		total += d.Packets
		lastMinute += d.LastMinute
		if d.Packets > 0 {
			reasons = append(reasons, d)
		}
	}
	if total == 0 {
		return "none"
	}
	sort.SliceStable(reasons, func(i, j int) bool { return reasons[i].Packets > reasons[j].Packets })
	var parts []string
	for _, d := range reasons {
		parts = append(parts, d.Reason+" "+humanize.Grouped(d.Packets))
	}
	return fmt.Sprintf(
		"last minute %s; since start %s (%s)   pilaster monitor --type drop",
		humanize.Grouped(lastMinute),
		humanize.Grouped(total),
		strings.Join(parts, ", "),
	)
}

func choose(b bool, yes, no string) string {
	if b {
		return yes
	}
	return no
}

func timeText(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return moment(t.AsTime())
}
