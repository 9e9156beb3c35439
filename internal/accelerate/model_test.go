package accelerate_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/netns"
)

// model knows which datagrams of its flows arrive over the overlay of two nodes, and changes the overlay.
type model struct {
	nodes   [2]*node
	pods    []*pod
	flows   []*dualFlow
	daemons []*daemon // nil if the caches are used without it
	random  *rand.Rand
	limit   time.Duration // after which a change is in effect
	silent  time.Duration // the same for one without an event

	dropping *ebpf.Program

	active []*change
	moved  map[*node]bool // the node answers at its second address
	killed *node          // whose daemon was killed

	epoch  time.Time
	late   atomic.Int64 // how late a client sent at most, in ns
	latest time.Duration
	steps  int
	strict int // steps in which all clients sent in time, so that at most half of the limit was added to it
	faults []string
	used   uses // in steps before and after which all datagrams of a flow arrive, and both daemons run
}

// newModel makes pods and flows on two nodes, and starts the daemons.
func newModel(t *testing.T, arrangement func(*testing.T) [2]*node, seed uint64, start func(m *model)) *model {
	t.Helper()
	m := &model{
		nodes: arrangement(t), random: rand.New(rand.NewPCG(seed, 0)), epoch: time.Now(), moved: map[*node]bool{},
		used:  uses{},
		limit: 200 * time.Millisecond, dropping: returning(t, 2), // TC_ACT_SHOT
	}
	if s := os.Getenv("PILASTER_ACCELERATE_LIMIT"); s != "" {
		limit, err := time.ParseDuration(s)
		must(t, err)
		m.limit = limit
	}
	m.silent = m.limit + accelerate.MaxValidity
	for _, n := range m.nodes {
		noReversePathFilter(t, n.ns)
		ip(t, n.ns, `
			addr add %s/24 dev eth0
			route add blackhole default table 99
			! iptables-nft -w -A FORWARD -m conntrack --ctstate INVALID -j DROP
			! iptables-nft -w -A INPUT -p udp -d %[1]s -j DROP`, n.vtep(true))
		for host := 3; host < 5; host++ {
			first := netip.MustParsePrefix(n.prefix).Addr().As4()
			first[3] = byte(host)
			m.pods = append(m.pods, &pod{
				node: n, device: fmt.Sprint(n.device, host), host: host, addr: netip.AddrFrom4(first),
			})
		}
	}
	for i, ends := range [][2]int{{0, 2}, {1, 3}, {0, 3}, {2, 1}} {
		m.flows = append(m.flows, &dualFlow{
			number: i, client: m.pods[ends[0]], server: m.pods[ends[1]], epoch: m.epoch, late: &m.late,
		})
	}
	t.Cleanup(func() {
		for _, p := range m.pods {
			if p.ns != nil {
				must(t, p.stop(m.flows))
			}
		}
	})
	for _, p := range m.pods {
		must(t, p.start(m.flows))
	}
	m.countPassing(t)
	start(m)
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for _, f := range m.flows {
		clients.Go(func() { f.run(stop) })
	}
	t.Cleanup(func() { close(stop); clients.Wait() })
	return m
}

// noReversePathFilter makes routes decide about destinations only, also those that a change leads nowhere.
func noReversePathFilter(t *testing.T, ns *netns.Namespace) {
	t.Helper()
	must(t, ns.Do(func() error {
		all, err := filepath.Glob("/proc/sys/net/ipv4/conf/*/rp_filter")
		for _, name := range all {
			if err := os.WriteFile(name, []byte("0"), 0); err != nil {
				return err
			}
		}
		return err
	}))
}

func (m *model) podOf(n *node) *pod {
	of := slices.DeleteFunc(slices.Clone(m.pods), func(p *pod) bool { return p.node != n })
	return of[m.random.IntN(len(of))]
}

func (m *model) now() time.Duration { return time.Since(m.epoch) }

// arrives tells whether datagrams arrive. Those back are answers.
func (m *model) arrives(f *dualFlow, way int) bool { return len(m.obstacles(f, way)) == 0 }

// obstacles returns the changes that keep datagrams from arriving.
func (m *model) obstacles(f *dualFlow, way int) (all []*change) {
	for _, c := range m.active {
		if c.keeps(f, way) || way == back && c.keeps(f, there) {
			all = append(all, c)
		}
	}
	return all
}

// step makes a change, or ends it, and judges its effect.
func (m *model) step(t *testing.T, c *change, ends bool) {
	t.Helper()
	counted := m.uses(t)
	m.late.Store(0)
	var before [][ways]bool
	for _, f := range m.flows {
		before = append(before, [ways]bool{m.arrives(f, there), m.arrives(f, back)})
	}
	name, do := c.name, c.apply
	if ends {
		name, do = "end of "+name, c.end
	}
	if err := do(); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	done := m.now()
	if c.since, m.active = done, append(m.active, c); ends {
		m.active = slices.DeleteFunc(m.active, func(other *change) bool { return other == c })
	}
	for i, f := range m.flows {
		for way := range ways {
			j := judgement{
				model: m, flow: f, way: way, done: done,
				what: fmt.Sprintf("%s (node %d, %s): %v %s", name, c.node.number, c.key, f, wayNames[way]),
			}
			if m.arrives(f, way) {
				j.arrives(t, before[i][way])
			} else {
				j.nothingArrives(t)
			}
		}
	}
	late := time.Duration(m.late.Load())
	if m.latest = max(m.latest, late); 4*late <= m.limit {
		m.strict++
	}
	m.steps++
	m.used.add(m.uses(t).since(counted), func(f *dualFlow) bool {
		ways := before[f.number]
		return m.killed == nil && ways[there] && ways[back] && m.arrives(f, there) && m.arrives(f, back)
	})
	checked := m.now()
	for _, f := range m.flows {
		for way := range ways {
			for kind := range kinds {
				f.arrived[kind][way].forget(checked)
			}
		}
	}
}

// next chooses the next change: one that is new, or one that ends.
func (m *model) next() (c *change, ends bool) {
	if n := len(m.active); m.random.IntN(2) < n { // with more, most flows would stand still
		return m.active[m.random.IntN(n)], true
	}
	all := append(slices.Clone(changes), procedures, procedures)
	for {
		kind := all[m.random.IntN(len(all))]
		if kind.silent && m.random.IntN(5) > 0 {
			continue // it takes 10 s
		}
		if c := m.make(kind); c != nil {
			return c, false
		}
	}
}

// procedures are of an operator, or contain kills.
var procedures = kind{"procedure", (*model).procedure, false}

// make returns a change of a kind that is possible now, nil if it cannot find one.
func (m *model) make(kind kind) *change {
	c := kind.make(m)
	if c == nil || slices.ContainsFunc(m.active, func(other *change) bool { return other.key == c.key }) {
		return nil
	}
	if c.name == "" {
		c.name = kind.name
	}
	return c
}

// restart starts a daemon that was killed.
func (m *model) restart(t *testing.T) {
	t.Helper()
	n := m.killed
	m.step(t, &change{name: "start of the daemon", node: n, apply: func() error {
		m.daemons[n.number-1] = n.accelerate(t)
		return nil
	}}, false)
	m.active = m.active[:len(m.active)-1]
	m.killed = nil
}

// causes are the counters of the daemons.
func (m *model) causes(t *testing.T) string {
	var all strings.Builder
	for i, d := range m.daemons {
		s, err := d.Status(t.Context())
		fmt.Fprintf(&all, "\nnode %d: out %+v\nin %+v\nevictions %v, problems %v, %v", i+1, s.Egress, s.Ingress,
			s.Evictions, s.Problems, err)
	}
	return all.String()
}

func number(t *testing.T, variable string, usual uint64) uint64 {
	t.Helper()
	s := os.Getenv(variable)
	if s == "" {
		return usual
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

// TestModel makes random changes of two overlays under load. Later than PILASTER_ACCELERATE_LIMIT (200ms) after a
// change, no datagram may arrive that the overlay alone drops, and none may be lost for longer than the overlay loses
// it; 10 s later if the kernel does not notify the change. What the overlay alone does, datagrams with an IP option
// show, which are never cached. PILASTER_ACCELERATE_CHANGES is the number of changes, PILASTER_ACCELERATE_SEED repeats
// the choices of a run.
func TestModel(t *testing.T) {
	for i, name := range []string{"flannel", "calico"} {
		t.Run(name, func(t *testing.T) {
			seed := number(t, "PILASTER_ACCELERATE_SEED", rand.Uint64())
			t.Logf("PILASTER_ACCELERATE_SEED=%d repeats the choices", seed)
			m := newModel(t, arrangements[name].make, seed, func(m *model) {
				m.daemons = []*daemon{m.nodes[0].accelerate(t), m.nodes[1].accelerate(t)}
			})
			m.load(t)
			began := time.Now()
			m.step(t, &change{name: "start", node: m.nodes[0], apply: func() error { return nil }}, false)
			m.active = nil
			made := 0
			if n := number(t, "PILASTER_ACCELERATE_CHANGES", 0); n > 0 {
				made = m.many(t, int(n)/2)
			} else {
				made = m.few(t, i)
			}
			t.Logf("%d changes in %v", made, time.Since(began).Round(time.Second))
			t.Logf("clients sent at most %v late, in %d of %d steps at most a quarter of the limit", m.latest, m.strict,
				m.steps)
			if missing := m.used.misses(t); len(missing) > 0 {
				t.Errorf("the cache was hardly used:\n%s%s", strings.Join(missing, "\n"), m.causes(t))
			}
		})
	}
}

// check makes a change and ends the test at the first fault.
func (m *model) check(t *testing.T, c *change, ends bool) {
	t.Helper()
	m.step(t, c, ends)
	if len(m.faults) == 0 && m.killed != nil {
		m.restart(t)
	}
	if len(m.faults) > 0 {
		var force []string
		for _, c := range m.active {
			force = append(force, fmt.Sprintf("%s (node %d, %s)", c.name, c.node.number, c.key))
		}
		t.Fatalf("%s\nin force: %s%s", strings.Join(m.faults, "\n"), strings.Join(force, ", "), m.causes(t))
	}
}

func (m *model) many(t *testing.T, changes int) (made int) {
	for made = range changes {
		c, ends := m.next()
		m.check(t, c, ends)
	}
	return made + 1
}

// few makes every second kind of changes.
func (m *model) few(t *testing.T, first int) (made int) {
	all := append(slices.Clone(changes), procedures, procedures)
	for i := first; i < len(all); i += 2 {
		kind := all[i]
		if kind.silent {
			continue // TestDropsTakeEffect makes such a change
		}
		c := m.make(kind)
		for c == nil {
			c = m.make(changes[m.random.IntN(2)*2])
		}
		m.check(t, c, false)
		m.check(t, c, true)
		made += 2
	}
	return made
}
