package rules

import (
	"context"
	"fmt"
	"slices"
)

// Report is what Read finds.
type Report struct {
	// Unsafe names the rules whose verdict is not a function of the flow, and why.
	Unsafe []string
	// Tracks reports whether a rule makes the kernel track connections.
	Tracks bool
}

// Read reads all rules of the network namespace of the calling thread. marks are the bits of packet marks that the
// cache uses. An error means that the rules are not all known.
func Read(ctx context.Context, marks uint32) (Report, error) {
	r, err := readNftables(marks)
	if err != nil {
		return r, fmt.Errorf("read the nftables rules: %w", err)
	}
	routing, err := readRouting(marks)
	if err != nil {
		return r, fmt.Errorf("read the routing rules: %w", err)
	}
	r.Unsafe = append(r.Unsafe, routing...)
	for _, f := range legacyFamilies {
		old, err := f.read(ctx, marks)
		if err != nil {
			return r, err
		}
		r.Unsafe = append(r.Unsafe, old.Unsafe...)
		r.Tracks = r.Tracks || old.Tracks
	}
	return r, nil
}

// Matches and targets of iptables whose result is a function of the flow. The list has what is known to be safe, so
// that a match of a later kernel is refused. "set" is among them: status says that changes of an ipset are noticed
// after the validity of entries.
var (
	safeMatches = []string{
		"addrtype", "ah", "cgroup", "comment", "connlabel", "connmark", "conntrack", "dccp", "devgroup", "esp",
		"helper", "icmp", "icmp6", "iprange", "mac", "mark", "multiport", "owner", "physdev", "pkttype", "policy",
		"rpfilter", "sctp", "set", "socket", "state", "tcp", "tcpmss", "udp", "udplite",
	}
	// TCPMSS changes SYN packets only, which are never cached.
	safeTargets = []string{
		"ACCEPT", "AUDIT", "CONNMARK", "CT", "DNAT", "DROP", "LOG", "MARK", "MASQUERADE", "NETMAP", "NFLOG", "NOTRACK",
		"REDIRECT", "REJECT", "RETURN", "SNAT", "TCPMSS", "TRACE",
	}
	// passiveTargets do not change what happens to the packet.
	passiveTargets = []string{"AUDIT", "LOG", "NFLOG", "TRACE"}
	// Matches and targets with which the kernel tracks connections.
	trackingMatches = []string{"connbytes", "connlabel", "connlimit", "connmark", "conntrack", "helper", "state"}
	trackingTargets = []string{"CONNMARK", "CT", "DNAT", "MASQUERADE", "NETMAP", "REDIRECT", "SNAT"}
)

func safeMatch(name string) bool  { return slices.Contains(safeMatches, name) }
func safeTarget(name string) bool { return slices.Contains(safeTargets, name) }
