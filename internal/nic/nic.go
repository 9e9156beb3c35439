package nic

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Megaflow is the match of a NIC's entry. It matches all packets for which the switch makes the same forwarding
// decision (§3.3). With node CIDRs, these are all packets to one node.
type Megaflow struct {
	VNI pipeline.VNI
	To  netip.Prefix
}

// Handle identifies a megaflow between switch and NIC, like tc's handles.
type Handle uint32

// Counter is the packet counter of one entry, from a dump.
type Counter struct {
	Handle  Handle
	Packets uint64 // since the installation, up to the driver's last read
}

// NIC is the interface of a switch to a NIC. Every call returns the time that the driver takes, and the caller lets
// this time pass. With a real NIC, it would be the duration of the call.
type NIC interface {
	Install(at time.Duration, h Handle, m Megaflow) (took time.Duration, err error)
	Remove(at time.Duration, h Handle) (took time.Duration, err error)
	Dump(at time.Duration) (counters []Counter, took time.Duration)
}

// ErrFull means that the NIC is full. The megaflow stays in software, and nothing else changes.
var ErrFull = errors.New("the NIC has no room for another entry")

// Spec describes a NIC and its driver. Parameters lists the origins of Production's values.
type Spec struct {
	Capacity     int           // entries that fit in its memory
	InsertRate   float64       // entries per second
	DumpEntry    time.Duration // time of a dump per entry
	RemoveEntry  time.Duration // time of a removal if nothing else is offloaded
	RemoveSlope  float64       // relative increase of that time per 1,000 entries
	CounterDelay time.Duration // maximum time until a packet is counted in a dump
	GroupSize    int           // entries of a flow group; one lookup covers a group
	FreeGroups   int           // groups that can be looked up at line rate
	Line         float64       // Gbit/s of offloaded traffic
	Software     float64       // Gbit/s of all other traffic together
}

// Production returns the NIC of the figures.
func Production() Spec {
	return Spec{
		Capacity: 65_536, InsertRate: 638, DumpEntry: 50 * time.Microsecond, RemoveEntry: 90 * time.Microsecond,
		RemoveSlope:  1.286,
		CounterDelay: 2 * time.Second, GroupSize: 1024, FreeGroups: 32, Line: 400, Software: 48.8,
	}
}

// Model is a simulated NIC.
type Model struct {
	Spec
	sent    func(h Handle, from, to time.Duration) uint64 // packets of a megaflow
	entries []offloaded
	place   []int // index of a handle in entries, plus 1
}

type offloaded struct {
	handle Handle
	since  time.Duration
}

var _ NIC = (*Model)(nil)

// NewModel returns a NIC without entries. sent returns the packets of a megaflow between two times.
func NewModel(s Spec, sent func(h Handle, from, to time.Duration) uint64) *Model {
	return &Model{Spec: s, sent: sent}
}

// Install adds an entry, which forwards as soon as the channel has processed it.
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

// Remove removes an entry immediately. Afterwards the driver is busy with its own lists, for a time that grows with the
// number of entries (§4.1, §4.2).
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

// Dump lists the entries that forward. Their counters are as late as the driver's counters.
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

// counted returns the time up to which the counters include packets. The driver repeatedly reads all counters. Each
// pass takes half of CounterDelay: it reads the values at its beginning and publishes them at its end. So the counter
// of a new entry is zero for one to two passes.
func (m *Model) counted(at time.Duration) time.Duration {
	walk := m.CounterDelay / 2
	if walk == 0 {
		return at
	}
	return (at/walk - 1) * walk
}

// Holds reports whether the NIC forwards packets of a megaflow.
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

// Len returns the number of entries, including the one in the channel.
func (m *Model) Len() int { return len(m.entries) }

// Speed returns the share of the line rate that offloaded packets reach. Many entries reduce it, because the NIC looks
// up flow groups one by one (§4.2).
func (m *Model) Speed() float64 {
	groups := (len(m.entries) + m.GroupSize - 1) / m.GroupSize
	return min(1, float64(m.FreeGroups)/float64(max(groups, 1)))
}
