package bgp

import (
	"net/netip"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// Session is the state of a session with a peer.
type Session struct {
	Peer   netip.Addr
	Up     bool
	Idle   bool   // the last attempt has ended
	Reason string // why the last session, or attempt, ended; may be empty
}

// SessionOf reads an event of GoBGP. It returns false if the event does not report a state.
func SessionOf(e *apiutil.WatchEventMessage_PeerEvent) (s Session, ok bool) {
	if e.Type != apiutil.PEER_EVENT_STATE && e.Type != apiutil.PEER_EVENT_INIT {
		return s, false
	}
	is := e.Peer.State
	return Session{
		Peer: is.NeighborAddress, Up: is.SessionState == bgp.BGP_FSM_ESTABLISHED,
		Idle: is.SessionState == bgp.BGP_FSM_IDLE, Reason: is.DisconnectMessage,
	}, true
}
