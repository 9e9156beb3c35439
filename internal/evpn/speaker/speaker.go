package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/server"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
)

// Config configures a Speaker.
type Config struct {
	ASN      uint32
	RouterID netip.Addr // IPv4; other orchestrators of the cluster have other ones
	Peers    []bgp.Peer
	Limits   Limits
	Stale    time.Duration // how long routes of a lost peer remain
	Log      *slog.Logger
}

// Limits apply to each peer.
type Limits struct {
	Routes  int           // refused ones included
	Bytes   int           // of all routes' attributes; 0 means 1 KiB for each of Routes
	Restart time.Duration // until a peer above a limit is started again
}

// Defaults of Limits and Config.Stale.
const (
	DefaultRoutes  = 200_000
	DefaultRestart = 5 * time.Minute
	DefaultStale   = 2 * time.Minute
)

const bytesPerRoute = 1 << 10

// Speaker is a running BGP speaker.
type Speaker struct {
	config Config
	bgp    *server.BgpServer
	stream *evpn.Stream

	mu        sync.Mutex // of everything below; held for short times only, because events wait for it
	table     *evpn.Table
	peers     map[netip.Addr]*session
	announced map[evpn.Key]evpn.Route
	connected bool
	expiry    *time.Timer

	started    time.Time
	announcing sync.Mutex // serializes Announce
	running    sync.WaitGroup
	background context.Context // of goroutines
	stop       context.CancelFunc
}

// Start starts the speaker. It connects to the peers after the first Announce, so that a peer that kept this speaker's
// routes through a restart receives all of them at once, and deletes none that still exists.
func Start(ctx context.Context, c Config) (*Speaker, error) {
	if c.Limits.Bytes == 0 {
		c.Limits.Bytes = c.Limits.Routes * bytesPerRoute
	}
	background, stop := context.WithCancel(context.Background())
	s := &Speaker{
		config:     c,
		bgp:        bgp.NewServer(c.Log, hideTargets),
		stream:     evpn.NewStream(),
		table:      evpn.NewTable(),
		peers:      map[netip.Addr]*session{},
		announced:  map[evpn.Key]evpn.Route{},
		background: background, stop: stop, started: time.Now(),
	}
	for _, p := range c.Peers {
		s.peers[p.Addr] = &session{Peer: p, since: time.Now(), reason: "not connected yet"}
	}
	s.running.Go(s.bgp.Serve)
	if err := s.start(ctx); err != nil {
		s.Close()
		return nil, err
	}
	s.running.Go(s.countHidden)
	return s, nil
}

func (s *Speaker) start(ctx context.Context) error {
	if err := bgp.Start(ctx, s.bgp, s.config.ASN, s.config.RouterID); err != nil {
		return err
	}
	// One watcher for all events, so that they arrive in order.
	return s.bgp.WatchEvent(s.background, server.WatchEventMessageCallbacks{
		OnPathUpdate: s.onRoutes,
		OnPathEor:    s.onEndOfRIB,
		OnPeerUpdate: s.onPeer,
	}, server.WatchUpdate(false, "", ""), server.WatchEor(false), server.WatchPeer())
}

// connect adds the peers.
func (s *Speaker) connect(ctx context.Context) error {
	var failed []error
	for _, p := range s.config.Peers {
		peer := &api.Peer{
			// Routes that came from this AS are reported, so that they count. The import rules refuse them.
			Conf:      &api.PeerConf{NeighborAddress: p.Addr.String(), PeerAsn: p.ASN, AllowOwnAsn: math.MaxUint8},
			Transport: &api.Transport{RemotePort: uint32(p.Port)},
			Timers:    &api.Timers{Config: &api.TimersConfig{ConnectRetry: bgp.ConnectRetry}},
			AfiSafis: []*api.AfiSafi{{Config: &api.AfiSafiConfig{
				Family:  &api.Family{Afi: api.Family_AFI_L2VPN, Safi: api.Family_SAFI_EVPN},
				Enabled: true,
			}}},
		}
		if p.ASN != s.config.ASN {
			peer.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: bgp.MaxTTL}
		}
		if err := s.bgp.AddPeer(ctx, &api.AddPeerRequest{Peer: peer}); err != nil {
			failed = append(failed, fmt.Errorf("add BGP peer %v: %w", p.Addr, err))
		}
	}
	return errors.Join(failed...)
}

// Configure sets which routes are imported, and checks those that peers announced again.
func (s *Speaker) Configure(settings evpn.Settings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.table.Configure(settings); err != nil {
		return err
	}
	s.stream.Publish(s.table)
	return nil
}

// NextSequence returns the mobility sequence for a MAC that moves to this cluster.
func (s *Speaker) NextSequence(vni uint32, mac evpn.MAC) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.NextSequence(vni, mac)
}

// RecordsNow returns the records in order.
func (s *Speaker) RecordsNow() []evpn.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.Records()
}

// Records returns the records in order, and a subscription to the changes after them.
func (s *Speaker) Records() ([]evpn.Record, *evpn.Subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.Records(), s.stream.Subscribe()
}

// State says how far the records can be relied on.
type State struct {
	AllUp    bool   // every peer is up and has sent all of its routes
	Complete bool   // no record is missing because of the start: every peer has sent its routes, or is late
	Flaps    uint64 // sessions that ended
	Version  uint64 // of the records; it increases
}

// State returns the state of the records. A peer is late when its routes would have expired if it had been lost at the
// start.
func (s *Speaker) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := State{AllUp: true, Complete: true, Version: s.stream.Version()}
	for _, p := range s.peers {
		state.AllUp = state.AllUp && p.up && p.synced
		state.Complete = state.Complete && (p.synced || time.Since(s.started) > s.config.Stale)
		state.Flaps += p.flaps
	}
	return state
}

// Close ends the sessions. Peers delete the routes of this speaker.
func (s *Speaker) Close() {
	s.stop()
	s.bgp.Stop()
	s.mu.Lock()
	if s.expiry != nil {
		s.expiry.Stop()
	}
	s.mu.Unlock()
	s.running.Wait()
}

// sortedPeers returns the sessions in the order of their addresses.
func (s *Speaker) sortedPeers() []*session {
	var all []*session
	for _, p := range s.peers {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *session) int { return a.Addr.Compare(b.Addr) })
	return all
}
