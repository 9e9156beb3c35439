package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"pilaster.io/pilaster/internal/bgp"
)

// route is a host route by one next hop.
type route struct{ to, via netip.Addr }

// speaker announces host routes to peers. It imports none.
type speaker struct {
	config Config
	log    *slog.Logger
	bgp    *server.BgpServer

	connected bool // only announce uses it
	ids       map[netip.Addr]uint32
	running   sync.WaitGroup
	stop      context.CancelFunc

	announced map[route]bool // only announce uses it

	mu    sync.Mutex
	peers map[netip.Addr]*PeerStatus
}

// PeerStatus is the state of a session.
type PeerStatus struct {
	bgp.Peer
	Up     bool      `json:"up"`
	Since  time.Time `json:"since"`            // when Up changed
	Reason string    `json:"reason,omitempty"` // why it is down
	Flaps  uint64    `json:"flaps"`            // sessions that ended
}

// startSpeaker starts a speaker. It connects at the first announcement, so that a peer that kept routes through a
// restart gets all of them at once.
func startSpeaker(ctx context.Context, c Config, log *slog.Logger) (*speaker, error) {
	background, stop := context.WithCancel(context.Background())
	s := &speaker{
		config: c, log: log, bgp: bgp.NewServer(log, nil), stop: stop, ids: map[netip.Addr]uint32{},
		announced: map[route]bool{}, peers: map[netip.Addr]*PeerStatus{},
	}
	for _, p := range c.Peers {
		s.peers[p.Addr] = &PeerStatus{Peer: p, Since: time.Now(), Reason: "not connected yet"}
	}
	s.running.Go(s.bgp.Serve)
	err := bgp.Start(ctx, s.bgp, c.ASN, c.RouterID)
	if err == nil {
		watch := server.WatchEventMessageCallbacks{OnPeerUpdate: s.onPeer}
		err = s.bgp.WatchEvent(background, watch, server.WatchPeer())
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close ends the sessions. Peers that support graceful restart keep the routes for its time.
func (s *speaker) close() {
	s.stop()
	if err := s.bgp.StopBgp(context.Background(), &api.StopBgpRequest{AllowGracefulRestart: true}); err != nil {
		s.log.Warn("stopping BGP failed", "error", err)
	}
	s.running.Wait()
}

func (s *speaker) connect(ctx context.Context) error {
	var failed []error
	for _, p := range s.config.Peers {
		if err := s.bgp.AddPeer(ctx, &api.AddPeerRequest{Peer: s.peer(p)}); err != nil {
			failed = append(failed, fmt.Errorf("add BGP peer %v: %w", p.Addr, err))
		}
	}
	return errors.Join(failed...)
}

// deferral is how long a peer may take to send its own routes after a restart before it gets ours, in seconds.
const deferral = 3

func (s *speaker) peer(p bgp.Peer) *api.Peer {
	restarts := s.config.Restart > 0
	peer := &api.Peer{
		Conf: &api.PeerConf{
			NeighborAddress: p.Addr.String(), PeerAsn: p.ASN, AuthPassword: s.config.Password,
		},
		Transport: &api.Transport{RemotePort: uint32(p.Port)},
		Timers:    &api.Timers{Config: &api.TimersConfig{ConnectRetry: bgp.ConnectRetry}},
		AfiSafis: []*api.AfiSafi{{
			Config: &api.AfiSafiConfig{
				Family:  &api.Family{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST},
				Enabled: true,
			},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: restarts}},
			AddPaths:          &api.AddPaths{Config: &api.AddPathsConfig{SendMax: sendMax(s.config.NextHops)}},
		}},
	}
	if restarts {
		peer.GracefulRestart = &api.GracefulRestart{
			Enabled: true, RestartTime: uint32(s.config.Restart / time.Second), NotificationEnabled: true,
			DeferralTime: deferral,
			// Nodes forward whether an orchestrator runs or not, so each session resumes what the last one announced.
			LocalRestarting: true,
		}
	}
	if p.ASN != s.config.ASN {
		peer.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: bgp.MaxTTL}
	}
	return peer
}

// sendMax leaves room for next hops that others replace, because new ones are announced first.
func sendMax(nextHops int) uint32 { return uint32(min(2*nextHops, MaxNextHops)) }

// announce replaces the announced routes: new ones first. After an error the next call continues. The first call
// connects the peers.
func (s *speaker) announce(ctx context.Context, wanted map[route]bool) error {
	var add, remove []route
	for r := range wanted {
		if !s.announced[r] {
			add = append(add, r)
		}
	}
	for r := range s.announced {
		if !wanted[r] {
			remove = append(remove, r)
		}
	}
	err := errors.Join(s.add(add), s.withdraw(remove))
	if err != nil || s.connected {
		return err
	}
	if err := s.connect(ctx); err != nil {
		return err
	}
	s.connected = true
	return nil
}

func (s *speaker) add(routes []route) error {
	for _, r := range routes {
		path, err := s.path(r)
		if err != nil {
			return err
		}
		if _, err := s.bgp.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{path}}); err != nil {
			return fmt.Errorf("announce %v by %v: %w", r.to, r.via, err)
		}
		s.announced[r] = true
	}
	return nil
}

func (s *speaker) withdraw(routes []route) error {
	for _, r := range routes {
		path, err := s.path(r)
		if err != nil {
			return err
		}
		if err := s.bgp.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{path}}); err != nil {
			return fmt.Errorf("withdraw %v by %v: %w", r.to, r.via, err)
		}
		delete(s.announced, r)
	}
	return nil
}

// path returns a route in GoBGP's form. Routes to an address have path identifiers by their next hops (RFC 7911).
func (s *speaker) path(r route) (*apiutil.Path, error) {
	nlri, err := packet.NewIPAddrPrefix(netip.PrefixFrom(r.to, r.to.BitLen()))
	if err != nil {
		return nil, err
	}
	reach, err := packet.NewPathAttributeMpReachNLRI(packet.RF_IPv6_UC, []packet.PathNLRI{{NLRI: nlri}}, r.via)
	if err != nil {
		return nil, err
	}
	if s.ids[r.via] == 0 {
		s.ids[r.via] = uint32(len(s.ids) + 1)
	}
	const originIGP = 0 // RFC 4271 §4.3
	return &apiutil.Path{
		Family: packet.RF_IPv6_UC, Nlri: nlri, RemoteID: s.ids[r.via],
		Attrs: []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(originIGP), reach},
	}, nil
}

func (s *speaker) onPeer(e *apiutil.WatchEventMessage_PeerEvent, at time.Time) {
	is, ok := bgp.SessionOf(e)
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
	case is.Up && !p.Up:
		p.Up, p.Since, p.Reason = true, at, ""
		s.log.Info("BGP peer is up", "peer", p.Addr)
	case !is.Up && p.Up:
		p.Up, p.Since, p.Reason = false, at, is.Reason
		p.Flaps++
		s.log.Warn("BGP peer is down", "peer", p.Addr, "reason", p.Reason)
	case is.Idle && is.Reason != "":
		p.Reason = is.Reason // a connection that did not become a session
	}
}

func (s *speaker) peerStatus() (all []PeerStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range slices.SortedFunc(maps.Keys(s.peers), netip.Addr.Compare) {
		all = append(all, *s.peers[a])
	}
	return all
}
