package dpapi

import (
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// Stats reads counters and table sizes from the kernel.
type Stats interface {
	// Status returns what the kernel holds and counts now.
	Status() (Status, error)
	// RuleHits returns how many packets each rule has denied, or would have denied if its policy were not in audit
	// mode. The keys are the rule numbers in the tables.
	RuleHits() (map[uint32]uint64, error)
	// PolicyEntries returns how full the tables are that SetPolicies fills.
	PolicyEntries() []Entries
	// Sessions returns how full the session table is. It takes some milliseconds for 100,000 sessions.
	Sessions() (Sessions, error)
}

// Status of the packet path, read from the kernel.
type Status struct {
	DeviceKind   string
	DeviceWhy    string // why that kind, where the agent chose it
	Programs     string // version tag of the loaded programs
	Healthy      bool   // packets flow; if not, the first of Problems says why
	FirstInChain bool
	Guarded      []string          // interfaces beside the uplink where packets are checked
	Problems     []string          // each with what to do
	Drops        []Drops           // every reason, also those at 0
	Without      []string          // what networks lack here, a line each; set by the agent
	Switches     map[string]string // by network, of those that have more than one; set by the agent
}

// Entries is how full one table is.
type Entries = network.Entries

// Sessions describes the table that holds the connections of containers under policies.
type Sessions struct {
	Capacity int
	Used     int // not expired
	HalfOpen int // of Used: not established, or ended; evicted first

	// Since the table was made. Evicted: half-open ones, to make room. Refused: no room.
	Begun, Evicted, Refused uint64

	Largest endpoint.ID // the endpoint that has most sessions; 0: none has any
	Most    int         // sessions of Largest

	LargestTenant uint32 // id or VNI of the tenant that has most sessions; 0: none has any
	MostOfTenant  int    // sessions of LargestTenant
}

// Drops counts the packets dropped for one reason since the maps were made.
type Drops struct {
	Reason  string
	Packets uint64
}
