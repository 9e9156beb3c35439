package steering

import (
	"fmt"
	"math/bits"
	"slices"
)

// Modes of steering.
const (
	Off  = "off"  // the CPU that receives a packet processes it
	RPS  = "rps"  // the hash of a packet's flow selects one of the CPUs
	RFS  = "rfs"  // the CPU on which the flow's reader runs; RPS for flows without a reader
	Auto = "auto" // one of these for each device, by scaling.rst
)

// Modes returns all modes, for flags.
func Modes() []string { return []string{Off, RPS, RFS, Auto} }

// Levels at which a received packet is processed.
const (
	Host      = "host"      // the uplink
	Overlay   = "overlay"   // VXLAN devices, after decapsulation
	Container = "container" // eth0 in a container's network namespace
)

// Levels returns all levels in the order in which a packet passes them.
func Levels() []string { return []string{Host, Overlay, Container} }

// DefaultFlows is the number of active connections for which scaling.rst suggests a table size.
const DefaultFlows = 32768

// MaxFlows bounds the size of the table, which has 4 bytes an entry.
const MaxFlows = 1 << 24

// facts are properties of a device, from which auto decides.
type facts struct {
	queues   int   // receive queues
	hardware bool  // its queues interrupt CPUs: it is no software device such as veth or VXLAN
	near     []int // CPUs of its memory domain; none if it has no domain
}

// plan is the steering of one device.
type plan struct {
	mode      string // off, rps or rfs
	cpus      []int
	flowCount int    // rps_flow_cnt of each queue; 0 for none
	reason    string // of auto
}

// planFor applies scaling.rst to one device. entries is the size of the machine's table of flows; 0 means that RFS is
// not possible.
func planFor(mode string, f facts, cpus []int, entries int) plan {
	var reason string
	if mode == Auto {
		mode, cpus, reason = choose(f, cpus, entries)
	}
	switch mode {
	case RPS:
		return plan{mode: RPS, cpus: cpus, reason: reason}
	case RFS:
		return plan{mode: RFS, cpus: cpus, flowCount: flowCount(entries, f.queues), reason: reason}
	}
	return plan{mode: Off, reason: reason}
}

// choose selects the mode and the CPUs of a device.
func choose(f facts, cpus []int, entries int) (mode string, of []int, reason string) {
	if len(cpus) == 1 {
		return Off, nil, "there is one CPU"
	}
	if f.hardware && f.queues >= len(cpus) {
		return Off, nil, fmt.Sprintf("%d hardware queues cover %d CPUs", f.queues, len(cpus))
	}
	reason = "software device"
	if f.hardware {
		reason = fmt.Sprintf("fewer hardware queues than CPUs: %d, %d", f.queues, len(cpus))
		near := slices.DeleteFunc(slices.Clone(cpus), func(cpu int) bool { return !slices.Contains(f.near, cpu) })
		if len(near) > 0 && len(near) < len(cpus) {
			cpus, reason = near, reason+"; CPUs of the device's memory domain"
		}
	}
	if entries == 0 {
		return RPS, cpus, reason + "; no RFS: only the first network namespace has its table (--host-flow-entries)"
	}
	return RFS, cpus, reason
}

// tableSize returns the number of entries for a number of flows: the kernel rounds up to a power of two.
func tableSize(flows int) int { return 1 << bits.Len(uint(flows-1)) }

// flowCount returns a queue's share of the table, as the kernel rounds it.
func flowCount(entries, queues int) int { return tableSize(max(1, entries/max(1, queues))) }
