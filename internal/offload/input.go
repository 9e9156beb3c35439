package offload

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// Key names an offload: a tenant's containers on a node.
type Key struct{ Tenant, Node string }

// Record is an offload as the store has it.
type Record struct {
	Tenant string
	tenant.Offload
	Want      int       // active frontends that it should have: 1, 2, 4 or 8; 0 means as many as it has
	Automatic bool      // the controller started it and may end it
	Changed   time.Time // when this orchestrator first saw the record's Since: clocks of others may differ
}

// Key returns the record's key.
func (r *Record) Key() Key { return Key{r.Tenant, r.Node} }

func (r *Record) want() int {
	if r.Want > 0 {
		return min(r.Want, tenant.MaxActive)
	}
	if n := len(r.Active()); n > 0 {
		return n
	}
	return powerOfTwo(min(len(r.Frontends), tenant.MaxActive))
}

// Table is the occupancy of a node's table.
type Table struct{ Used, Capacity int }

func (t Table) free() int { return max(0, t.Capacity-t.Used) }

func (t Table) load() float64 {
	if t.Capacity == 0 {
		return 0
	}
	return float64(t.Used) / float64(t.Capacity)
}

// Node is what a node reports, and what the orchestrator knows of it.
type Node struct {
	Name      string
	Prefix    netip.Prefix
	Rack      string // empty: unknown
	Connected bool
	Offloads  bool              // it can take part in offloads
	Unfit     string            // why it cannot become a frontend; empty if it can
	NoReserve bool              // it leaves containers an MTU too large for those of offloaded tenants
	Measured  bool              // its packet load is known: of Own, Fronting and Hosted.Load
	Budget    float64           // its CPUs for packets; 0 counts as 1
	Own       float64           // packet load of its own containers, as a part of the budget
	Fronting  map[Key]float64   // packet load as a frontend, by offload
	Rules     Table             // entries of the rule table
	Sessions  Table             // entries of the session table
	Tenants   map[string]Hosted // with containers there, or fronted there
}

func (n *Node) budget() float64 {
	if n.Budget <= 0 {
		return 1
	}
	return n.Budget
}

func (n *Node) load() float64 {
	total := n.Own
	for _, l := range n.Fronting {
		total += l
	}
	return total
}

// Hosted is a tenant on a node.
type Hosted struct {
	Containers int
	Applied    uint64        // the tenant's changes that the node has acknowledged
	Unenforced string        // why the node does not enforce the tenant's policies; empty if it does
	Lag        time.Duration // age of the oldest change of the tenant's policies that the node has not acknowledged
	Lost       []string      // of a backend: frontends that do not answer its probes
	Answering  []string      // of a backend: frontends that have answered since they were last lost

	Load    float64 // part of Node.Own that the tenant's containers cause
	Rules   int     // entries that its policies need on a node
	Gain    float64 // Estimate.Gain(DefaultFrontends); 0 if unknown
	Moved   float64 // Estimate.Moved; 0 counts as 1
	Refusal string  // why the store refused an offload here just now; empty if it did not
}

// Input is the cluster at one time.
type Input struct {
	Auto    bool // `pilaster offload auto on`
	Nodes   []Node
	Records []Record
}

// Kind is the kind of a change.
type Kind string

// Kinds of changes.
const (
	Start    Kind = "start"    // a new record in phase preparing
	Advance  Kind = "advance"  // to the next phase
	Add      Kind = "add"      // frontends, draining: they load the rules and get no packets yet
	Activate Kind = "activate" // frontends that have loaded them, and drain those that they replace
	Drain    Kind = "drain"    // frontends: packets from them are accepted, none are sent to them
	Remove   Kind = "remove"   // frontends that have drained
	Stop     Kind = "stop"     // begin the way back
	End      Kind = "end"      // delete the record
)

// Kinds are all kinds of changes.
var Kinds = []Kind{Start, Advance, Add, Activate, Drain, Remove, Stop, End}

// Change is a change of a record. It applies only while the record's Since is the same (for Start: while there is no
// record), so that two orchestrators that decide at once do no harm.
type Change struct {
	Key
	Kind      Kind
	Since     uint64
	Phase     tenant.OffloadPhase // afterwards; empty for End
	Frontends []tenant.Frontend   // afterwards
	Want      int                 // afterwards
	Urgent    bool                // packets are lost until then
	Reason    string
}

// Problem is something that an operator should know. Tenant is empty for a node, both are empty for the cluster.
type Problem struct {
	Key
	Text string
}

// Result is what a step decided.
type Result struct {
	Changes  []Change
	Problems []Problem
	InDoubt  bool          // see observe: none is removed
	Next     time.Duration // the next step is due then, or when a report arrives
}
