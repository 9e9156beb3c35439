package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
	"pilaster.io/pilaster/internal/policy"
)

// Lookups configure the measurement of packets that miss the cache and need a rule lookup: first packets, which create
// a session, and later packets of a session (NZ10, Nezha's table A1).
type Lookups struct {
	Rules   []int // 0: the tenant has no policies and no sessions
	Bytes   []int // frame sizes; the first is measured in all combinations, the others only in those of Nezha's table
	Packets int   // per sample
	Rounds  int
	AtMost  float64 // maximum ratio of a lookup's time under the most rules to its time under a single rule; 0: no gate
}

// LookupCost is the time of the uplink's program for a packet.
type LookupCost struct {
	Rules   int             `json:"rules"`
	By      string          `json:"by"`      // how rules select peers
	Session string          `json:"session"` // state of the session
	Bytes   int             `json:"bytes"`
	Ns      report.Interval `json:"ns"`
}

// How rules select peers.
const (
	byNothing   = "–"
	bySelectors = "labels"
	byAddresses = "blocks"
)

// State of a packet's session.
const (
	isNone  = "none" // no policies, no session
	isFound = "found"
	isBegun = "begun"
)

// newSessions exceeds the size of the session table, so that each packet creates a session and evicts another one.
const (
	newSessions   = 1 << 15
	placesOfBench = 1 << 12
)

// waysOf returns the ways in which this number of rules can select peers.
func waysOf(rules int) []string {
	if rules == 0 {
		return []string{byNothing}
	}
	return []string{bySelectors, byAddresses}
}

// measures reports whether packets of size l.Bytes[i] are measured in this combination.
func (l Lookups) measures(i int, by, session string) bool {
	return i == 0 || by != byAddresses && session != isFound
}

// rows returns the number of figures.
func (l Lookups) rows() (n int) {
	for _, rules := range l.Rules {
		for _, by := range waysOf(rules) {
			for i := range l.Bytes {
				for _, session := range sessionsOf(rules) {
					if l.measures(i, by, session) {
						n++
					}
				}
			}
		}
	}
	return n
}

// stepsOfRow returns how long one figure takes, as a number of rounds of one metric, at about 2 µs a packet.
func (r *run) stepsOfRow() int {
	row := time.Duration(r.Lookups.Packets*r.Lookups.Rounds) * 2 * time.Microsecond
	return 1 + int(row/(time.Duration(len(r.Scenarios))*(r.Warmup+r.Window)))
}

// measureLookups creates a node with one container for each number of rules.
func (r *run) measureLookups(ctx context.Context) error {
	for _, n := range r.Lookups.Rules {
		for _, by := range waysOf(n) {
			if err := r.lookups(ctx, n, by); err != nil {
				return fmt.Errorf("first packets under %s by %s: %w", humanize.Of(n, "rule", "rules"), by, err)
			}
		}
	}
	return nil
}

func (r *run) lookups(ctx context.Context, rules int, by string) (err error) {
	bed, err := progrun.NewBed(filepath.Join(r.Dir, "lookups"), 1, 1, placesOfBench)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bed.Close()) }()
	peers, err := bed.Peers(1, bed.Endpoints, r.random)
	if err != nil {
		return err
	}
	if rules > 0 {
		p, apps := rulesBy(by, rules, peers[0].Plain)
		if err := scenario.ApplyPolicy(bed.Datapath, bed.Endpoints[0].Plain.Tenant, p, apps,
			bed.Endpoints[0].Plain.Addr(), peers[0].Plain); err != nil {
			return err
		}
	}
	return bed.Node.NS.Do(func() error {
		var set unix.CPUSet
		set.Set(max(0, r.CPU))
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", r.CPU, err)
		}
		m := &progrun.Meter{Bed: bed, Count: r.Lookups.Rounds, Context: ctx, Random: rand.New(rand.NewPCG(r.Seed, 2))}
		for i, size := range r.Lookups.Bytes {
			for _, session := range sessionsOf(rules) {
				if !r.Lookups.measures(i, by, session) {
					continue
				}
				ns, err := r.Lookups.uncached(m, peers[0], size, session)
				if err != nil {
					return fmt.Errorf("%d bytes, session %s: %w", size, session, err)
				}
				r.looked = append(r.looked, LookupCost{rules, by, session, size, ns})
				r.step(r.Rounds-1, "lookups", r.stepsOfRow())
			}
		}
		return nil
	})
}

func sessionsOf(rules int) []string {
	if rules == 0 {
		return []string{isNone}
	}
	return []string{isFound, isBegun}
}

// rulesBy returns a policy whose last rule admits the peer, and the apps that its other rules select.
func rulesBy(by string, n int, peer netip.Addr) (policy.Policy, map[address.AppID]map[string]string) {
	last, _ := peer.Prefix(64)
	p := scenario.RulePolicy(scenario.RuleBlocks(n, last))
	apps := map[address.AppID]map[string]string{1: {"app": "last"}}
	if by == byAddresses {
		return p, apps
	}
	for i := range p.Rules[policy.Ingress] {
		app := fmt.Sprint("app-", i)
		if i == n-1 {
			app = "last"
		} else {
			apps[address.AppID(2+i)] = map[string]string{"app": app}
		}
		p.Rules[policy.Ingress][i] = policy.Rule{Action: policy.Accept, Pods: []policy.Pods{{
			Namespace: p.Namespace, Labels: policy.Selector{{Key: "app", Operator: policy.In, Values: []string{app}}},
		}}}
	}
	return p, apps
}

// uncached measures packets that all miss the cache. They belong to one session, or to more sessions than the table can
// hold.
func (l Lookups) uncached(m *progrun.Meter, p progrun.Peer, size int, session string) (report.Interval, error) {
	hook := m.Bed.HookNamed("uplink-in")
	all := make([]progrun.Frame, 1)
	if session == isBegun {
		all = make([]progrun.Frame, newSessions)
	}
	for i := range all {
		all[i] = hook.Datagram(p, uint16(i), size)
	}
	f, err := progrun.NewFrames(hook, all, m.Bed.Generation, m.Bed.RuleGeneration)
	if err != nil {
		return report.Interval{}, err
	}
	f.Size = size
	ns, err := m.Samples(func() (float64, error) { return f.Time(l.Packets, progrun.Forwarded) })
	return ns, errors.Join(err, f.Close())
}

// checkLookups applies the gate: the time of a lookup must not depend on the number of rules.
func (r *Report) checkLookups(l Lookups) {
	if l.AtMost == 0 {
		return
	}
	of := func(rules int, c LookupCost) (same LookupCost, found bool) {
		c.Rules = rules
		i := slices.IndexFunc(r.Lookups, func(x LookupCost) bool {
			x.Ns = c.Ns
			return x == c
		})
		if i < 0 {
			return same, false
		}
		return r.Lookups[i], true
	}
	most := slices.Max(l.Rules)
	for _, one := range r.Lookups {
		many, found := of(most, one)
		if one.Rules != 1 || !found {
			continue
		}
		name := func(n int) string { return humanize.Of(n, "rule", "rules") + " by " + one.By }
		g := Gate{
			Scenario: name(most),
			Against:  name(1),
			Metric:   fmt.Sprintf("session %s, %d bytes", one.Session, one.Bytes),
			AtMost:   l.AtMost,
		}
		c := Check{
			Gate: g,
			Got: report.Interval{
				Median: many.Ns.Median / one.Ns.Median,
				Low:    many.Ns.Low / one.Ns.High,
				High:   many.Ns.High / one.Ns.Low,
			},
		}
		c.Verdict = g.judge(c.Got, r.Settings.TooWide)
		r.Pass = r.Pass && c.Verdict == Passed
		r.Checks = append(r.Checks, c)
	}
}

// lookupsTable has one line for each figure.
func (r *Report) lookupsTable() *plot.Table {
	t := &plot.Table{Head: []string{"rules", "by", "session", "bytes", "ns", "95 %", "a second"}}
	for _, c := range r.Lookups {
		t.Rows = append(t.Rows, []string{
			humanize.Grouped(c.Rules), c.By, c.Session, humanize.Grouped(c.Bytes),
			fmt.Sprintf(
				"%.0f",
				c.Ns.Median,
			), fmt.Sprintf("%.0f–%.0f", c.Ns.Low, c.Ns.High), report.Figure(1e9 / c.Ns.Median),
		})
	}
	return t
}

const aboutLookups = "Packets into a container, on one CPU, for which no decision is cached: the program looks up " +
	"the " +
	"rules, and the last of them decides. The packet's session exists, or the program creates it in a full table, " +
	"where " +
	"it evicts another one. With 0 rules the tenant has no policies and no sessions. " +
	"The kernel runs the program alone (BPF_PROG_TEST_RUN): no NIC, no driver"

const lookupsInPapers = "Nezha table A1 (NZ10): on a SmartNIC, 6.61 million a second with no rule and 5.42 with " +
	"1,000 " +
	"(−18 %), of 64 bytes; 5.99 and 4.76 of 512"

// lookupsSections returns one section, or none if nothing was measured.
func (r *Report) lookupsSections() []plot.Section {
	if len(r.Lookups) == 0 {
		return nil
	}
	var bars []plot.Bar
	for _, c := range r.Lookups {
		name, class := humanize.Of(c.Rules, "rule", "rules")+" by "+c.By+" · session "+c.Session, "ours"
		if c.Rules == 0 {
			name, class = "no policies", "bound"
		}
		bars = append(bars, plot.Bar{
			Name: fmt.Sprintf(
				"%s · %d bytes",
				name,
				c.Bytes,
			), Class: class, Figure: fmt.Sprintf("%.0f ns", c.Ns.Median),
			At: plot.Span(c.Ns),
		})
	}
	const title = "rule lookups, by number of rules and size of packets"
	return []plot.Section{{
		Title: title,
		Notes: []plot.Note{{Text: aboutLookups + ". In the papers: " + lookupsInPapers + "."}},
		Bars:  plot.NewBars(title, "ns a packet", 330, false, bars),
		Table: r.lookupsTable(),
	}}
}
