package bgp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Peer is a BGP speaker that this process connects to.
type Peer struct {
	Addr netip.Addr `json:"address"`
	ASN  uint32     `json:"asn"`
	Port uint16     `json:"port,omitzero"` // 0 means 179
}

// ParsePeers reads the peers of a flag: ADDRESS, ADDRESS=ASN or either with a port, such as [fd00::1]:1790=65002.
// Without an ASN a peer has that of this side.
func ParsePeers(flag string, texts []string, asn uint32) (all []Peer, err error) {
	for _, text := range texts {
		p, err := parsePeer(flag, text, asn)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(all, func(other Peer) bool { return other.Addr == p.Addr }) {
			return nil, fmt.Errorf("%s %v is there twice", flag, p.Addr)
		}
		all = append(all, p)
	}
	return all, nil
}

func parsePeer(flag, text string, asn uint32) (p Peer, err error) {
	where, as, named := strings.Cut(text, "=")
	p.ASN = asn
	if named {
		n, err := strconv.ParseUint(as, 10, 32)
		if err != nil || n == 0 {
			return p, fmt.Errorf("%s %q: %q is not the number of an AS, 1 to 4294967295", flag, text, as)
		}
		p.ASN = uint32(n)
	}
	if p.Addr, err = netip.ParseAddr(where); err == nil {
		return p, nil
	}
	at, err := netip.ParseAddrPort(where)
	if err != nil || at.Port() == 0 {
		return p, fmt.Errorf(
			"%s %q is not ADDRESS[:PORT][=ASN], such as 10.0.0.1 or [fd00::1]:1790=65002", flag, text)
	}
	p.Addr, p.Port = at.Addr(), at.Port()
	return p, nil
}

// ParseRouterID reads the BGP identifier of a flag. No text means none.
func ParseRouterID(flag, text string) (id netip.Addr, err error) {
	if text == "" {
		return id, nil
	}
	id, err = netip.ParseAddr(text)
	if err != nil || !id.Is4() || id.IsUnspecified() {
		return id, fmt.Errorf("%s %q is not an IPv4 address", flag, text)
	}
	return id, nil
}

// RouterID derives a router ID from an identity that no other orchestrator has.
func RouterID(identity [16]byte) netip.Addr {
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], max(binary.BigEndian.Uint32(identity[:4]), 1))
	return netip.AddrFrom4(a)
}
