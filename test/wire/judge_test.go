package wire_test

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// judge checks the fabric's traffic. It reads captures with tshark, which is independent of Pilaster.
type judge struct {
	places   map[netip.Addr]place // by plaintext address
	secret   []netip.Addr         // ciphertext addresses, which must not occur
	base     netip.Prefix         // prefix of all plaintext addresses
	underlay netip.Prefix         // prefix of the fabric's own packets
}

// place is the location of a plaintext address.
type place struct {
	port, tenant string // the router's port to its node
}

// plainLayers are the allowed protocol stacks. The layers after ICMPv6 are those of a quoted packet.
var plainLayers = []string{
	"ipv6:tcp", "ipv6:tcp:data", "ipv6:udp", "ipv6:udp:data", "ipv6:icmpv6", "ipv6:icmpv6:data",
	"ipv6:ipv6.fraghdr:data", "ipv6:ipv6.fraghdr:udp:data", "ipv6:ipv6.fraghdr:icmpv6:data",
	"ipv6:icmpv6:ipv6:udp:data", "ipv6:icmpv6:ipv6:tcp", "ipv6:icmpv6:ipv6:tcp:data",
}

// findings returns the errors in the frames of a recording. A partial checksum is an error unless the senders leave
// checksums to their devices.
func (j judge) findings(t *testing.T, r recording, frames []frame, offload bool) []string {
	t.Helper()
	var all []string
	for _, f := range frames {
		if fault := j.fault(f, offload); fault != "" {
			all = append(all, fmt.Sprintf("frame %d: %s on port %s", f.number, fault, f.port))
		}
	}
	return append(all, j.ciphertexts(t, r)...)
}

// ciphertexts finds frames that contain the first or the second half of a ciphertext address. In a display filter,
// "frame" means all bytes of the frame.
func (j judge) ciphertexts(t *testing.T, r recording) []string {
	t.Helper()
	var filter, all []string
	for _, a := range j.secret {
		b := a.As16()
		filter = append(filter, "frame contains "+colons(b[:8]), "frame contains "+colons(b[8:]))
	}
	for _, line := range r.tshark(t, "-Y", strings.Join(filter, " || "), "-e", "frame.number") {
		if line != "" {
			all = append(all, "frame "+line+": ciphertext")
		}
	}
	return all
}

func (j judge) fault(f frame, offload bool) string {
	if len(f.source) == 0 || len(f.source) != len(f.destination) {
		return "not IPv6: " + f.layers
	}
	layers := strings.TrimPrefix(f.layers, "eth:ethertype:")
	if j.fabricsOwn(f, layers) {
		return ""
	}
	if !slices.Contains(plainLayers, layers) {
		return "not plain: " + layers
	}
	if f.checksum == badChecksum && !(offload && f.partial()) {
		return "checksum"
	}
	from, to := j.places[f.source[0]], j.places[f.destination[0]]
	switch {
	case from == place{}:
		return fmt.Sprintf("source %v is no container's", f.source[0])
	case to == place{}:
		return fmt.Sprintf("destination %v is no container's", f.destination[0])
	case from.tenant != to.tenant:
		return "two tenants"
	case from.port == to.port:
		return "same node, but on the fabric"
	case f.port != from.port && f.port != to.port:
		return "on a port of neither node"
	case len(f.source) > 1 && (f.source[1] != f.destination[0] || f.destination[1] != f.source[0]):
		return "quotes a packet of others"
	}
	return ""
}

// fabricsOwn reports whether a packet is not from or to a container, but neighbour discovery, a stream of the
// orchestrator or a sentinel.
func (j judge) fabricsOwn(f frame, layers string) bool {
	for _, a := range slices.Concat(f.source, f.destination) {
		if !j.underlay.Contains(a) && !a.IsLinkLocalUnicast() && !a.IsMulticast() && !a.IsUnspecified() {
			return false
		}
	}
	return slices.ContainsFunc([]string{"ipv6:tcp", "ipv6:icmpv6", "ipv6:ipv6.hopopts:icmpv6"}, func(own string) bool {
		return strings.HasPrefix(layers, own)
	}) || layers == "ipv6:udp:data"
}

// colons formats bytes for a display filter.
func colons(b []byte) string {
	text := make([]string, len(b))
	for i := range b {
		text[i] = hex.EncodeToString(b[i : i+1])
	}
	return strings.Join(text, ":")
}
