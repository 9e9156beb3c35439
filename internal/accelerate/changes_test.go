package accelerate_test

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/netns"
)

// evictions returns the causes with evictions.
func evictions(s accelerate.Status) map[string]uint64 {
	all := maps.Clone(s.Evictions)
	maps.DeleteFunc(all, func(_ string, n uint64) bool { return n == 0 })
	return all
}

// A change of a value evicts what it concerns, a change of a state evicts nothing.
func TestEvictions(t *testing.T) {
	both := flannel(t)
	n := both[0]
	c := talk(t, n.only(), both[1].only())
	d := n.accelerate(t)
	must(t, c.echo(20))
	d.until(t, "entries", func(s accelerate.Status) bool { return s.Entries.Flows == 1 && s.Entries.VTEPs == 1 })
	ip(t, n.ns, "! bridge fdb add 02:fa:00:00:00:0a dev flannel.1 dst 192.0.2.11")
	const fdb = "! bridge fdb replace 02:fa:00:00:00:02 dev flannel.1 dst 192.0.2."
	for _, step := range []struct {
		change string
		cause  string // "" if nothing is evicted
		flows  int
	}{
		{"neigh replace 10.244.2.0 lladdr 02:fa:00:00:00:02 dev flannel.1 nud reachable", "", 1},
		{"neigh replace 10.244.9.0 lladdr 02:fa:00:00:00:09 dev flannel.1 nud permanent", "", 1},
		{"! bridge fdb add 02:fa:00:00:00:09 dev flannel.1 dst 192.0.2.9", "", 1},
		{"! bridge fdb replace 02:fa:00:00:00:09 dev flannel.1 dst 192.0.2.8", "fdb", 1}, // of another node
		{"route add 10.244.9.0/24 via 10.244.9.0 dev flannel.1 onlink", "", 1},
		{fdb + "3", "fdb", 0},
		{fdb + "2", "fdb", 1},
		{"neigh replace 10.244.2.0 lladdr 02:fa:00:00:00:09 dev flannel.1 nud permanent", "neighbour", 0},
		{"neigh replace 10.244.2.0 lladdr 02:fa:00:00:00:02 dev flannel.1 nud permanent", "neighbour", 1},
		{"route replace 10.244.2.0/24 via 10.244.9.0 dev flannel.1 onlink", "route", 0},
		{"route replace 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink", "route", 1},
		{"rule add from 10.9.9.9 lookup 99", "rule", 1},
		{"link set cni0 mtu 1400", "link", 1},
		{"link set veth1 mtu 1440", "link", 1},
		{"link set veth1 type bridge_slave isolated on", "link", 1},
		{"! iptables-nft -w -A FORWARD -s 10.9.9.9 -j DROP", "nftables", 1},
	} {
		before, err := d.Status(t.Context())
		must(t, err)
		ip(t, n.ns, "%s", step.change)
		want := evictions(before)
		if step.cause != "" {
			want[step.cause]++
		}
		for i := range 2 { // after this change the daemon has processed the one before
			ip(t, n.ns, "! bridge fdb replace 02:fa:00:00:00:0a dev flannel.1 dst 192.0.2.%d", 10+i)
		}
		want["fdb"] += 2
		s := d.until(t, "notifications", func(s accelerate.Status) bool { return s.Evictions["fdb"] >= want["fdb"] })
		if got := evictions(s); !maps.Equal(got, want) {
			t.Errorf("%s: evictions %v, want %v", step.change, got, want)
		}
		if step.flows == 0 {
			if s.Entries.Flows != 0 {
				t.Errorf("%s: %d flows, want none", step.change, s.Entries.Flows)
			}
			continue
		}
		must(t, c.echo(20))
		d.until(t, "flow after "+step.change, func(s accelerate.Status) bool { return s.Entries.Flows == step.flows })
	}
}

// Containers that start use the cache, and those that end leave nothing.
func TestContainers(t *testing.T) {
	for name, a := range arrangements {
		t.Run(name, func(t *testing.T) {
			both := a.make(t)
			n := both[0]
			d := n.accelerate(t)
			device := strings.TrimSuffix(a.containers[0], "1") + "7"
			added := n.add(t, device, 7)
			d.until(t, "container", func(s accelerate.Status) bool {
				return slices.Contains(s.Containers.Devices, device)
			})
			c := talk(t, added, both[1].only())
			must(t, c.echo(50))
			d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 30 && s.Ingress.Hits > 30 })
			ip(t, n.ns, "link del %s", device)
			s := d.until(t, "end", func(s accelerate.Status) bool {
				return slices.Equal(s.Containers.Devices, a.containers)
			})
			if s.Entries.Flows != 0 || s.Entries.Local != 0 || len(s.Containers.Excluded) != 0 {
				t.Errorf("entries of an ended container: %+v, excluded %v", s.Entries, s.Containers.Excluded)
			}
		})
	}
}

// The daemon follows an overlay whose device is replaced, as Flannel does when its configuration changes.
func TestOverlayReplaced(t *testing.T) {
	both := flannel(t)
	n := both[0]
	d := n.accelerate(t)
	ip(t, n.ns, "link del flannel.1")
	d.until(t, "problem", func(s accelerate.Status) bool {
		return !s.InUse && len(s.Problems) == 1 && strings.Contains(s.Problems[0], "flannel.1")
	})
	for _, n := range both {
		ip(t, n.ns, "link add flannel.2 address 02:fa:00:00:00:0%[1]d mtu 1450 type vxlan id 7 dev eth0 "+
			"local 192.0.2.%[1]d dstport 8473 nolearning", n.number)
	}
	ip(t, both[1].ns, "link del flannel.1")
	for _, n := range both {
		ip(t, n.ns, `
			link set flannel.2 name flannel.1
			addr add 10.244.%[1]d.0/32 dev flannel.1
			link set flannel.1 up
			neigh add 10.244.%[2]d.0 lladdr 02:fa:00:00:00:0%[2]d dev flannel.1 nud permanent
			! bridge fdb add 02:fa:00:00:00:0%[2]d dev flannel.1 dst 192.0.2.%[2]d
			route add 10.244.%[2]d.0/24 via 10.244.%[2]d.0 dev flannel.1 onlink`, n.number, 3-n.number)
	}
	d.until(t, "the new device", func(s accelerate.Status) bool {
		return s.InUse && s.Overlay.VNI == 7 && s.Overlay.Port == 8473 && len(s.Overlay.VTEPs) == 1
	})
	c := talk(t, n.only(), both[1].only())
	must(t, c.echo(50))
	d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 30 })
}

// A rule that makes verdicts depend on more than the flow turns the cache off until it is gone.
func TestRuleAppears(t *testing.T) {
	both := flannel(t)
	n := both[0]
	c := talk(t, n.only(), both[1].only())
	d := n.accelerate(t)
	must(t, c.echo(20))
	const rule = "FORWARD -m limit --limit 10000/s -j ACCEPT"
	ip(t, n.ns, "! iptables-nft -w -A "+rule)
	before := d.until(t, "problem", func(s accelerate.Status) bool {
		return !s.InUse && len(s.Problems) == 1 && strings.Contains(s.Problems[0], "chain FORWARD") &&
			strings.HasSuffix(s.Problems[0], ": limit")
	})
	must(t, c.echo(50))
	s, err := d.Status(t.Context())
	if err != nil || s.Egress.Hits != before.Egress.Hits || s.Egress.Learnt != before.Egress.Learnt {
		t.Errorf("the cache was used: %+v, before %+v, %v", s.Egress, before.Egress, err)
	}
	ip(t, n.ns, "! iptables-nft -w -D "+rule)
	d.until(t, "use", func(s accelerate.Status) bool { return s.InUse && len(s.Problems) == 0 })
	must(t, c.echo(50))
	d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > before.Egress.Hits })
}

// A container whose veth gets a qdisc or filter leaves the cache; the others stay.
func TestQdiscAppears(t *testing.T) {
	both := flannel(t)
	n := both[0]
	n.add(t, "veth7", 7)
	d := n.accelerate(t)
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	veth7, err := h.LinkByName("veth7")
	must(t, err)
	filter := filterOf(veth7, returning(t, 0))
	tc := func(line string) func() { return func() { ip(t, n.ns, "! tc qdisc %s", line) } }
	for _, step := range []struct {
		what, why string
		change    func()
	}{
		{"qdisc", "veth7 has a qdisc tbf", tc("add dev veth7 root tbf rate 1mbit burst 10k latency 50ms")},
		{"no qdisc", "", tc("del dev veth7 root")},
		{"clsact", "", tc("add dev veth7 clsact")},
		{"filter", "veth7 has a tc ingress filter (bpf)", func() { must(t, h.FilterAdd(filter)) }},
		{"no filter", "", func() { must(t, h.FilterDel(filter)) }},
	} {
		step.change()
		d.until(t, step.what, func(s accelerate.Status) bool {
			joined := slices.Contains(s.Containers.Devices, "veth7")
			return s.Containers.Excluded["veth7"] == step.why && joined == (step.why == "") && s.InUse
		})
	}
}

// filterOf returns a filter for what a device receives.
func filterOf(l netlink.Link, p *ebpf.Program) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1,
			Protocol: unix.ETH_P_ALL,
		},
		Fd: p.FD(), Name: "other", DirectAction: true,
	}
}

// returning returns a program of another process, which returns a verdict for all packets.
func returning(t *testing.T, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "other", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// A container with a tcx program of another process does not use the cache, and a path with one is refused.
func TestOtherPrograms(t *testing.T) {
	n := flannel(t)[0]
	other := returning(t, 0)
	attach := func(device string) link.Link {
		return inside(t, n.ns, func() (link.Link, error) {
			d, err := net.InterfaceByName(device)
			if err != nil {
				return nil, err
			}
			return link.AttachTCX(link.TCXOptions{Interface: d.Index, Program: other, Attach: ebpf.AttachTCXIngress})
		})
	}
	l := attach("veth1")
	d := n.accelerate(t)
	d.until(t, "exclusion", func(s accelerate.Status) bool {
		return s.Containers.Excluded["veth1"] == "veth1 has a tcx ingress program, other, of another process" && s.InUse
	})
	must(t, l.Close())
	d.end(unix.SIGTERM)
	for _, device := range []string{"flannel.1", "cni0", "eth0"} {
		l := attach(device)
		d := n.accelerate(t)
		want, said := device+" has a tcx ingress program, other", d.log.String()
		if d.code != 1 || !strings.Contains(said, want) {
			t.Errorf("got exit code %d: %s; want 1 and %q", d.code, said, want)
		}
		must(t, l.Close())
	}
}

func setting(t *testing.T, ns *netns.Namespace) string {
	t.Helper()
	b := inside(t, ns, func() ([]byte, error) {
		return os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	})
	return strings.TrimSpace(string(b))
}

const tracking = "! iptables-nft -w -A FORWARD -m conntrack --ctstate INVALID -j DROP"

// The setting of conntrack is changed only if the namespace tracks connections. The end of the daemon and reset restore
// it, reset after a kill too. A connection that used the cache survives all of it.
func TestSettings(t *testing.T) {
	both := flannel(t)
	n := both[0]
	d := n.accelerate(t)
	if v := setting(t, n.ns); v != "0" {
		t.Fatalf("without conntrack: %s, want 0", v)
	}
	ip(t, n.ns, tracking) // appears later
	d.until(t, "setting", func(s accelerate.Status) bool { return s.Tracks && len(s.Settings) == 1 })
	if v := setting(t, n.ns); v != "1" {
		t.Fatalf("with conntrack: %s, want 1", v)
	}
	c := talk(t, n.only(), both[1].only())
	// Conntrack sees none of these bytes, so that the connection leaves its window.
	gap := func(d *daemon) {
		before := d.until(t, "lease", func(s accelerate.Status) bool { return s.InUse })
		must(t, c.echo(20))
		must(t, c.bulk(4<<20))
		d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > before.Egress.Hits+50 })
	}
	gap(d)
	d.end(unix.SIGTERM)
	if v := setting(t, n.ns); v != "0" || d.code != 0 {
		t.Fatalf("after the end: setting %s, exit code %d, want 0 and 0", v, d.code)
	}
	must(t, c.echo(20))

	d = n.accelerate(t)
	gap(d)
	d.end(unix.SIGKILL)
	if v := setting(t, n.ns); v != "1" {
		t.Fatalf("after a kill: %s, want 1", v)
	}
	must(t, c.echo(20))
	said, err := output(both[1].ns, command("accelerate reset --socket "+n.socket()))
	if err == nil || !strings.Contains(said, "of another network namespace") {
		t.Fatalf("reset in another namespace: %v: %s", err, said)
	}
	said, err = output(n.ns, command("accelerate reset --socket "+n.socket()))
	if v := setting(t, n.ns); err != nil || v != "0" || !strings.Contains(said, "tcp_be_liberal is 0 again") {
		t.Fatalf("after reset: setting %s, want 0: %v: %s", v, err, said)
	}
	must(t, c.echo(20))

	d = n.accelerate(t)
	gap(d)
	undone, err := d.Reset(t.Context())
	<-d.ended
	if v := setting(t, n.ns); err != nil || len(undone) != 1 || v != "0" || d.code != 0 {
		t.Fatalf("reset of a running daemon: %v, %v, setting %s, exit code %d", undone, err, v, d.code)
	}
	must(t, c.echo(20))
}

// Another program may change the setting back.
func TestSettingChanged(t *testing.T) {
	t.Parallel()
	n := flannel(t)[0]
	ip(t, n.ns, tracking)
	d := n.accelerate(t)
	const name = "net.netfilter.nf_conntrack_tcp_be_liberal"
	ip(t, n.ns, "! sysctl -qw %s=0", name)
	d.until(t, "problem", func(s accelerate.Status) bool {
		return !s.InUse && len(s.Problems) == 1 && strings.Contains(s.Problems[0], "nf_conntrack_tcp_be_liberal is 0")
	})
	ip(t, n.ns, "! sysctl -qw %s=1", name)
	d.until(t, "use", func(s accelerate.Status) bool { return s.InUse })
}

// A lower MTU of the overlay is in effect for cached flows: the sender learns it.
func TestMTU(t *testing.T) {
	both := flannel(t)
	n := both[0]
	c := talk(t, n.only(), both[1].only())
	d := n.accelerate(t)
	route := func() string {
		said, err := output(n.only(), exec.Command("ip", "route", "get", address(t, both[1].only()).String()))
		must(t, err)
		return said
	}
	must(t, c.bulk(1<<20))
	before := d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 10 })
	ip(t, n.ns, "link set flannel.1 mtu 1300")
	// The daemon learns of the change by an event, and what is sent before it may be too long.
	for end := time.Now().Add(10 * time.Second); ; {
		must(t, c.bulk(1<<20))
		r := route()
		if strings.Contains(r, "mtu 1300") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the sender does not know the MTU: %s", r)
		}
	}
	d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > before.Egress.Hits+10 })
}

// Calls of an operator.
func TestCalls(t *testing.T) {
	both := flannel(t)
	n := both[0]
	c := talk(t, n.only(), both[1].only())
	d := n.accelerate(t)
	must(t, c.echo(20))
	s, err := d.Pause(t.Context())
	if err != nil || !s.Paused || s.InUse {
		t.Fatalf("pause: %+v, %v", s, err)
	}
	vtep := netip.MustParseAddr("192.0.2.2")
	for _, q := range []accelerate.EvictRequest{
		{Address: address(t, both[1].only())}, {VTEP: vtep}, {Container: "veth1"}, {All: true},
	} {
		if entries, err := d.Evict(t.Context(), q); err != nil || entries == 0 {
			t.Errorf("evict %+v: %d entries, %v", q, entries, err)
		}
		if s, err = d.Resume(t.Context()); err != nil || !s.InUse {
			t.Fatalf("resume: %+v, %v", s, err)
		}
		must(t, c.echo(20))
	}
	for _, q := range []accelerate.EvictRequest{{}, {Container: "none"}} {
		if entries, err := d.Evict(t.Context(), q); err == nil {
			t.Errorf("evict %+v: %d entries, want an error", q, entries)
		}
	}
	second := n.accelerate(t)
	if said := second.log.String(); second.code == 0 || !strings.Contains(said, "accelerates flannel.1 already (") {
		t.Errorf("a second daemon: exit code %d, %s", second.code, second.log)
	}
}

// A daemon that hangs loses its lease.
func TestLease(t *testing.T) {
	t.Parallel()
	both := flannel(t)
	n := both[0]
	c := talk(t, n.only(), both[1].only())
	d := n.accelerate(t)
	must(t, c.echo(20))
	must(t, d.process.Signal(unix.SIGSTOP))
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second) // the lease lasts 3 s
	defer cancel()
	<-ctx.Done()
	must(t, c.echo(50))
	must(t, d.process.Signal(unix.SIGCONT))
	s := d.until(t, "status", func(accelerate.Status) bool { return true })
	if s.Egress.Misses["no-lease"] < 50 {
		t.Errorf("misses %v, want 50 without lease", s.Egress.Misses)
	}
}
