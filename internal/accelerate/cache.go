package accelerate

import (
	"net/netip"
	"time"
)

// Cache is what the daemon uses of package oncache.
type Cache interface {
	Join(device string) error
	Leave(device string) error
	Renew() error
	Pause() error
	Resume() error
	Evict(Selector) (int, error)
	Void() error
	Stats() (Stats, error)
	Close() error
}

// Selector says which entries to evict: all, or those that match one of the other fields.
type Selector struct {
	All         bool
	Inner, VTEP netip.Addr
	Device      uint32
}

// Stats are counters since the cache was opened, and numbers of entries.
type Stats struct {
	Out, In                     Direction
	Flows, Remote, VTEPs, Local int
	Evicted                     uint64
}

// Direction has counters of packets.
type Direction struct {
	Hits      uint64
	Misses    map[string]uint64
	Learnt    uint64
	NotLearnt map[string]uint64
}

// CacheConfig is what the cache needs to know of the overlay.
type CacheConfig struct {
	Uplink, Device string
	Address        netip.Addr
	VNI            uint32
	Port           uint16
	Bridged        bool
	MarkMask       uint32
	TTL            time.Duration
	Tracks         bool
}
