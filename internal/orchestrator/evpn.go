package orchestrator

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"

	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
)

// EVPNStatusPath is where the operator's socket has a evpnroutes.Status as JSON. It is not found without BGP peers.
const EVPNStatusPath = "/evpn"

// startEVPN starts the exchange of routes with BGP peers, if there are any.
func (s *Server) startEVPN(ctx context.Context) error {
	if len(s.config.EVPN.Peers) == 0 {
		return nil
	}
	sum := sha256.Sum256([]byte(s.cache.Self))
	control, err := evpnroutes.Start(ctx, s.config.EVPN, s.store, s.cache, [16]byte(sum[:16]), s.config.Log)
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
	text, err := json.Marshal(s.evpn.Status())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(text)
}
