package orchestrator

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"

	"pilaster.io/pilaster/internal/orchestrator/bgp"
)

// EVPNStatusPath is where the operator's socket has a bgp.Status as JSON. It is not found without BGP peers.
const EVPNStatusPath = "/evpn"

// startBGP starts the exchange of routes with BGP peers, if there are any.
func (s *Server) startBGP(ctx context.Context) error {
	if len(s.config.BGP.Peers) == 0 {
		return nil
	}
	sum := sha256.Sum256([]byte(s.cache.Self))
	control, err := bgp.Start(ctx, s.config.BGP, s.store, s.cache, [16]byte(sum[:16]), s.config.Log)
	if err != nil {
		return err
	}
	s.bgp = control
	s.metrics.registry.MustRegister(bgp.NewCollector(control.Status))
	s.running.Go(func() { control.Run(s.background) })
	return nil
}

func (s *Server) serveEVPNStatus(w http.ResponseWriter, _ *http.Request) {
	if s.bgp == nil {
		http.Error(w, "this orchestrator has no BGP peers (see --evpn-peer)", http.StatusNotFound)
		return
	}
	text, err := json.Marshal(s.bgp.Status())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(text)
}
