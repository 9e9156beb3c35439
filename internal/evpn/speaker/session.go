package speaker

import (
	"context"
	"fmt"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	ours "pilaster.io/pilaster/internal/bgp"
)

// session is the state of one peer.
type session struct {
	ours.Peer
	up       bool
	since    time.Time // when up changed; at first, when the speaker started
	reason   string    // why the session is down
	excess   string    // the exceeded limit; empty while the peer may be up
	restart  time.Time // with excess: when the peer is started again
	synced   bool      // it has sent all of its routes since the speaker started
	flaps    uint64    // how often a session ended
	excesses uint64
}

// onPeer follows the state of a session.
func (s *Speaker) onPeer(e *apiutil.WatchEventMessage_PeerEvent, at time.Time) {
	is, ok := ours.SessionOf(e)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.peers[is.Peer]
	if p == nil {
		return
	}
	switch {
	case is.Up && !p.up && p.excess == "":
		p.up, p.since, p.reason = true, at, ""
		s.table.PeerUp(p.Addr)
		s.config.Log.Info("BGP peer is up", "peer", p.Addr)
	case !is.Up && p.up:
		s.lose(p, is.Reason)
		s.config.Log.Warn("BGP peer is down; its routes remain for a time", "peer", p.Addr,
			"reason", p.reason, "stale", s.config.Stale)
	case is.Idle && is.Reason != "" && p.excess == "":
		p.reason = is.Reason // a connection that did not become a session
	}
}

// lose ends a session in the table. The caller has the lock.
func (s *Speaker) lose(p *session, reason string) {
	p.up, p.since, p.reason = false, time.Now(), reason
	p.flaps++
	s.table.PeerDown(p.Addr, p.since.Add(s.config.Stale))
	s.stream.Publish(s.table)
	s.expire()
}

// expire removes stale routes whose time has come, and sets the timer for the next ones. The caller has the lock.
func (s *Speaker) expire() {
	next := s.table.Expire(time.Now())
	s.stream.Publish(s.table)
	if next.IsZero() {
		return
	}
	if s.expiry != nil {
		s.expiry.Stop()
	}
	s.expiry = time.AfterFunc(max(time.Until(next), time.Millisecond), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.expire()
	})
}

// onRoutes records what a peer announces or withdraws.
func (s *Speaker) onRoutes(paths []*apiutil.Path, _ time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range paths {
		p := s.peers[path.PeerAddress]
		if p == nil || !p.up {
			continue // the rest of what a peer sent before it was shut down
		}
		if path.Withdrawal {
			s.table.Withdraw(p.Addr, fromNLRI(path.Nlri).Key)
			continue
		}
		route, size := fromPath(path, s.config.ASN)
		if err := s.table.Update(p.Addr, route, size); err != nil {
			continue
		}
		if s.exceeds(p) {
			s.shutDown(p, s.excessOf(p))
		}
	}
	s.stream.Publish(s.table)
}

func (s *Speaker) excessOf(p *session) string {
	c := s.table.Count(p.Addr)
	excess := fmt.Sprintf("more than %d bytes of attributes, in %d routes", s.config.Limits.Bytes, c.Routes)
	if c.Routes > s.config.Limits.Routes {
		excess = fmt.Sprintf("more than %d routes", s.config.Limits.Routes)
	}
	if loops := c.Loops(); loops > 0 {
		excess += fmt.Sprintf(", of which %d came from this AS", loops)
	}
	return excess
}

func (s *Speaker) onEndOfRIB(path *apiutil.Path, _ time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if path.Family == bgp.RF_EVPN {
		s.table.EndOfRIB(path.PeerAddress)
		if p := s.peers[path.PeerAddress]; p != nil && p.up {
			p.synced = true
		}
		s.stream.Publish(s.table)
	}
}

// shutDown ends the session of a peer above a limit, and starts the peer again later. The caller has the lock.
func (s *Speaker) shutDown(p *session, excess string) {
	p.excess, p.restart = excess, time.Now().Add(s.config.Limits.Restart)
	p.excesses++
	s.lose(p, excess)
	s.config.Log.Error("BGP peer announced too much and is shut down; its routes remain for a time",
		"peer", p.Addr, "excess", excess, "stale", s.config.Stale, "restart", s.config.Limits.Restart)
	if s.background.Err() == nil { // Close waits
		s.running.Go(func() { s.restart(p, excess) })
	}
}

// restart disables a peer, waits, and enables it.
func (s *Speaker) restart(p *session, excess string) {
	addr := p.Addr.String()
	s.set(p, api.PeerState_ADMIN_STATE_DOWN, func(ctx context.Context) error {
		return s.bgp.DisablePeer(ctx, &api.DisablePeerRequest{Address: addr, Communication: excess})
	})
	if !s.sleep(time.Until(p.restart)) {
		return
	}
	s.mu.Lock()
	p.excess = ""
	p.reason = "starting again after " + excess
	s.mu.Unlock()
	s.set(p, api.PeerState_ADMIN_STATE_UP, func(ctx context.Context) error {
		return s.bgp.EnablePeer(ctx, &api.EnablePeerRequest{Address: addr})
	})
}

// set repeats a call until the peer has an administrative state: GoBGP ignores a request while it handles another.
func (s *Speaker) set(p *session, state api.PeerState_AdminState, call func(context.Context) error) {
	for s.adminState(p) != state {
		if err := call(s.background); err != nil {
			s.config.Log.Warn("changing the state of a BGP peer failed; retrying", "peer", p.Addr, "error", err)
		}
		if !s.sleep(stateInterval) {
			return
		}
	}
}

const (
	stateInterval  = 100 * time.Millisecond
	hiddenInterval = 2 * time.Second
)

// sleep reports whether the speaker still runs.
func (s *Speaker) sleep(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-s.background.Done():
		return false
	}
}

func (s *Speaker) adminState(p *session) (state api.PeerState_AdminState) {
	s.list(p, func(peer *api.Peer) { state = peer.GetState().GetAdminState() })
	return state
}

func (s *Speaker) list(p *session, read func(*api.Peer)) {
	err := s.bgp.ListPeer(s.background, &api.ListPeerRequest{Address: p.Addr.String()}, read)
	if err != nil && s.background.Err() == nil {
		s.config.Log.Warn("reading the state of a BGP peer failed", "peer", p.Addr, "error", err)
	}
}

// countHidden applies the limits to routes that GoBGP keeps but does not report: those that came from this speaker.
func (s *Speaker) countHidden() {
	for s.sleep(hiddenInterval) {
		s.mu.Lock()
		peers := s.sortedPeers()
		s.mu.Unlock()
		for _, p := range peers {
			hidden := 0
			s.list(p, func(peer *api.Peer) {
				for _, family := range peer.GetAfiSafis() {
					hidden += int(family.GetState().GetReceived() - family.GetState().GetAccepted())
				}
			})
			s.mu.Lock()
			if s.table.Hide(p.Addr, hidden); p.up && s.exceeds(p) {
				s.shutDown(p, s.excessOf(p))
			}
			s.mu.Unlock()
		}
	}
}

// exceeds reports whether a peer is above a limit. The caller has the lock.
func (s *Speaker) exceeds(p *session) bool {
	return s.table.Exceeds(p.Addr, s.config.Limits.Routes, s.config.Limits.Bytes)
}
