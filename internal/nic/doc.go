// Package nic models how NIMITZ offloads its switch's entries to a NIC (NIMITZ §3.3, §4.2; fig 6, 7, 8 and 12; NM4,
// NM5, NM9). It is a model and no measurement: no NIC, no driver and no packet is involved, and its figures say what
// follows from its assumptions, which Parameters lists with where each comes from.
//
//	Model    a NIC behind the interface that a real one would have: room, a channel for insertions, late counters, slow removal
//	Table    the switch's software table, whose matched entries are grouped into a megaflow for each destination prefix
//	Switch   the offloading side of Open vSwitch: first packets, the queue before the channel, ageing, revalidation, pinned entries
//	Traffic  who sends when, by a seed
//	Run      all of it over time
//
// It is pure: no I/O, no clock and no goroutine, and an ended context ends a run. Times are since a run's beginning,
// and the same seed gives the same figures.
package nic
