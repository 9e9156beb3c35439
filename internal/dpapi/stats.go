package dpapi

import (
	"net/netip"

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

// SessionMover is a driver whose sessions of an endpoint can be copied to another node.
type SessionMover interface {
	// EndpointSessions returns the sessions of an endpoint.
	EndpointSessions(id endpoint.ID) ([]Session, error)
	// KeepSessions adds sessions to an endpoint, except those that it has already. Their timeouts begin anew. It
	// returns how many there was no room for.
	KeepSessions(id endpoint.ID, all []Session) (left int, err error)
}

// Session is one connection of an endpoint under policies, as the packet path has it.
type Session struct {
	Local, Remote netip.AddrPort // as the session table has them; of a fragment, the identification is in the ports
	Tenant        uint32         // id or VNI
	Protocol      uint8
	Direction     uint8 // of a fragment; else 0
	State         SessionState
}

// SessionState is struct session_state of bpf/policy/ct.h.
type SessionState struct {
	Version, First, Seen, Protocol uint8
	NAT                            uint32
}
