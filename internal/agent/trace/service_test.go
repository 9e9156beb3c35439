package trace_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
)

// TestService: a trace to a service names it, goes on to one of its backends, and says why there is none.
func TestService(t *testing.T) {
	const vip, far = "fd70:696c:7300:5::1", "fd70:696c:6100:77::/64"
	for name, c := range map[string]struct {
		to                  string
		protocol            uint8
		backend             string   // local, far or itself: to trace to
		has                 []string // backends, likewise
		draining            []string
		affinity            time.Duration
		want, says, entry   string // of the stage "service"
		source, destination string // after the last step
	}{
		"to a backend here": {has: []string{"local", "far"},
			want:   "container, service, endpoint, policy, policy, deliver: delivered",
			source: "c1", destination: "local",
			says: "the service has 2 endpoints, of which a connection gets one at random; this way leads to " +
				"[LOCAL]:8080",
			entry: "services: [" + vip + "]:80"},
		"to a backend on another node": {has: []string{"far"}, source: "plain c1", destination: "plain far",
			want: "container, service, translate, next hop, policy: sent", says: "1 endpoint,"},
		"to the one that was asked for": {has: []string{"local", "far"}, backend: "far",
			want: "container, service, translate, next hop, policy: sent"},
		"to one that drains": {has: []string{"local"}, draining: []string{"far"}, backend: "far",
			want: "container, service, translate, next hop, policy: sent"},
		"with affinity": {has: []string{"local"}, affinity: time.Hour,
			want: "container, service, endpoint, policy, policy, deliver: delivered",
			says: "at random, or that of the client's connections in the last 1h0m0s"},
		"to itself": {has: []string{"itself"}, want: "container, service, deliver: delivered",
			source: "fd70:696c:7300:5::", destination: "c1"},
		"without a backend": {has: []string{}, draining: []string{"local"},
			want: "container, service: dropped no-backend", says: "no endpoint for clients on this node",
			entry: "services: [" + vip + "]:80"},
		"to no service": {want: "container, service: dropped no-service", says: "port 80/TCP",
			entry: "no [" + vip + "]:80 in services"},
		"to another tenant's service": {to: "fd70:696c:7300:6::1", has: []string{"local"},
			want: "container, service: dropped no-service", says: "fd70:696c:7300:6::1 is no service of tenant blue"},
		"to the alias": {to: "fd70:696c:7300:5::", want: "container, service: dropped no-session", says: "alias"},
		"by ping": {has: []string{"local"}, protocol: packet.ProtocolICMPv6,
			want: "container, service: dropped service-protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			b, tracer := newBed(t)
			blue := b.Orchestrator.Tenants["blue"]
			blue.ServicesNumber, blue.Changes = 5, blue.Changes+1
			if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
				t.Fatal(err)
			}
			seen := map[string]netip.Addr{"c1": b.c1.Attachments[0].Address, "plain c1": b.c1.Attachments[0].Plaintext}
			backends := map[string]dpapi.Backend{
				"local":  {Plain: b.c2.Attachments[0].Plaintext, Seen: b.c2.Attachments[0].Address, Port: 8080},
				"far":    {Plain: b.far(netip.MustParsePrefix(far)), Port: 8080},
				"itself": {Plain: seen["plain c1"], Seen: seen["c1"], Port: 8080},
			}
			for name, is := range backends {
				seen[name], seen["plain "+name] = is.Seen, is.Plain
			}
			key := dpapi.FrontendKey{Address: netip.MustParseAddrPort("[" + vip + "]:80"), Protocol: packet.ProtocolTCP}
			f := dpapi.Frontend{FrontendKey: key, Affinity: c.affinity}
			for _, name := range c.has {
				f.Backends = append(f.Backends, backends[name])
			}
			for _, name := range c.draining {
				f.Draining = append(f.Draining, backends[name])
			}
			if c.has != nil {
				if err := b.Driver.PutServices([]dpapi.Frontend{f}); err != nil {
					t.Fatal(err)
				}
			}
			of := agent.Connection{
				Source: seen["c1"], Destination: key.Address.Addr(), Protocol: key.Protocol, Port: 80,
			}
			if c.to != "" {
				of.Destination = netip.MustParseAddr(c.to)
			}
			if c.protocol != 0 {
				of.Protocol, of.Port = c.protocol, 0
			}
			got, err := tracer.Trace(t.Context(), of, trace.Way{Backend: seen["plain "+c.backend]})
			if err != nil || summary(got) != c.want {
				t.Fatalf("%s, %v; want %s", summary(got), err, c.want)
			}
			says := strings.ReplaceAll(c.says, "LOCAL", seen["local"].String())
			s := got.Steps[1]
			if !strings.Contains(s.Detail, says) || c.entry != "" && s.Entry != c.entry {
				t.Errorf("%s, %s; want %s, %s", s.Detail, s.Entry, says, c.entry)
			}
			last := got.Steps[len(got.Steps)-1]
			for want, is := range map[string]string{c.source: last.Source, c.destination: last.Destination} {
				if a, ok := seen[want]; ok {
					want = a.String()
				}
				if want != "" && is != want {
					t.Errorf("after the last step %s, want %s", is, want)
				}
			}
			if n := len(got.Backends); n != 0 && (n != len(c.has)+len(c.draining) || got.Backends[0].Port != 8080 ||
				c.backend != "" && got.Backends[0].Plaintext != seen["plain "+c.backend].String()) {
				t.Errorf("backends %v", got.Backends)
			}
			if n := len(got.Backends); n == 0 && got.Verdict != "dropped" {
				t.Error("no backends")
			}
			other := trace.Way{Backend: netip.MustParseAddr("fc00::5")}
			if _, err := tracer.Trace(t.Context(), of, other); got.Verdict != "dropped" &&
				!errors.Is(err, refusal.ErrInvalid) {
				t.Errorf("to a backend that the service does not have: %v", err)
			}
		})
	}
}
