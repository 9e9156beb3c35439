package accelerate_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
)

// The daemon does not start where a cache would change verdicts. It names the rule or device, and changes nothing.
func TestRefusals(t *testing.T) {
	n := flannel(t)[0]
	const vxlan = "link add other address 02:fa:00:00:00:31 type vxlan id 9 dev eth0 dstport 4790 "
	v6 := vxlan + "local 2001:db8::1 "
	for _, c := range []struct{ name, make, undo, overlay, says string }{
		{"legacy rule", "! iptables-legacy -w -A FORWARD -m quota --quota 9 -j DROP",
			"! iptables-legacy -w -F FORWARD", "", "iptables-legacy table filter, chain FORWARD, rule 1: quota"},
		{"nft rule", "! iptables-nft -w -A FORWARD -m statistic --mode random --probability 0.5 -j DROP",
			"! iptables-nft -w -F FORWARD", "", "chain FORWARD, rule with handle"},
		{"qdisc of the overlay", "! tc qdisc add dev flannel.1 root tbf rate 1mbit burst 10k latency 50ms",
			"! tc qdisc del dev flannel.1 root", "", "flannel.1 has a qdisc tbf"},
		{"qdisc of the bridge", "! tc qdisc add dev cni0 root tbf rate 1mbit burst 10k latency 50ms",
			"! tc qdisc del dev cni0 root", "", "cni0 has a qdisc tbf"},
		{"no device", "", "", "none", "none: Link not found"},
		{"no VXLAN device", "", "", "cni0", "cni0 is a device of type bridge, not vxlan"},
		{"external", "link add other type vxlan external dstport 4790", "link del other", "other", "other is external"},
		{"no local address", vxlan, "link del other", "other", "other has no local address"},
		{"group policy", vxlan + "local 192.0.2.1 gbp", "link del other", "other", "other has a group policy (gbp)"},
		{"type of service", vxlan + "local 192.0.2.1 tos 16", "link del other", "other", "sets the type of service"},
		{"IPv6 checksums", v6, "link del other", "other", "udp6zerocsumtx and udp6zerocsumrx"},
		{"IPv6 checksums sent", v6 + "noudp6zerocsumtx udp6zerocsumrx", "link del other", "other", "udp6zerocsumtx"},
		{"IPv6 checksums wanted", v6 + "udp6zerocsumtx noudp6zerocsumrx", "link del other", "other", "udp6zerocsumrx"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ip(t, n.ns, "%s", c.make)
			other := *n
			if c.overlay != "" {
				other.overlay = c.overlay
			}
			d := other.accelerate(t)
			select {
			case <-d.ended:
			default:
				t.Fatal("the daemon has started")
			}
			if said := d.log.String(); d.code != 1 || !strings.Contains(said, c.says) ||
				!strings.Contains(said, "nothing was changed") {
				t.Errorf("got exit code %d: %s; want 1 and %q", d.code, said, c.says)
			}
			ip(t, n.ns, "%s", c.undo)
		})
	}
	// An overlay with an IPv6 underlay is accepted without checksums.
	ip(t, n.ns, "%s", v6+"udp6zerocsumtx udp6zerocsumrx")
	other := *n
	other.overlay = "other"
	d := other.accelerate(t)
	if s, err := d.Status(t.Context()); err != nil || s.Overlay.Local != "2001:db8::1" || !s.InUse {
		t.Errorf("IPv6 underlay: %+v, %v", s, err)
	}
}

// A second daemon for the overlay does not start, whatever its socket. The first one goes on. Only root can keep a
// daemon from starting.
func TestSecondDaemon(t *testing.T) {
	both := flannel(t)
	n := both[0]
	taken := inside(t, n.ns, func() (net.Listener, error) { // which any user may take
		return net.Listen("unix", "@pilaster-accelerate/flannel.1")
	})
	defer taken.Close()
	first := n.accelerate(t)
	locks := n.locks(t)
	if len(locks) != 1 {
		t.Fatalf("got lock files %q, want one: %s", locks, first.log)
	}
	if fi, err := os.Stat(locks[0]); err != nil || fi.Mode() != 0o600 {
		t.Errorf("lock file: mode %v, %v, want 0600", fi.Mode(), err)
	}
	second := n.accelerate(t, "--socket", filepath.Join(n.dir, "other.sock"))
	select {
	case <-second.ended:
	default:
		t.Fatal("the second daemon has started")
	}
	want := fmt.Sprintf("accelerates flannel.1 already (process %d, socket %s)", first.process.Pid, n.socket())
	if said := second.log.String(); second.code != 1 || !strings.Contains(said, want) {
		t.Errorf("got exit code %d: %s", second.code, said)
	}
	both[1].accelerate(t) // in another namespace
	c := talk(t, n.only(), both[1].only())
	must(t, c.echo(50))
	first.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 30 })
	first.end(unix.SIGKILL) // the file stays, the lock does not
	third := n.accelerate(t)
	third.until(t, "use", func(s accelerate.Status) bool { return s.InUse })
	third.end(unix.SIGTERM)
	if left := n.locks(t); len(left) > 0 {
		t.Errorf("after the end there are lock files: %q", left)
	}
}
