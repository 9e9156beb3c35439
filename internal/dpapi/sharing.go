package dpapi

import (
	"io"
	"net/netip"
	"time"
)

// Sharing is a driver of a node that can take part in offloads.
type Sharing interface {
	// Probe sends a probe to the program of an offload's frontend, from this node, its backend.
	Probe(p Probe, frontend netip.Prefix) error
	// ProbeAnswered returns how long ago a frontend's program has last answered a probe; false if it never has.
	ProbeAnswered(offload uint32, frontend netip.Prefix) (ago time.Duration, ok bool, err error)
	// Messages counts the messages that this node has sent, by offload, by kind.
	Messages() (map[uint32]Messages, error)

	// MeasureWork makes the kernel count the run time of programs until it is closed, which costs each run some 20 ns.
	MeasureWork() (io.Closer, error)
	// Work returns what the programs of this process have done while the kernel counted.
	Work() (Work, error)
	// DevicePackets returns how many packets each device of this node has received, by number: of a container's device,
	// those that the container sent.
	DevicePackets() (map[int]uint64, error)
	// TenantSessions returns the number of sessions by the tenant's id or VNI; those that expired in the last 10 s may
	// count.
	TenantSessions() (used map[uint32]int, capacity int, err error)
}

// Probe identifies the offload of a probe.
type Probe struct{ Offload, VNI, Epoch uint32 }

// Messages counts messages of an offload by kind: enum offload_kind of the programs.
type Messages [8]uint64

// Kinds of messages.
const (
	MessagePre      = 1 // from a frontend: a packet with what its rules say
	MessagePass     = 2 // from a frontend: a packet that needs no rules
	MessageQuestion = 3 // from a backend
	MessageAnswer   = 4 // from a frontend
	MessageAlive    = 6 // from a frontend: the answer to a probe
)

// Work is what programs have done.
type Work struct {
	Total time.Duration // of all programs
	// programs that packets of an offload pass at a frontend
	FromFabric, FromTunnel, ToFabric Runs
}

// Runs is how often a program ran, with programs that it called, and for how long in all.
type Runs struct {
	Count uint64
	Time  time.Duration
}
