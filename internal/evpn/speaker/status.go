package speaker

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
)

// Status is what an operator sees.
type Status struct {
	ASN          uint32                  `json:"asn"`
	RouterID     netip.Addr              `json:"routerId"`
	Announced    map[evpn.Kind]int       `json:"announced"`
	Peers        []PeerStatus            `json:"peers"`
	Records      map[evpn.RecordKind]int `json:"records"`
	Contested    []evpn.RecordKey        `json:"contested,omitempty"`   // of containers that others announce too
	Unreplicated int                     `json:"unreplicated,omitzero"` // VTEPs above evpn.MaxMembers
}

// PeerStatus is the state of one peer.
type PeerStatus struct {
	bgp.Peer
	evpn.PeerCount
	Since    time.Time `json:"since"`            // when Up changed
	Reason   string    `json:"reason,omitempty"` // why the peer is down
	Restart  time.Time `json:"restart,omitzero"` // when a peer that announced too much is started again
	Flaps    uint64    `json:"flaps"`            // sessions that ended
	Excesses uint64    `json:"excesses"`         // of them because of a limit
}

// Status returns the current state.
func (s *Speaker) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := Status{
		ASN: s.config.ASN, RouterID: s.config.RouterID,
		Announced: map[evpn.Kind]int{},
		Records:   s.table.CountRecords(), Contested: s.table.Contested(), Unreplicated: s.table.Unreplicated(),
	}
	for key := range s.announced {
		status.Announced[key.Kind]++
	}
	for _, p := range s.sortedPeers() {
		peer := PeerStatus{
			Peer: p.Peer, PeerCount: s.table.Count(p.Addr),
			Since: p.since, Reason: p.reason, Flaps: p.flaps, Excesses: p.excesses,
		}
		if p.excess != "" {
			peer.Restart = p.restart
		}
		status.Peers = append(status.Peers, peer)
	}
	return status
}
