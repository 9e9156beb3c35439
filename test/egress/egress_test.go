// Package egress_test tests in labs with hosts outside of the cluster what egress rules, egress gateways, policies and
// the setting for nodes let pass (NP1, §6.1 to §6.3), with real tools in containers and tshark as a judge.
package egress_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// spec has an encrypted and a clear tenant, and two hosts outside.
func spec() lab.Spec {
	return lab.Spec{
		Nodes:   []string{"n1", "n2", "n3"},
		Outside: []lab.OutsideHost{{Name: "internet"}, {Name: "far"}},
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "glass", Addressing: tenant.Clear}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
			{Name: "b2", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "db"}},
			{Name: "b3", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "db"}},
			{Name: "g1", Node: "n1", Tenant: "glass"}, {Name: "g2", Node: "n2", Tenant: "glass"},
		},
	}
}

// tenants are the tenants of spec with a container on n1 each.
var tenants = map[string]string{"blue": "b1", "glass": "g1"}

// TestEgress has one lab for what rules allow; its parts follow one another.
func TestEgress(t *testing.T) {
	b := newBed(t, spec())
	ctx := labtest.Context(t)
	t.Run("closed by default", func(t *testing.T) { b.of(t).closed(ctx) })
	t.Run("inbound before a rule", func(t *testing.T) { b.of(t).inbound() })
	for name, container := range tenants {
		t.Run("allowed for "+name, func(t *testing.T) { b.of(t).allowed(ctx, name, container) })
	}
	t.Run("inbound", func(t *testing.T) { b.of(t).inbound() })
	t.Run("hop limit", func(t *testing.T) { b.of(t).hopLimit() })
	t.Run("tools", func(t *testing.T) { b.of(t).tools(ctx) })
	t.Run("path MTU", func(t *testing.T) { b.of(t).pathMTU() })
	t.Run("denied", func(t *testing.T) { b.of(t).denied(ctx) })
	t.Run("protected", func(t *testing.T) { b.of(t).protected() })
	t.Run("ipBlock", func(t *testing.T) { b.of(t).ipBlock(ctx) })
	t.Run("removed", func(t *testing.T) { b.of(t).removed(ctx) })
}

// closed: without a rule, a container has no route out, and a rule for another tenant changes nothing.
func (b bed) closed(ctx context.Context) {
	b.allow(ctx, "blue", everywhere)
	b.reaches("b1", b.address("internet"))
	if is := b.try("g1", netip.Addr{}, b.address("internet")); is != routeless {
		b.Errorf("g1, whose tenant has no rule: %s", is)
	}
	must(b.T, b.DeleteEgress(ctx, "blue", everywhere))
	b.becomes("b1", b.address("internet"), routeless)
}

// inbound: hosts outside reach no container, by none of its addresses.
func (b bed) inbound() {
	for _, c := range b.Containers() {
		for _, to := range []netip.Addr{c.Address, c.Plaintext} {
			if is := b.try("internet", netip.Addr{}, to); is == reached {
				b.Errorf("internet connects to %s at %v", c.Name, to)
			}
		}
	}
}

// allowed: a running container gets a route with the first rule; TCP, UDP and echoes pass; the server sees one address
// of the container's own.
func (b bed) allowed(ctx context.Context, tenantName, container string) {
	to := b.address("internet")
	b.allow(ctx, tenantName, everywhere)
	seen := b.reaches(container, to)
	b.isEgress(seen, "n1")
	if routes, err := b.Output(ctx, container, "ip", "-6", "route", "show", "default"); routes == "" {
		b.Errorf("%s has no default route: %v", container, err)
	}
	for range 3 {
		if again := b.reaches(container, to); again != seen {
			b.Errorf("the server sees %v, then %v", seen, again)
		}
	}
	if by, err := b.datagram(container, netip.Addr{}, b.address("far"), patience); err != nil || by != seen {
		b.Errorf("by UDP, the server sees %v (%v), want %v", by, err, seen)
	}
	e, err := b.Ping(ctx, container, "internet", packet.PingOptions{Count: 3, Timeout: patience, Size: 1200})
	if err != nil || e.Received != 3 {
		b.Errorf("ping: %+v, %v", e, err)
	}
	if is := b.try("internet", netip.Addr{}, seen); is == reached {
		b.Errorf("the server connects to %v", seen)
	}
	for _, c := range b.Containers() {
		if c.Tenant == tenantName && c.Name != container {
			if other := b.reaches(c.Name, to); other == seen {
				b.Errorf("%s and %s are both seen as %v", container, c.Name, seen)
			} else {
				b.isEgress(other, c.Node)
			}
		}
	}
	b.judged(container, seen, fmt.Sprintf("%v>%v", seen, to))
	who, err := b.Output(ctx, "n1", "pilaster", "egress", "who", seen.String())
	if err != nil || !strings.Contains(who, container) {
		b.Errorf("egress who %v: %q, %v; want %s", seen, who, err, container)
	}
}

// isEgress checks that an address is an egress address of a node.
func (b bed) isEgress(seen netip.Addr, node string) {
	b.Helper()
	prefix, err := b.Prefix(node)
	must(b.T, err)
	if !tenant.IsEgressAddress(seen) || !prefix.Contains(seen) || address.Split(seen).Index < tenant.FirstEgressIndex {
		b.Errorf("the server sees %v, which is no egress address of a container on %s", seen, node)
	}
}

// hopLimit: the error of a router reaches the container, and quotes what the container sent.
func (b bed) hopLimit() {
	for _, sender := range tenants {
		ns, err := b.Namespace(sender)
		must(b.T, err)
		defer ns.Close()
		capture, err := packet.NewCapture(ns, lab.Interface, packet.IncomingOnly)
		must(b.T, err)
		defer capture.Close()
		inject, err := packet.NewInjector(ns, lab.Interface)
		must(b.T, err)
		defer inject.Close()
		gateway, err := b.Gateway(sender)
		must(b.T, err)
		sentinel := packet.NewSentinel()
		p := packet.Packet{
			Source: b.address(sender), Destination: b.address("internet"), HopLimit: 2, // the router's
			Body: packet.UDP{SourcePort: 9, DestinationPort: 33434, Payload: sentinel[:]},
		}
		must(b.T, inject.Send(p.Frame(gateway, inject.MAC())))
		all, err := capture.Until(labtest.Context(b.T), sentinel.In)
		must(b.T, err)
		frame := all[len(all)-1].Frame
		got, err := packet.DecodeFrame(frame)
		must(b.T, err)
		failed, is := got.Body.(packet.ICMP)
		if !is || failed.Type != packet.TimeExceeded || got.Destination != p.Source || !packet.ChecksumOK(frame[14:]) ||
			!strings.HasPrefix(got.Source.String(), "2001:db8:70:") {
			b.Fatalf("the router's error to %s: %+v", sender, got)
		}
		quoted, err := packet.Decode(failed.Payload)
		if err != nil || quoted.Source != p.Source || quoted.Destination != p.Destination ||
			!packet.ChecksumOK(failed.Payload) {
			b.Errorf("%s: quoted: %+v, %v", sender, quoted, err)
		}
	}
}

// tools: curl and iperf3 in containers.
func (b bed) tools(ctx context.Context) {
	for _, container := range tenants {
		seen := b.reaches(container, b.address("internet"))
		said, err := b.Output(ctx, container, "curl", "-sS", "-g", "-m", "20", "http://internet/")
		if err != nil || strings.TrimSpace(said) != seen.String() {
			b.Errorf("curl in %s: %q, %v; want %v", container, said, err, seen)
		}
		server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-6", "-p", "5201", "--forceflush")
		out, err := server.StdoutPipe()
		must(b.T, err)
		must(b.T, b.Launch("far", server))
		ready := make([]byte, 1)
		if _, err := out.Read(ready); err != nil {
			b.Fatal(err)
		}
		go io.Copy(io.Discard, out)
		report, err := b.Output(ctx, container, "iperf3", "-c", b.address("far").String(), "-n", "20M", "-R", "-J")
		var result struct {
			End struct {
				Received struct{ Bytes float64 } `json:"sum_received"`
			}
		}
		err = errors.Join(err, json.Unmarshal([]byte(report), &result))
		if err != nil || result.End.Received.Bytes < 20e6 {
			b.Errorf("iperf3 in %s: %.0f bytes, %v", container, result.End.Received.Bytes, err)
		}
		must(b.T, server.Wait())
	}
}

// pathMTU: a link with a smaller MTU outside, of which only the router knows, ends no transfer.
func (b bed) pathMTU() {
	setMTU := func(mtu int) {
		router, err := b.Namespace(lab.Router)
		must(b.T, err)
		defer router.Close()
		h, err := router.Netlink()
		must(b.T, err)
		defer h.Close()
		link, err := h.LinkByName("far")
		must(b.T, err)
		must(b.T, h.LinkSetMTU(link, mtu))
	}
	setMTU(1400)
	defer setMTU(1500)
	content := make([]byte, 1<<20)
	for _, container := range tenants {
		f, err := b.connect(container, netip.Addr{}, b.address("far"), patience)
		must(b.T, err)
		got := make(chan error, 1)
		go func() {
			_, err := io.CopyN(io.Discard, f.reader, int64(len(content)))
			got <- err
		}()
		_, err = f.Write(content)
		if err = errors.Join(err, <-got); err != nil {
			b.Errorf("%s, 1 MB by a link with MTU 1400: %v", container, err)
		}
		f.Close()
	}
}

// denied: a rule that denies a part answers with an error at once, not with silence.
func (b bed) denied(ctx context.Context) {
	host := netip.PrefixFrom(b.address("far"), 128)
	for name, container := range tenants {
		b.deny(ctx, name, host)
		b.becomes(container, host.Addr(), denied)
		if f, err := b.connect(container, netip.Addr{}, host.Addr(), patience); outcomeOf(err) != denied {
			b.Errorf("%s connects to %v: %v, %v", container, host, f, err)
		}
		if n := b.drops(ctx, "n1", "egress-denied"); n == 0 {
			b.Errorf("no packet was dropped with reason egress-denied")
		}
		b.reaches(container, b.address("internet"))
		must(b.T, b.DeleteEgress(ctx, name, host))
		b.reaches(container, host.Addr())
	}
}

// protected: no rule leads to addresses of the cluster, the node, its link, or private IPv4 addresses by NAT64.
func (b bed) protected() {
	n1, err := b.Prefix("n1")
	must(b.T, err)
	n2, err := b.Prefix("n2")
	must(b.T, err)
	uplink := netip.MustParseAddr("2001:db8:70:1::2") // n1's own: the orchestrator has link 0
	for name, container := range tenants {
		other := map[string]string{"blue": "g2", "glass": "b2"}[name]
		seen := b.reaches(other, b.address("internet"))
		for what, to := range map[string]netip.Addr{
			"the own node":           n1.Addr().Next(),
			"the own node's uplink":  uplink,
			"another node":           n2.Addr().Next(),
			"another tenant":         b.plaintext(other),
			"an egress address":      seen,
			"a tunnel address":       tenant.EgressTunnel(n2),
			"a private address":      netip.MustParseAddr("fc00:dead::1"),
			"a machine's metadata":   netip.MustParseAddr("fd00:ec2::254"),
			"10.0.0.1 by NAT64":      netip.MustParseAddr("64:ff9b::a00:1"),
			"169.254.1.1 by NAT64":   netip.MustParseAddr("64:ff9b::a9fe:101"),
			"another prefix's NAT64": netip.MustParseAddr("64:ff9b:1::7"),
		} {
			if is := b.try(container, netip.Addr{}, to); is == reached || is == outcome(unix.ECONNREFUSED.Error()) {
				b.Errorf("%s reaches %s, %v: %s", container, what, to, is)
			}
		}
	}
}

// ipBlock: a policy selects hosts outside by their addresses only.
func (b bed) ipBlock(ctx context.Context) {
	egressTo := func(peer string) string {
		return `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "out"},
			"spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"],
				"egress": [{"to": [` + peer + `]}]}}`
	}
	policy := egressTo(fmt.Sprintf(`{"ipBlock": {"cidr": "%v/128"}}`, b.address("internet")))
	b.apply(ctx, "blue", policy)
	b.becomes("b1", b.address("far"), silent)
	b.reaches("b1", b.address("internet"))
	b.reaches("b3", b.address("far")) // not selected
	b.apply(ctx, "blue", egressTo(`{"podSelector": {}}`))
	b.becomes("b1", b.address("internet"), silent) // every container, but no host outside
	b.unapply(ctx, "blue", policy)
	b.reaches("b1", b.address("internet"))
}

// removed: with its rule, a flow ends.
func (b bed) removed(ctx context.Context) {
	for name, container := range tenants {
		f, err := b.connect(container, netip.Addr{}, b.address("internet"), patience)
		must(b.T, err)
		must(b.T, f.echo(patience))
		must(b.T, b.DeleteEgress(ctx, name, everywhere))
		labtest.Until(b.T, patience, "the connection of "+container+" ends", func() bool {
			var timeout net.Error
			err := f.echo(silence)
			return errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, unix.EACCES) ||
				errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH)
		})
		f.Close()
		b.becomes(container, b.address("internet"), routeless)
	}
}
