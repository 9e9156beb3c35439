package evpnroutes

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn/speaker"
)

// Config says with which peers routes are exchanged, and which routes are imported. Without peers, none are.
type Config struct {
	ASN      uint32
	Peers    []bgp.Peer
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
	if c.Peers, err = bgp.ParsePeers("--evpn-peer", f.Peers, f.ASN); err != nil {
		return c, err
	}
	if c.RouterID, err = bgp.ParseRouterID("--evpn-router-id", f.RouterID); err != nil {
		return c, err
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
