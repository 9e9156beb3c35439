// Package nic models how NIMITZ offloads its switch's entries to a NIC (NIMITZ §3.3, §4.2; fig 6, 7, 8 and 12; NM4,
// NM5, NM9). It is a model, not a measurement: no NIC, no driver and no packet is involved. Its figures follow from its
// assumptions, which Parameters lists with their origins.
//
//	Model    a NIC behind an interface for real ones: capacity, insertion channel, late counters, slow removal
//	Table    the switch's software table, whose matched entries are grouped into a megaflow per destination prefix
//	Switch   Open vSwitch's offloading: first packets, the queue of the channel, ageing, revalidation, pinned entries
//	Traffic  the node's flows over time, by a seed
//	Run      a simulation of all of them
//
// The package uses no I/O, no clock and no goroutine; a cancelled context ends a run. Times count from a run's
// beginning. Equal seeds give equal figures.
package nic
