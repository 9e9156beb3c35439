package nic

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Policy describes when a switch removes entries.
type Policy struct {
	Period    time.Duration // interval of revalidations, unless one takes longer; 0: no revalidation, and no removal
	Threshold time.Duration // if a revalidation takes longer, the switch assumes that too many entries are offloaded
	Idle      time.Duration // an entry whose counter has not changed for so long is removed
	Pressed   time.Duration // Idle while too many are offloaded; then entries whose counter is zero are removed at once
}

// ProductionPolicy is Open vSwitch's policy, with the threshold of a server without the changes of §4.2.
func ProductionPolicy() Policy {
	return Policy{
		Period:    500 * time.Millisecond,
		Threshold: 500 * time.Millisecond,
		Idle:      10 * time.Second,
		Pressed:   2 * time.Second,
	}
}

type place uint8

const (
	inSoftware place = iota
	queued
	inNIC
)

// flow is the switch's state of a megaflow.
type flow struct {
	where   place
	pinned  bool
	packets uint64        // of the last dump
	used    time.Duration // time of the counter's last change, or of the installation
}

// Switch is the offloading side of Open vSwitch on a node.
type Switch struct {
	Policy
	Removed  int // so far
	Mistaken int // removed entries that had packets at that time
	table    *Table
	nic      NIC
	busy     func(at time.Duration, h Handle) bool
	flows    []flow
	queue    []Handle
	channel  time.Duration // time at which the channel is free

	round   round
	pressed bool
}

// round is one revalidation.
type round struct {
	begin    time.Duration
	next     time.Duration // time of its next step
	counters []Counter     // dumped and not yet checked
	victims  []Handle
	dumped   bool
}

// NewSwitch returns a switch without offloaded entries. busy reports whether packets of a megaflow arrive at a time. If
// a megaflow is busy when its entry is removed, its next packet is a miss at once.
func NewSwitch(t *Table, n NIC, p Policy, busy func(time.Duration, Handle) bool) *Switch {
	return &Switch{Policy: p, table: t, nic: n, busy: busy, flows: make([]flow, len(t.flows))}
}

// Miss handles a packet without an entry in the NIC: the switch forwards it in software, and queues its megaflow for
// the channel (fig 6, steps 3 and 4).
func (s *Switch) Miss(h Handle) {
	if f := &s.flows[h]; f.where == inSoftware {
		f.where = queued
		s.queue = append(s.queue, h)
	}
}

// Pin installs entries permanently, for preheating (§3.3), or for static offload if handles are all entries.
func (s *Switch) Pin(handles []Handle) {
	for _, h := range handles {
		s.flows[h].pinned = true
		s.Miss(h)
	}
}

// Backlog returns the number of megaflows that wait for the channel.
func (s *Switch) Backlog() int { return len(s.queue) }

// Next returns the time of the switch's next action. any is false if the switch has nothing to do until the next
// packet.
func (s *Switch) Next(now time.Duration) (at time.Duration, any bool) {
	if len(s.queue) > 0 {
		at, any = max(now, s.channel), true
	}
	if s.Period > 0 && (!any || s.round.next < at) {
		at, any = s.round.next, true
	}
	return at, any
}

// Do executes the actions that are due.
func (s *Switch) Do(at time.Duration) error {
	if len(s.queue) > 0 && s.channel <= at {
		if err := s.install(at); err != nil {
			return err
		}
	}
	if s.Period > 0 && s.round.next <= at {
		return s.revalidate(at)
	}
	return nil
}

func (s *Switch) install(at time.Duration) error {
	h := s.queue[0]
	s.queue = s.queue[1:]
	took, err := s.nic.Install(at, h, s.table.flows[h])
	s.channel = at + took
	switch f := &s.flows[h]; {
	case errors.Is(err, ErrFull):
		s.queue = append(s.queue, h) // retried later
	case err != nil:
		return fmt.Errorf("install: %w", err)
	default:
		f.where, f.packets, f.used = inNIC, 0, s.channel
	}
	return nil
}

// revalidate executes a round's next step: the dump, then the decisions, then the removals one by one.
func (s *Switch) revalidate(at time.Duration) error {
	r := &s.round
	var took time.Duration
	switch {
	case !r.dumped:
		r.dumped, r.begin = true, at
		r.counters, took = s.nic.Dump(at)
		r.next = at + took
		return nil
	case r.counters != nil:
		r.victims = s.idle(at)
		r.counters = nil
	}
	if len(r.victims) > 0 {
		h := r.victims[0]
		r.victims = r.victims[1:]
		took, err := s.nic.Remove(at, h)
		if err != nil {
			return fmt.Errorf("revalidate: %w", err)
		}
		s.Removed++
		s.flows[h].where = inSoftware
		if s.busy(at, h) {
			s.Mistaken++
			s.Miss(h)
		}
		r.next = at + took
		return nil
	}
	// Only the duration of a revalidation shows the switch that the NIC has too many entries (§4.2).
	s.pressed = at-r.begin > s.Threshold
	*r = round{next: max(at, r.begin+s.Period)}
	return nil
}

// idle returns the entries that a round removes.
func (s *Switch) idle(at time.Duration) (victims []Handle) {
	limit := s.Idle
	if s.pressed {
		limit = s.Pressed
	}
	for _, c := range s.round.counters {
		f := &s.flows[c.Handle]
		if c.Packets != f.packets {
			f.packets, f.used = c.Packets, s.round.begin
		}
		if !f.pinned && (at-f.used > limit || s.pressed && f.packets == 0) {
			victims = append(victims, c.Handle)
		}
	}
	return slices.Clip(victims)
}
