package bgp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/evpn/speaker"
)

// Config says with which peers routes are exchanged, and which routes are imported. Without peers, none are.
type Config struct {
	ASN      uint32
	Peers    []speaker.Peer
	RouterID netip.Addr                // zero: derived from the orchestrator's identity
	Pool     netip.Prefix              // of the VTEP addresses of this cluster's nodes
	VTEPs    []netip.Prefix            // of other speakers
	Allow    map[string][]netip.Prefix // by tenant: prefixes outside of its CIDRs that are imported
	Stale    time.Duration
	Limits   speaker.Limits
}

// Flags are the texts of the command line.
type Flags struct {
	ASN      uint32
	Peers    []string
	RouterID string
	Pool     string
	VTEPs    []string
	Allow    []string
	Stale    time.Duration
	Limits   speaker.Limits
}

// Config checks the texts.
func (f Flags) Config() (c Config, err error) {
	c = Config{ASN: f.ASN, Stale: f.Stale, Limits: f.Limits, Allow: map[string][]netip.Prefix{}}
	for _, text := range f.Peers {
		p, err := parsePeer(text, f.ASN)
		if err != nil {
			return c, err
		}
		if slices.ContainsFunc(c.Peers, func(other speaker.Peer) bool { return other.Addr == p.Addr }) {
			return c, fmt.Errorf("--evpn-peer %v is there twice", p.Addr)
		}
		c.Peers = append(c.Peers, p)
	}
	if f.RouterID != "" {
		c.RouterID, err = netip.ParseAddr(f.RouterID)
		if err != nil || !c.RouterID.Is4() || c.RouterID.IsUnspecified() {
			return c, fmt.Errorf("--evpn-router-id %q is not an IPv4 address", f.RouterID)
		}
	}
	if f.Pool != "" {
		if c.Pool, err = parsePrefix("--evpn-vtep-pool", f.Pool); err != nil {
			return c, err
		}
	}
	for _, text := range f.VTEPs {
		p, err := parsePrefix("--evpn-allow-vtep", text)
		if err != nil {
			return c, err
		}
		if p.Overlaps(c.Pool) {
			return c, fmt.Errorf(
				"--evpn-allow-vtep %v overlaps --evpn-vtep-pool %v, which only this cluster's nodes have", p, c.Pool)
		}
		c.VTEPs = append(c.VTEPs, p)
	}
	for _, text := range f.Allow {
		tenant, prefix, ok := strings.Cut(text, "=")
		if !ok || tenant == "" {
			return c, fmt.Errorf("--evpn-allow %q is not TENANT=PREFIX, such as shop=172.20.0.0/16", text)
		}
		p, err := parseAnyPrefix("--evpn-allow", prefix)
		if err != nil {
			return c, err
		}
		c.Allow[tenant] = append(c.Allow[tenant], p)
	}
	return c, c.check()
}

func (c Config) check() error {
	if len(c.Peers) == 0 {
		if c.Pool.IsValid() || c.ASN != 0 || len(c.VTEPs)+len(c.Allow) > 0 || c.RouterID.IsValid() {
			return errors.New("--evpn-asn, --evpn-vtep-pool, --evpn-router-id, --evpn-allow and --evpn-allow-vtep " +
				"need --evpn-peer")
		}
		return nil
	}
	switch {
	case c.ASN == 0:
		return errors.New("--evpn-peer needs --evpn-asn")
	case !c.Pool.IsValid():
		return errors.New("--evpn-peer needs --evpn-vtep-pool, the prefix of the nodes' tunnel addresses")
	case c.Pool.Bits() > 30:
		return fmt.Errorf("--evpn-vtep-pool %v has no room for nodes; use a /30 or shorter", c.Pool)
	case c.Stale < 0:
		return errors.New("--evpn-stale must be at least 0")
	case c.Limits.Routes < 1:
		return errors.New("--evpn-max-routes must be at least 1")
	case c.Limits.Restart < time.Second:
		return errors.New("--evpn-restart must be at least 1s")
	}
	return nil
}

// parsePeer reads ADDRESS, ADDRESS=ASN or either with a port, such as [fd00::1]:1790=65002.
func parsePeer(text string, asn uint32) (p speaker.Peer, err error) {
	where, as, named := strings.Cut(text, "=")
	p.ASN = asn
	if named {
		n, err := strconv.ParseUint(as, 10, 32)
		if err != nil || n == 0 {
			return p, fmt.Errorf("--evpn-peer %q: %q is not the number of an AS, 1 to 4294967295", text, as)
		}
		p.ASN = uint32(n)
	}
	if p.Addr, err = netip.ParseAddr(where); err == nil {
		return p, nil
	}
	at, err := netip.ParseAddrPort(where)
	if err != nil || at.Port() == 0 {
		return p, fmt.Errorf(
			"--evpn-peer %q is not ADDRESS[:PORT][=ASN], such as 10.0.0.1 or [fd00::1]:1790=65002", text)
	}
	p.Addr, p.Port = at.Addr(), at.Port()
	return p, nil
}

func parsePrefix(flag, text string) (netip.Prefix, error) {
	p, err := parseAnyPrefix(flag, text)
	if err == nil && !p.Addr().Is4() {
		err = fmt.Errorf("%s %v is not an IPv4 prefix: tunnels between speakers use IPv4", flag, p)
	}
	return p, err
}

func parseAnyPrefix(flag, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return p, fmt.Errorf("%s: %q is not a prefix such as 10.2.0.0/16", flag, text)
	case p != p.Masked():
		return p, fmt.Errorf("%s %v has host bits set; write %v", flag, p, p.Masked())
	}
	return p, nil
}

// asns returns the ASNs whose route targets are imported.
func (c Config) asns() []uint32 {
	all := []uint32{c.ASN}
	for _, p := range c.Peers {
		all = append(all, p.ASN)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// routerID derives a router ID from an identity that no other orchestrator has.
func routerID(identity [16]byte) netip.Addr {
	var a [4]byte
	n := binary.BigEndian.Uint32(identity[:4])
	if n == 0 {
		n = 1
	}
	binary.BigEndian.PutUint32(a[:], n)
	return netip.AddrFrom4(a)
}
