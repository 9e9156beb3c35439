package orchestrator

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
)

// EVPNStatusPath is where the operator's socket has a evpnroutes.Status as JSON. It is not found without BGP peers.
const EVPNStatusPath = "/evpn"

// fabricPeers returns the BGP peers with which routes of tenants are exchanged.
func (s *Server) fabricPeers() []bgp.Peer { return s.config.EVPN.Peers }

// startEVPN starts the exchange of routes with BGP peers, if there are any.
func (s *Server) startEVPN(ctx context.Context) error {
	if len(s.config.EVPN.Peers) == 0 {
		return nil
	}
	control, err := evpnroutes.Start(ctx, s.config.EVPN, s.store, s.cache, s.identity(), s.config.Log)
	if err != nil {
		return err
	}
	s.evpn = control
	s.metrics.registry.MustRegister(evpnroutes.NewCollector(control.Status))
	s.running.Go(func() { control.Run(s.background) })
	return nil
}

func (s *Server) serveEVPNStatus(w http.ResponseWriter, _ *http.Request) {
	if s.evpn == nil {
		http.Error(w, "this orchestrator has no BGP peers (see --evpn-peer)", http.StatusNotFound)
		return
	}
	serveJSON(w, s.evpn.Status())
}

// CheckPeers refuses BGP peers with two sessions: they would close one of them, because both come from one address.
func CheckPeers(c Config) error {
	for _, p := range c.BGP.Peers {
		if slices.ContainsFunc(c.EVPN.Peers, func(other bgp.Peer) bool { return other.Addr == p.Addr }) {
			return fmt.Errorf("%v is a peer for addresses of services and for routes of tenants: a BGP peer has one "+
				"session with this process; use another address of the router, or another router, for one of them",
				p.Addr)
		}
	}
	return nil
}
