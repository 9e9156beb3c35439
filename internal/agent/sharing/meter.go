package sharing

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// Measuring reads what the packet path has done.
type Measuring interface {
	Messages() (map[uint32]dpapi.Messages, error)
	MeasureWork() (io.Closer, error)
	Work() (dpapi.Work, error)
	DevicePackets() (map[int]uint64, error)
	TenantSessions() (used map[uint32]int, capacity int, err error)
}

// Node has the containers and policies of this node.
type Node interface {
	Roles() []agent.Role
	Endpoints() []endpoint.Record
	RuleTable() dpapi.Entries
	RulesOf(tenant string) int
}

// Meter measures a node's packet load and tables.
//
// Load is the run time of all programs in a period, divided by the period and the budget. It is split by estimates:
//   - A frontend's load is the time of the programs that an offload's packets pass, in proportion to the number of
//     these packets: each counts as much as an average run. What remains is the load of the node's own containers.
//   - A tenant's part of that is half in proportion to the packets that its containers have sent, half to its sessions:
//     packets to containers are not counted, and senders of many packets may have one session.
type Meter struct {
	node   Node
	path   Measuring
	budget float64 // CPUs

	mu       sync.Mutex
	counting io.Closer // nil: the kernel counts no run time for us
	was      *sample   // nil: none since the kernel counts
	last     *pilasterv1.NodeLoad
}

// sample is what was counted until a time.
type sample struct {
	at       time.Time
	work     dpapi.Work
	messages map[uint32]dpapi.Messages
	packets  map[int]uint64
	sessions map[uint32]int
}

// NewMeter returns a meter for a budget of CPUs for packets.
func NewMeter(node Node, path Measuring, budget float64) *Meter {
	return &Meter{node: node, path: path, budget: budget}
}

// Load returns the load since the last call. The packet load is included only if the last call had measure too: the
// kernel's count of run time costs each run of a program some time.
func (m *Meter) Load(measure bool) (*pilasterv1.NodeLoad, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.count(measure); err != nil {
		return nil, err
	}
	sessions, room, err := m.path.TenantSessions()
	if err != nil {
		return nil, err
	}
	load := m.tables(sessions, room)
	if measure {
		now, err := m.sample(sessions)
		if err != nil {
			return nil, err
		}
		if m.was != nil {
			m.split(load, *m.was, now)
		}
		m.was = &now
	}
	m.last = load
	return load, nil
}

// Last returns what Load has last returned; nil before that.
func (m *Meter) Last() *pilasterv1.NodeLoad {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// Messages counts the messages that this node has sent, by offload, by kind.
func (m *Meter) Messages() (map[uint32]dpapi.Messages, error) { return m.path.Messages() }

// Close ends the kernel's count.
func (m *Meter) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.count(false)
}

// count begins or ends the kernel's count of run time.
func (m *Meter) count(measure bool) (err error) {
	if measure == (m.counting != nil) {
		return nil
	}
	m.was = nil
	if measure {
		m.counting, err = m.path.MeasureWork()
		return err
	}
	err = m.counting.Close()
	m.counting = nil
	return err
}

// tables returns a load without packets.
func (m *Meter) tables(sessions map[uint32]int, room int) *pilasterv1.NodeLoad {
	used := 0
	for _, n := range sessions {
		used += n
	}
	rules := m.node.RuleTable()
	load := &pilasterv1.NodeLoad{
		Budget: m.budget, Rules: number(rules.Used), RulesCapacity: number(rules.Capacity),
		Sessions: number(used), SessionsCapacity: number(room),
	}
	tenants := map[string]bool{}
	for _, r := range m.node.Endpoints() {
		tenants[r.Tenant] = true
	}
	for _, name := range slices.Sorted(maps.Keys(tenants)) {
		load.Tenants = append(load.Tenants, &pilasterv1.TenantLoad{Tenant: name, Rules: number(m.node.RulesOf(name))})
	}
	return load
}

func number(n int) uint32 { return uint32(min(max(0, n), math.MaxUint32)) }

func (m *Meter) sample(sessions map[uint32]int) (s sample, err error) {
	s.at, s.sessions = time.Now(), sessions
	if s.work, err = m.path.Work(); err != nil {
		return s, fmt.Errorf("measure the packet load: %w", err)
	}
	if s.messages, err = m.path.Messages(); err != nil {
		return s, err
	}
	s.packets, err = m.path.DevicePackets()
	return s, err
}

// split writes the packet load between two samples, unless no time has passed.
func (m *Meter) split(load *pilasterv1.NodeLoad, was, now sample) {
	period := now.at.Sub(was.at).Seconds() * m.budget
	if period <= 0 {
		return
	}
	load.Measured = true
	total := seconds(now.work.Total - was.work.Total)
	own := total
	for _, r := range m.node.Roles() {
		if r.Backend {
			continue
		}
		sent, before := now.messages[r.ID], was.messages[r.ID]
		passed := since(sent[dpapi.MessagePre], before[dpapi.MessagePre]) +
			since(sent[dpapi.MessagePass], before[dpapi.MessagePass])
		answered := since(sent[dpapi.MessageAnswer], before[dpapi.MessageAnswer])
		needs := part(now.work.FromFabric, was.work.FromFabric, passed+answered) +
			part(now.work.FromTunnel, was.work.FromTunnel, passed) +
			part(now.work.ToFabric, was.work.ToFabric, passed+answered)
		needs = min(needs, own)
		own -= needs
		load.Fronting = append(load.Fronting, &pilasterv1.FrontingLoad{
			Tenant: r.Tenant, Backend: r.Node, Load: needs / period,
		})
	}
	slices.SortFunc(load.Fronting, func(a, b *pilasterv1.FrontingLoad) int {
		return strings.Compare(a.Tenant+" "+a.Backend, b.Tenant+" "+b.Backend)
	})
	load.Own = own / period
	sent, sessions := map[string]float64{}, map[string]float64{}
	for _, r := range m.node.Endpoints() {
		sent[r.Tenant] += float64(since(now.packets[r.Device.HostIfindex], was.packets[r.Device.HostIfindex]))
		sessions[r.Tenant] = float64(now.sessions[uint32(r.TenantID)])
	}
	for _, t := range load.Tenants {
		bySent, sends := share(sent, t.Tenant)
		bySessions, has := share(sessions, t.Tenant)
		if parts := sends + has; parts > 0 {
			t.Load = load.Own * (bySent + bySessions) / parts
		}
	}
}

// share returns a tenant's part of a sum, and 1; 0 and 0 if there is nothing to share.
func share(of map[string]float64, name string) (part, counts float64) {
	all := 0.0
	for _, n := range of {
		all += n
	}
	if all == 0 {
		return 0, 0
	}
	return of[name] / all, 1
}

// since returns the growth of a counter; one that began anew has grown from 0.
func since(now, was uint64) uint64 {
	if now < was {
		return now
	}
	return now - was
}

func seconds(d time.Duration) float64 { return max(0, d.Seconds()) }

// part returns the time of so many of the runs of a program.
func part(now, was dpapi.Runs, packets uint64) float64 {
	runs := since(now.Count, was.Count)
	if runs == 0 {
		return 0
	}
	return seconds(now.Time-was.Time) * min(1, float64(packets)/float64(runs))
}
