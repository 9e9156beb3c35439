package accelerate

import (
	"maps"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/oncache"
)

// Status is what `accelerate status` shows.
type Status struct {
	Uplink     string           `json:"uplink"`
	Overlay    OverlayStatus    `json:"overlay"`
	Containers ContainersStatus `json:"containers"`
	InUse      bool             `json:"inUse"`  // packets use the cache, and it learns
	Paused     bool             `json:"paused"` // by an operator: it learns nothing
	Problems   []string         `json:"problems"`
	Lease      LeaseStatus      `json:"lease"`
	Entries    EntriesStatus    `json:"entries"`
	Egress     DirectionStatus  `json:"egress"`
	Ingress    DirectionStatus  `json:"ingress"`
	// Validity is the time in seconds after which changes without an event take effect.
	Validity  float64           `json:"validitySeconds"`
	Tracks    bool              `json:"conntrack"` // the namespace tracks connections
	Settings  []Setting         `json:"settings"`  // that the daemon changed
	Evictions map[string]uint64 `json:"evictions"` // changes that evicted, by cause
	Evicted   uint64            `json:"evicted"`   // entries
}

// OverlayStatus is what the daemon found of the overlay's device.
type OverlayStatus struct {
	Device   string   `json:"device"`
	VNI      uint32   `json:"vni"`
	Port     uint16   `json:"port"`
	Local    string   `json:"local"`
	Learning bool     `json:"learning"`
	VTEPs    []string `json:"vteps"` // other nodes
}

// ContainersStatus lists the devices of containers.
type ContainersStatus struct {
	Which    string            `json:"which"`
	Devices  []string          `json:"devices"`  // that use the cache
	Excluded map[string]string `json:"excluded"` // the others, and why
}

// LeaseStatus says how long the programs may still use the cache without the daemon.
type LeaseStatus struct {
	Age     float64 `json:"ageSeconds"`     // since the daemon renewed it
	Expires float64 `json:"expiresSeconds"` // after that time without the daemon
}

// EntriesStatus has the numbers of entries.
type EntriesStatus struct {
	Flows  int `json:"flows"`
	Remote int `json:"remote"` // containers of other nodes
	VTEPs  int `json:"vteps"`  // other nodes
	Local  int `json:"local"`  // containers here
}

// DirectionStatus has packets since the cache was opened.
type DirectionStatus struct {
	Hits      uint64            `json:"hits"`
	Misses    map[string]uint64 `json:"misses"`  // by cause
	Rate      float64           `json:"hitRate"` // 0 to 1; 0 without packets
	Learnt    uint64            `json:"learnt"`
	NotLearnt map[string]uint64 `json:"notLearnt"` // by cause
}

// Missed returns the sum of the misses.
func (s DirectionStatus) Missed() (sum uint64) {
	for _, n := range s.Misses {
		sum += n
	}
	return sum
}

func viewDirection(d oncache.Direction) DirectionStatus {
	s := DirectionStatus{Hits: d.Hits, Misses: d.Misses, Learnt: d.Learnt, NotLearnt: d.NotLearnt}
	if all := s.Hits + s.Missed(); all > 0 {
		s.Rate = float64(s.Hits) / float64(all)
	}
	return s
}

// status runs in the loop.
func (d *daemon) status() (s Status, err error) {
	s = Status{
		Uplink: d.Uplink,
		Overlay: OverlayStatus{
			Device: d.Overlay, VNI: d.device.VNI, Port: d.device.Port, Local: d.device.Local.String(),
			Learning: d.device.Learning, VTEPs: []string{},
		},
		Containers: ContainersStatus{
			Which: d.Containers.String(), Devices: []string{}, Excluded: maps.Clone(d.excluded),
		},
		InUse: d.cache != nil && !d.inactive, Paused: d.paused, Problems: append([]string{}, d.allProblems()...),
		Lease:    LeaseStatus{Age: time.Since(d.renewed).Seconds(), Expires: (3 * lease).Seconds()},
		Validity: d.ttl.Seconds(), Tracks: d.tracks, Evictions: maps.Clone(d.evicted),
	}
	for _, c := range d.containers {
		if c.attached {
			s.Containers.Devices = append(s.Containers.Devices, c.name)
		}
	}
	slices.Sort(s.Containers.Devices)
	if d.table != nil {
		for _, a := range d.table.VTEPs() {
			s.Overlay.VTEPs = append(s.Overlay.VTEPs, a.String())
		}
	}
	r, err := readRecord(recordOf(d.Socket))
	if err != nil {
		return s, err
	}
	s.Settings = append([]Setting{}, r.Settings...)
	if d.cache == nil {
		return s, nil
	}
	now, err := d.cache.Stats()
	s.Entries = EntriesStatus{Flows: now.Flows, Remote: now.Remote, VTEPs: now.VTEPs, Local: now.Local}
	s.Egress, s.Ingress = viewDirection(now.Out), viewDirection(now.In)
	s.Evicted = now.Evicted
	return s, err
}
