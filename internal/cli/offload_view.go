package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/tenant"
)

// offloadView is an offload as JSON.
type offloadView struct {
	Tenant     string         `json:"tenant"`
	Node       string         `json:"node"`                // the backend
	ID         uint32         `json:"id,omitempty"`        // 0 in a dry run
	Phase      string         `json:"phase"`               // preparing, dual, active, returning, ending; ended after stop
	Since      time.Time      `json:"since,omitzero"`      // of the phase, or of the last change of frontends
	Automatic  bool           `json:"automatic,omitempty"` // started by the controller
	Wanted     uint32         `json:"wanted,omitempty"`    // active frontends that it should have; 0: as many as it has
	Frontends  []frontendView `json:"frontends"`
	Containers []offloadedApp `json:"containers"`         // as the backend reported them
	Prefixes   []string       `json:"prefixes,omitempty"` // of start: addresses and subnets of the tenant on the node
	Awaited    []awaitedView  `json:"awaited,omitempty"`  // nodes without which the next step does not begin
	Problems   []string       `json:"problems,omitempty"` // why it does not have what it should have
	LastChange string         `json:"lastChange,omitempty"`
	Changes    []changeView   `json:"changes,omitempty"`  // the last, of this orchestrator
	DryRun     bool           `json:"dryRun,omitempty"`   // nothing was changed
	Gain       float64        `json:"gain,omitempty"`     // of start: estimated; 0: unknown
	Estimate   string         `json:"estimate,omitempty"` // of start: what it is based on
}

// offloadsView is all offloads as JSON.
type offloadsView struct {
	Automatic bool          `json:"automatic"` // offloads start and end by the nodes' loads
	Problems  []string      `json:"problems"`  // of the cluster and of nodes
	Offloads  []offloadView `json:"offloads"`
}

// frontendView is a node that looks up rules.
type frontendView struct {
	Node   string `json:"node"`
	Active bool   `json:"active"`         // packets are sent to it
	Lost   bool   `json:"lost,omitempty"` // its program does not answer the backend
}

// offloadedApp is a container of the backend.
type offloadedApp struct {
	Addresses []netip.Addr `json:"addresses"`
	App       uint32       `json:"app"`
}

// changeView is a change of an offload.
type changeView struct {
	At   time.Time `json:"at"`
	Text string    `json:"text"` // what changed, and why
}

// awaitedView is a node that has not confirmed a step.
type awaitedView struct {
	Node   string `json:"node"`
	Reason string `json:"reason"`
}

func viewOffload(s *pilasterv1.OffloadStatus) offloadView {
	o := s.GetOffload()
	v := offloadView{
		Tenant: s.GetTenant(), Node: o.GetNode(), ID: o.GetId(), Automatic: o.GetAutomatic(), Wanted: o.GetWanted(),
		Frontends: []frontendView{}, Containers: []offloadedApp{}, Problems: s.GetProblems(),
		LastChange: s.GetLastChange(),
	}
	if o.GetChanged() != nil {
		v.Since = o.Changed.AsTime()
	}
	if i := int(o.GetPhase()); i > 0 && i < len(tenant.OffloadPhases) {
		v.Phase = string(tenant.OffloadPhases[i])
	} else {
		v.Phase = "unknown"
	}
	for _, f := range o.GetFrontends() {
		lost := slices.Contains(s.LostFrontends, f.Node)
		v.Frontends = append(v.Frontends, frontendView{Node: f.Node, Active: !f.Draining, Lost: lost})
	}
	for _, e := range o.GetEndpoints() {
		c := offloadedApp{App: e.App}
		for _, raw := range e.Addresses {
			if a, ok := netip.AddrFromSlice(raw); ok {
				c.Addresses = append(c.Addresses, a)
			}
		}
		v.Containers = append(v.Containers, c)
	}
	for _, c := range s.GetChanges() {
		v.Changes = append(v.Changes, changeView{c.GetAt().AsTime(), c.Text})
	}
	for _, a := range s.GetAwaited() {
		v.Awaited = append(v.Awaited, awaitedView{a.Node, a.Reason})
	}
	return v
}

// frontends lists the frontends with their state.
func (v offloadView) frontends() string {
	var names []string
	for _, f := range v.Frontends {
		var states []string
		if !f.Active {
			states = append(states, "not active")
		}
		if f.Lost {
			states = append(states, "does not answer")
		}
		if states != nil {
			names = append(names, fmt.Sprintf("%s (%s)", f.Node, strings.Join(states, ", ")))
		} else {
			names = append(names, f.Node)
		}
	}
	return orNone(strings.Join(names, ", "))
}

// containers lists the addresses of the containers.
func (v offloadView) containers() string {
	var all []string
	for _, c := range v.Containers {
		for _, a := range c.Addresses {
			all = append(all, a.String())
		}
	}
	return orNone(strings.Join(all, ", "))
}

// progress describes the phase, which nodes it waits for, and problems.
func (v offloadView) progress() string {
	text := v.Phase
	if len(v.Awaited) > 0 {
		text += ": waiting for " + v.awaited()
	}
	for _, p := range v.Problems {
		text += "; problem: " + p
	}
	return text
}

// problems lists the problems, with the frontends that do not answer.
func (v offloadView) problems() string {
	all := slices.Clone(v.Problems)
	var lost []string
	for _, f := range v.Frontends {
		if f.Lost {
			lost = append(lost, f.Node)
		}
	}
	if lost != nil {
		all = append(all, "no answer from "+strings.Join(lost, ", "))
	}
	return orNone(strings.Join(all, "; "))
}

// command is a command line about the offload.
func (v offloadView) command(verb string) string {
	return fmt.Sprintf("`pilaster offload %s %s --node %s`", verb, v.Tenant, v.Node)
}

// stopped is why the controller stopped the offload, empty if it did not.
func (v offloadView) stopped() string {
	reason, _ := strings.CutPrefix(v.LastChange, string(offload.Stop)+": ")
	if reason == v.LastChange {
		return ""
	}
	return reason
}

// interrupted returns the error of a command whose user ended it; other errors it returns as they are.
func (v offloadView) interrupted(ctx context.Context, err error) error {
	if err == nil || !errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	return fmt.Errorf("interrupted; the offload goes on: %s shows it, %s ends it", v.command("get"), v.command("stop"))
}

func (v offloadView) awaited() string {
	var words []string
	for _, a := range v.Awaited {
		words = append(words, fmt.Sprintf("%s (%s)", a.Node, a.Reason))
	}
	return strings.Join(words, ", ")
}

func (v offloadView) printStarted(w io.Writer) {
	what, goes := "prefixes", orNone(strings.Join(v.Prefixes, ", "))
	switch {
	case v.DryRun:
		fmt.Fprintf(w, "nothing was changed; the offload of tenant %s on node %s would have:\n", v.Tenant, v.Node)
	case v.Phase == string(tenant.OffloadActive):
		fmt.Fprintf(
			w,
			"tenant %s on node %s is offloaded: its rules are looked up on the frontends\n",
			v.Tenant,
			v.Node,
		)
		what, goes = "containers", v.containers()
	default:
		fmt.Fprintf(w, "the offload of tenant %s on node %s has started; its phase is %s\n", v.Tenant, v.Node, v.Phase)
	}
	names := []string{}
	for _, f := range v.Frontends {
		names = append(names, f.Node)
	}
	fmt.Fprintf(w, "frontends\t%s\n%s\t%s\n", strings.Join(names, ", "), what, goes)
	if !v.DryRun {
		return
	}
	fmt.Fprintf(w, "estimate\t%s\n", orNone(strings.ReplaceAll(v.Estimate, "\n", "\n\t")))
	if v.Gain > 0 && v.Gain < 1 {
		fmt.Fprintln(w, "this is a loss, so a start needs --force")
	}
}

// awaiting is what a command waits for.
type awaiting struct {
	phase    string // active or ended
	now      bool   // of stop: without waiting for the backend's rules
	wait     time.Duration
	progress io.Writer
}

// obstacles says what the next step waits for.
func (v offloadView) obstacles() string {
	text := ""
	if len(v.Awaited) > 0 {
		text = ", and waits for " + v.awaited()
	}
	for _, p := range v.Problems {
		text += "; problem: " + p
	}
	return text
}

// advice says what happens to packets and what to do when a command has waited in vain.
func (v offloadView) advice(until awaiting) string {
	var slow []string
	for _, a := range v.Awaited {
		slow = append(slow, a.Node)
	}
	nodes, get := cmp.Or(strings.Join(slow, ", "), "a node"), v.command("get")+" shows the progress"
	switch {
	case until.phase != phaseEnded && v.Phase == string(tenant.OffloadPreparing):
		return fmt.Sprintf("packets go to %s as before; if %s does not load the rules within %v, the start is "+
			"undone: %s", v.Node, nodes, offload.DefaultLimits().Load, get)
	case until.phase != phaseEnded:
		return fmt.Sprintf("packets flow, and the nodes continue: %s; connect nodes that are disconnected, or run %s",
			get, v.command("stop"))
	case until.now:
		return fmt.Sprintf("packets go to %s, which drops those that it cannot judge until its agent runs and has "+
			"loaded the rules; the nodes continue: %s", v.Node, get)
	case v.Phase == string(tenant.OffloadReturning):
		return fmt.Sprintf("packets go to the frontends until %s has loaded its rules: %s. If it cannot load them, or "+
			"the frontends fail, run %s: packets go to %s at once, and it drops those that it cannot judge until it "+
			"has its rules", v.Node, get, v.command("stop --now"), v.Node)
	}
	return fmt.Sprintf("packets go to %s, and the nodes continue: %s", v.Node, get)
}

// ends reports whether the offload has been stopped.
func (v offloadView) ends() bool {
	return v.Phase == string(tenant.OffloadReturning) || v.Phase == string(tenant.OffloadEnding)
}

func (all offloadsView) text(w io.Writer) {
	fmt.Fprintln(w, "TENANT\tNODE\tPHASE\tSTARTED\tCONTAINERS\tFRONTENDS\tPROBLEMS")
	for _, v := range all.Offloads {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\n", v.Tenant, v.Node, v.Phase, v.startedBy(), len(v.Containers),
			v.frontends(), v.problems())
	}
	if all.Automatic {
		fmt.Fprintln(w, "\noffloads start and end by the nodes' loads: `pilaster offload auto off` ends that")
	}
	for _, p := range all.Problems {
		fmt.Fprintf(w, "\nproblem: %s\n", p)
	}
}

func (v offloadView) startedBy() string {
	if v.Automatic {
		return "by load"
	}
	return "by operator"
}

func (v offloadView) wanted() string {
	if v.Wanted == 0 {
		return "as many as active"
	}
	return fmt.Sprintf("%d active", v.Wanted)
}
