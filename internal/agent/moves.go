package agent

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// Limits of sessions that wait for an ADD.
const (
	maxStages  = 64
	maxStaged  = 1 << 16 // of one container
	stagedTime = time.Minute
)

// sessionStage has the sessions of containers that move to this node, until their ADD. The zero value is ready.
type sessionStage struct {
	mu  sync.Mutex
	all map[string]stagedSessions // by EndpointKey
}

type stagedSessions struct {
	sessions []dpapi.Session
	since    time.Time
}

func (s *sessionStage) put(key string, all []dpapi.Session, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.all, func(_ string, o stagedSessions) bool { return now.Sub(o.since) > stagedTime })
	if _, replaces := s.all[key]; !replaces && len(s.all) >= maxStages {
		return refusal.New(refusal.ErrExhausted, "sessions of %d containers wait for their ADD; nothing was changed: "+
			"try again in a minute", maxStages)
	}
	if s.all == nil {
		s.all = map[string]stagedSessions{}
	}
	s.all[key] = stagedSessions{all, now}
	return nil
}

func (s *sessionStage) take(key string, now time.Time) []dpapi.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.all[key]
	delete(s.all, key)
	if now.Sub(is.since) > stagedTime {
		return nil
	}
	return is.sessions
}

// ExportSessions returns the sessions of an endpoint.
func (c *Core) ExportSessions(key string) ([]dpapi.Session, error) {
	r, err := c.Find(key)
	if err != nil {
		return nil, err
	}
	mover, ok := c.driver.(dpapi.SessionMover)
	if !ok {
		return nil, refusal.New(refusal.ErrNever, "the driver of this node's packet path cannot copy sessions")
	}
	return mover.EndpointSessions(r.ID)
}

// ImportSessions adds sessions to an endpoint and returns how many there was no room for. If there is no endpoint yet,
// they wait for its ADD.
func (c *Core) ImportSessions(ctx context.Context, containerID, iface string, all []dpapi.Session) (
	left int, waiting bool, err error,
) {
	if len(all) > maxStaged {
		return 0, false, refusal.New(refusal.ErrInvalid, "%d sessions of one container; the maximum is %d", len(all),
			maxStaged)
	}
	key := EndpointKey(containerID, iface)
	unlock, err := c.byKey.Lock(ctx, key)
	if err != nil {
		return 0, false, err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok {
		return 0, true, c.staged.put(key, all, c.now())
	}
	left, err = c.keepSessions(r, all)
	return left, false, err
}

// keepStaged adds the sessions that have waited for an endpoint.
func (c *Core) keepStaged(r endpoint.Record) error {
	all := c.staged.take(EndpointKey(r.ContainerID, r.Interface), c.now())
	if len(all) == 0 {
		return nil
	}
	left, err := c.keepSessions(r, all)
	if left > 0 {
		c.log.Warn("the session table has no room for all sessions of a container that moved here", "endpoint", r.ID,
			"sessions", len(all), "left", left)
	}
	return err
}

func (c *Core) keepSessions(r endpoint.Record, all []dpapi.Session) (int, error) {
	mover, ok := c.driver.(dpapi.SessionMover)
	if !ok {
		return 0, refusal.New(refusal.ErrNever, "the driver of this node's packet path cannot copy sessions")
	}
	for _, s := range all {
		if s.Tenant != uint32(r.TenantID) || !slices.Contains(r.Addresses(), s.Local.Addr()) {
			return 0, refusal.New(refusal.ErrInvalid, "a session of %v of tenant id %d, which endpoint %d does "+
				"not have; no session was added", s.Local.Addr(), s.Tenant, r.ID)
		}
	}
	return mover.KeepSessions(r.ID, all)
}

// Moved reports whether the address of an endpoint is on another node by now.
func (c *Core) Moved(r endpoint.Record) (moved bool) {
	_ = c.networks.EachOf(r, func(n Network, r endpoint.Record) error {
		if by, ok := n.(network.MoveReporter); ok && by.Moved(r) {
			moved = true
		}
		return nil
	})
	return moved
}
