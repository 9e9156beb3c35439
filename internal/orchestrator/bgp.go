package orchestrator

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"

	"pilaster.io/pilaster/internal/orchestrator/announce"
)

// BGPStatusPath is where the operator's socket has an announce.Status as JSON. It is not found without BGP peers.
const BGPStatusPath = "/bgp"

// startBGP starts the announcement of services' addresses to BGP peers, if there are any.
func (s *Server) startBGP(ctx context.Context) error {
	if len(s.config.BGP.Peers) == 0 {
		return nil
	}
	control, err := announce.Start(ctx, s.config.BGP, s.cache, s.identity(), s.config.Log)
	if err != nil {
		return err
	}
	s.announcements = control
	s.metrics.registry.MustRegister(announce.NewCollector(control.Status))
	s.running.Go(func() { control.Run(s.background) })
	return nil
}

// identity is one that no other orchestrator has.
func (s *Server) identity() [16]byte {
	sum := sha256.Sum256([]byte(s.cache.Self))
	return [16]byte(sum[:16])
}

func (s *Server) serveBGPStatus(w http.ResponseWriter, _ *http.Request) {
	if s.announcements == nil {
		http.Error(w, "this orchestrator announces no addresses by BGP (see --bgp-peer)", http.StatusNotFound)
		return
	}
	serveJSON(w, s.announcements.Status())
}

func serveJSON(w http.ResponseWriter, status any) {
	text, err := json.Marshal(status)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(text)
}
