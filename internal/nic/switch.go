package nic

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Policy is when a switch removes entries.
type Policy struct {
	Period    time.Duration // from one revalidation to the next, unless one takes longer; 0: there is none, nothing is removed
	Threshold time.Duration // a revalidation that takes longer means that too many are offloaded
	Idle      time.Duration // an entry goes when its counter has not moved for so long
	Pressed   time.Duration // the same while too many are offloaded; then one whose counter is zero goes at once
}

// ProductionPolicy is Open vSwitch's, with the threshold of a server that has not met §4.2 yet.
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

// flow is what the switch knows of a megaflow.
type flow struct {
	where   place
	pinned  bool
	packets uint64        // of the last dump
	used    time.Duration // when the counter was last seen to move, or when it was installed
}

// Switch is the offloading side of Open vSwitch on a node.
type Switch struct {
	Policy
	Removed  int // so far
	Mistaken int // of them, those that had packets just then
	table    *Table
	nic      NIC
	busy     func(at time.Duration, h Handle) bool
	flows    []flow
	queue    []Handle
	channel  time.Duration // is free again

	round   round
	pressed bool
}

// round is a revalidation.
type round struct {
	begin    time.Duration
	next     time.Duration // when something is to be done for it
	counters []Counter     // dumped and not yet looked at
	victims  []Handle
	dumped   bool
}

// NewSwitch has nothing offloaded. busy tells whether packets of a megaflow come just then: of one that is taken out,
// the next goes to software at once.
func NewSwitch(t *Table, n NIC, p Policy, busy func(time.Duration, Handle) bool) *Switch {
	return &Switch{Policy: p, table: t, nic: n, busy: busy, flows: make([]flow, len(t.flows))}
}

// Miss is a packet that the NIC does not know: the switch forwards it in software, and its megaflow is queued for the
// channel (fig 6, 3 and 4).
func (s *Switch) Miss(h Handle) {
	if f := &s.flows[h]; f.where == inSoftware {
		f.where = queued
		s.queue = append(s.queue, h)
	}
}

// Pin installs entries and keeps them: preheating (§3.3), or static offload where it is all of them.
func (s *Switch) Pin(handles []Handle) {
	for _, h := range handles {
		s.flows[h].pinned = true
		s.Miss(h)
	}
}

// Backlog is how many megaflows wait for the channel.
func (s *Switch) Backlog() int { return len(s.queue) }

// Next is when the switch has something to do; false: not before there is a packet.
func (s *Switch) Next(now time.Duration) (at time.Duration, any bool) {
	if len(s.queue) > 0 {
		at, any = max(now, s.channel), true
	}
	if s.Period > 0 && (!any || s.round.next < at) {
		at, any = s.round.next, true
	}
	return at, any
}

// Do does what is due.
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
		s.queue = append(s.queue, h) // tried again in its turn
	case err != nil:
		return fmt.Errorf("install: %w", err)
	default:
		f.where, f.packets, f.used = inNIC, 0, s.channel
	}
	return nil
}

// revalidate does a round's next step: the dump, the decisions once that has been read, and one removal after the
// other.
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
	// How long it took is all that the switch has to tell by: a NIC shows no other sign of being too full (§4.2).
	s.pressed = at-r.begin > s.Threshold
	*r = round{next: max(at, r.begin+s.Period)}
	return nil
}

// idle picks what a round removes.
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
