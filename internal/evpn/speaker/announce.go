package speaker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/apiutil"

	"pilaster.io/pilaster/internal/evpn"
)

// batchSize is how many routes one call to GoBGP adds. Received routes wait for it.
const batchSize = 500

// Announce replaces the announced routes. After an error it has announced some of the changes; the next call continues.
// The first call, with or without routes, connects the peers.
func (s *Speaker) Announce(ctx context.Context, own []evpn.Own) error {
	s.announcing.Lock()
	defer s.announcing.Unlock()
	s.mu.Lock()
	s.table.SetOwn(own)
	s.stream.Publish(s.table)
	s.mu.Unlock()

	routes := evpn.Routes(s.config.ASN, own)
	wanted := make(map[evpn.Key]evpn.Route, len(routes))
	for _, r := range routes {
		wanted[r.Key] = r
	}
	// Withdrawals first: GoBGP refuses a MAC with a lower sequence than that of a route which it still has.
	err := errors.Join(s.withdraw(wanted), s.add(routes))
	if s.connected {
		return err
	}
	if err := s.connect(ctx); err != nil {
		return err
	}
	s.connected = true
	return err
}

// withdraw deletes routes that are not wanted.
func (s *Speaker) withdraw(wanted map[evpn.Key]evpn.Route) error {
	var failed []error
	var paths []*apiutil.Path
	var keys []evpn.Key
	for key, r := range s.announced {
		if _, ok := wanted[key]; ok {
			continue
		}
		path, err := toPath(r)
		if err != nil {
			return err
		}
		paths, keys = append(paths, path), append(keys, key)
	}
	for len(paths) > 0 {
		n := min(batchSize, len(paths))
		if err := s.bgp.DeletePath(apiutil.DeletePathRequest{Paths: paths[:n]}); err != nil {
			failed = append(failed, fmt.Errorf("withdraw %d routes: %w", n, err))
		} else {
			s.recordAnnounced(func() {
				for _, key := range keys[:n] {
					delete(s.announced, key)
				}
			})
		}
		paths, keys = paths[n:], keys[n:]
	}
	return errors.Join(failed...)
}

// add announces the routes that are not announced as they are.
func (s *Speaker) add(routes []evpn.Route) error {
	var failed []error
	routes = slices.DeleteFunc(slices.Clone(routes), func(r evpn.Route) bool {
		is, ok := s.announced[r.Key]
		return ok && is.Equal(r)
	})
	for batch := range slices.Chunk(routes, batchSize) {
		paths := make([]*apiutil.Path, 0, len(batch))
		for _, r := range batch {
			path, err := toPath(r)
			if err != nil {
				return err
			}
			paths = append(paths, path)
		}
		if _, err := s.bgp.AddPath(apiutil.AddPathRequest{Paths: paths}); err != nil {
			failed = append(failed, fmt.Errorf("announce %d routes: %w", len(paths), err))
			continue
		}
		s.recordAnnounced(func() {
			for _, r := range batch {
				s.announced[r.Key] = r
			}
		})
	}
	return errors.Join(failed...)
}

// recordAnnounced changes s.announced, which only Announce changes but Status reads.
func (s *Speaker) recordAnnounced(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}
