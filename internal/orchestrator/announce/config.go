package announce

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bgp"
)

// Defaults and limits of the flags.
const (
	DefaultNextHops = 16
	MaxNextHops     = 255 // GoBGP's send-max of ADD-PATH is a byte
	DefaultRestart  = 2 * time.Minute
	maxRestart      = 4095 * time.Second // 12 bits (RFC 4724 §3)
	maxPassword     = 80                 // of TCP MD5 signatures in Linux
)

// Config says to which peers addresses are announced. Without peers, none are.
type Config struct {
	ASN      uint32
	Peers    []bgp.Peer
	RouterID netip.Addr // zero: derived from the orchestrator's identity
	NextHops int        // at most, of an address
	Restart  time.Duration
	Password string `json:"-"` // of TCP MD5 signatures (RFC 2385); empty: none
}

// Flags are the texts of the command line.
type Flags struct {
	ASN          uint32
	Peers        []string
	RouterID     string
	NextHops     int
	Restart      time.Duration
	PasswordFile string
}

// Config checks the texts, and reads the password.
func (f Flags) Config() (c Config, err error) {
	if len(f.Peers) == 0 {
		if f.ASN != 0 || f.RouterID != "" || f.PasswordFile != "" {
			return c, errors.New("--bgp-asn, --bgp-router-id and --bgp-password-file need --bgp-peer")
		}
		return c, nil
	}
	switch {
	case f.ASN == 0:
		return c, errors.New("--bgp-peer needs --bgp-asn")
	case f.NextHops < 1 || f.NextHops > MaxNextHops:
		return c, fmt.Errorf("--bgp-next-hops must be 1 to %d", MaxNextHops)
	case f.Restart < 0 || f.Restart > maxRestart:
		return c, fmt.Errorf("--bgp-restart-time must be 0s to %v (RFC 4724)", maxRestart)
	}
	c = Config{ASN: f.ASN, NextHops: f.NextHops, Restart: f.Restart}
	if c.Peers, err = bgp.ParsePeers("--bgp-peer", f.Peers, f.ASN); err != nil {
		return c, err
	}
	if c.RouterID, err = bgp.ParseRouterID("--bgp-router-id", f.RouterID); err != nil {
		return c, err
	}
	if f.PasswordFile == "" {
		return c, nil
	}
	text, err := os.ReadFile(f.PasswordFile)
	if err != nil {
		return c, fmt.Errorf("--bgp-password-file: %w", err)
	}
	if c.Password = strings.TrimRight(string(text), "\r\n"); c.Password == "" || len(c.Password) > maxPassword {
		return c, fmt.Errorf("--bgp-password-file %s: the password has %d bytes; 1 to %d are possible", f.PasswordFile,
			len(c.Password), maxPassword)
	}
	return c, nil
}
