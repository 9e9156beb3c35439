package orchestrator

import (
	"net"
	"net/netip"
	"slices"
)

// occupied returns the addresses that no service may have, and what has them: those of this machine and of BGP peers.
func (s *Server) occupied() map[netip.Addr]string {
	all := map[netip.Addr]string{}
	for a := range ownAddresses() {
		all[a] = "this orchestrator's machine"
	}
	for _, text := range s.config.Advertise {
		if a, err := netip.ParseAddr(text); err == nil {
			all[a] = "this orchestrator (--advertise)"
		}
	}
	for _, p := range slices.Concat(s.config.BGP.Peers, s.fabricPeers()) {
		all[p.Addr] = "a BGP peer"
	}
	return all
}

// ownAddresses returns the addresses of this machine.
func ownAddresses() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	all, _ := net.InterfaceAddrs() // without them, this machine's own node may be a witness
	for _, a := range all {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			own[prefix.Addr()] = true
		}
	}
	return own
}
