package nic

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Megaflow is what a NIC finds packets by: everything that a switch would decide alike (§3.3). With node CIDRs it is
// all that goes to one node.
type Megaflow struct {
	VNI pipeline.VNI
	To  netip.Prefix
}

// Handle names a megaflow between switch and NIC, as tc's handles do.
type Handle uint32

// Counter is a line of a dump.
type Counter struct {
	Handle  Handle
	Packets uint64 // since it was installed, as far as the driver knows
}

// NIC is what a switch asks of one. A caller waits for as long as the driver takes, which every call tells; a real
// NIC's would be what a clock shows.
type NIC interface {
	Install(at time.Duration, h Handle, m Megaflow) (took time.Duration, err error)
	Remove(at time.Duration, h Handle) (took time.Duration, err error)
	Dump(at time.Duration) (counters []Counter, took time.Duration)
}

// ErrFull is a NIC without room: the megaflow stays in software, and nothing else is changed.
var ErrFull = errors.New("the NIC has no room for another entry")

// Spec is a NIC and its driver. Parameters says where Production's values come from.
type Spec struct {
	Capacity     int           // entries it has memory for
	InsertRate   float64       // entries a second
	DumpEntry    time.Duration // a dump's time for each entry
	RemoveEntry  time.Duration // a removal's time, if nothing else were offloaded
	RemoveSlope  float64       // by how many times that it takes longer for every 1,000 entries
	CounterDelay time.Duration // at most, until a packet is in a dump
	GroupSize    int           // entries of a flow group, which are looked up at once
	FreeGroups   int           // groups that are looked up at line rate
	Line         float64       // Gbit/s, offloaded
	Software     float64       // Gbit/s of all flows that are not
}

// Production is the NIC that the figures are drawn with.
func Production() Spec {
	return Spec{
		Capacity: 65_536, InsertRate: 638, DumpEntry: 50 * time.Microsecond, RemoveEntry: 90 * time.Microsecond,
		RemoveSlope:  1.286,
		CounterDelay: 2 * time.Second, GroupSize: 1024, FreeGroups: 32, Line: 400, Software: 48.8,
	}
}

// Model is a NIC that does not exist.
type Model struct {
	Spec
	sent    func(h Handle, from, to time.Duration) uint64 // packets of a megaflow
	entries []offloaded
	place   []int // of a handle in entries, plus 1
}

type offloaded struct {
	handle Handle
	since  time.Duration
}

var _ NIC = (*Model)(nil)

// NewModel has no entries. sent tells it how many packets a megaflow had between two times.
func NewModel(s Spec, sent func(h Handle, from, to time.Duration) uint64) *Model {
	return &Model{Spec: s, sent: sent}
}

// Install takes an entry, which forwards as soon as the channel has let it through.
func (m *Model) Install(at time.Duration, h Handle, _ Megaflow) (time.Duration, error) {
	took := time.Duration(float64(time.Second) / m.InsertRate)
	if m.find(h) != nil {
		return 0, fmt.Errorf("entry %d is installed already and was left as it is", h)
	}
	if len(m.entries) == m.Capacity {
		return took, ErrFull
	}
	if n := int(h) + 1 - len(m.place); n > 0 {
		m.place = append(m.place, make([]int, n)...)
	}
	m.entries = append(m.entries, offloaded{h, at + took})
	m.place[h] = len(m.entries)
	return took, nil
}

// Remove takes an entry out at once; then the driver is busy with its own lists for the longer, the more entries there
// are (§4.1, §4.2).
func (m *Model) Remove(_ time.Duration, h Handle) (time.Duration, error) {
	e := m.find(h)
	if e == nil {
		return 0, fmt.Errorf("entry %d is not installed; nothing was removed", h)
	}
	took := time.Duration(float64(m.RemoveEntry) * (1 + m.RemoveSlope*float64(len(m.entries))/1000))
	last := m.entries[len(m.entries)-1]
	*e, m.place[last.handle] = last, m.place[h]
	m.place[h] = 0
	m.entries = m.entries[:len(m.entries)-1]
	return took, nil
}

// Dump lists what forwards, with counters as late as the driver's.
func (m *Model) Dump(at time.Duration) ([]Counter, time.Duration) {
	counters := make([]Counter, 0, len(m.entries))
	counted := m.counted(at)
	for _, e := range m.entries {
		if e.since > at {
			continue
		}
		c := Counter{Handle: e.handle}
		if e.since < counted {
			c.Packets = m.sent(e.handle, e.since, counted)
		}
		counters = append(counters, c)
	}
	return counters, time.Duration(len(counters)) * m.DumpEntry
}

// counted is up to when packets are in counters. The driver reads all counters over and over, each time for half of the
// delay; what it reads is that of the beginning, and is shown when it has been over all. So a new entry shows zero for
// one to two of these times.
func (m *Model) counted(at time.Duration) time.Duration {
	walk := m.CounterDelay / 2
	if walk == 0 {
		return at
	}
	return (at/walk - 1) * walk
}

// Holds tells whether packets of a megaflow are forwarded here.
func (m *Model) Holds(at time.Duration, h Handle) bool {
	e := m.find(h)
	return e != nil && e.since <= at
}

func (m *Model) find(h Handle) *offloaded {
	if int(h) >= len(m.place) || m.place[h] == 0 {
		return nil
	}
	return &m.entries[m.place[h]-1]
}

// Len is how many entries there are, the one in the channel included.
func (m *Model) Len() int { return len(m.entries) }

// Speed is what part of the line rate offloaded packets reach: flow groups are looked up one after the other (§4.2).
func (m *Model) Speed() float64 {
	groups := (len(m.entries) + m.GroupSize - 1) / m.GroupSize
	return min(1, float64(m.FreeGroups)/float64(max(groups, 1)))
}
