package services_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
)

// The fabric's router as a BGP peer, and this side.
const (
	routerSide = "2001:db8:70::1"
	routerASN  = 65002
	ourASN     = 65001
)

// TestAnnounced: the fabric's router learns an external address by BGP and uses all nodes that host the tenant. A dead
// node is withdrawn within a second; a dead agent is not, and neither is anything while the orchestrator is away.
func TestAnnounced(t *testing.T) {
	for name, start := range map[string]func(testing.TB, *netns.Namespace){
		"FRR":  func(t testing.TB, ns *netns.Namespace) { bgptest.StartFRR(t, ns, howTo(t, "router bgp ")) },
		"BIRD": func(t testing.TB, ns *netns.Namespace) { bgptest.StartBIRD(t, ns, howTo(t, "router id ")) },
	} {
		t.Run(name, func(t *testing.T) { announced(t, start) })
	}
}

// howTo returns the block of the how-to that begins with some words.
func howTo(t testing.TB, words string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/howto/announce.md")
	must(t, err)
	_, from, ok := strings.Cut(string(page), "```text\n   "+words)
	if !ok {
		t.Fatalf("the how-to has no block that begins with %q", words)
	}
	block, _, _ := strings.Cut(from, "   ```")
	return words + strings.ReplaceAll(block, "\n   ", "\n")
}

func announced(t *testing.T, startRouter func(testing.TB, *netns.Namespace)) {
	spec := labSpec()
	spec.Nodes = append(spec.Nodes, "n4")
	spec.Outside = []lab.OutsideHost{{Name: internet}}
	spec.Containers = append(spec.Containers,
		lab.Container{Name: "c4", Node: "n4", Tenant: shop, Labels: map[string]string{"app": "client"}})
	password := filepath.Join(t.TempDir(), "password")
	must(t, os.WriteFile(password, []byte("secret\n"), 0o600))
	b := startBed(t, spec, func(o *lab.Options) {
		o.OrchestratorArgs = append(o.OrchestratorArgs, "--bgp-asn", fmt.Sprint(ourASN),
			"--bgp-peer", fmt.Sprintf("%s=%d", routerSide, routerASN), "--bgp-password-file", password)
	})
	fabric := &router{bed: b}
	external := netip.MustParseAddr("2001:db8:7::9")
	must(t, b.AllowSource(netip.PrefixFrom(external, 128)))
	ns, err := b.Namespace(lab.Router)
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	startRouter(t, ns)
	made := b.create(&pilasterv1.Service{Name: "web", ExternalIps: []string{external.String()}})
	b.to = netip.AddrPortFrom(external, servicePort)
	all := []string{"n1", "n2", "n3", "n4"}
	fabric.settles(external, all...)
	b.settles(internet, web...)

	must(t, b.KillNoRestart(t.Context(), lab.AgentProcess("n4")))
	fabric.stays(external, 3*time.Second, all...)
	must(t, b.Start(t.Context(), lab.AgentProcess("n4")))

	revive := fabric.kill("n4")
	if took := fabric.settles(external, "n1", "n2", "n3"); took > time.Second {
		t.Errorf("a dead node was withdrawn after %v, want at most 1s", took)
	} else {
		t.Logf("a dead node was withdrawn after %v", took)
	}
	b.settles(internet, web...)
	revive()
	fabric.settles(external, all...)

	_, kept, err := b.reach(internet)
	must(t, err)
	defer kept.Close()
	must(t, b.KillNoRestart(t.Context(), lab.Orchestrator))
	fabric.stays(external, 3*time.Second, all...)
	must(t, b.Start(t.Context(), lab.Orchestrator))
	fabric.stays(external, 10*time.Second, all...)
	must(t, echo(kept))

	made.TrafficPolicy = "Local"
	_, err = b.Operator().ApplyServices(t.Context(), connect.NewRequest(&pilasterv1.ApplyServicesRequest{
		Tenant: shop, Services: []*pilasterv1.Service{made},
	}))
	must(t, err)
	fabric.settles(external, "n1", "n2", "n3")
	_, err = b.Operator().DeleteService(t.Context(), connect.NewRequest(&pilasterv1.DeleteServiceRequest{
		Tenant: shop, Name: "web",
	}))
	must(t, err)
	fabric.settles(external)
}

// router is the fabric's router, as its kernel sees it.
type router struct{ *bed }

// hops returns the nodes that the router sends packets for an address to, sorted.
func (r *router) hops(to netip.Addr) (nodes []string) {
	r.Helper()
	ns, err := r.Namespace(lab.Router)
	must(r.T, err)
	defer ns.Close()
	h, err := ns.Netlink()
	must(r.T, err)
	defer h.Close()
	routes, err := h.RouteListFiltered(unix.AF_INET6, &netlink.Route{
		Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(128, 128)},
	}, netlink.RT_FILTER_DST)
	must(r.T, err)
	for _, route := range routes {
		links := []int{route.LinkIndex}
		for _, hop := range route.MultiPath {
			links = append(links, hop.LinkIndex)
		}
		for _, index := range links {
			if l, err := h.LinkByIndex(index); err == nil && index != 0 {
				nodes = append(nodes, l.Attrs().Name)
			}
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// settles waits until the router sends packets for an address to nodes, and returns how long that took.
func (r *router) settles(to netip.Addr, nodes ...string) time.Duration {
	r.Helper()
	began := time.Now()
	var last []string
	for time.Since(began) < patience {
		if last = r.hops(to); slices.Equal(last, nodes) {
			return time.Since(began)
		}
		time.Sleep(10 * time.Millisecond)
	}
	status, _ := r.Output(r.Context(), lab.Orchestrator, "pilaster", "bgp", "status")
	r.Fatalf("the router sends packets for %v to %v, want %v\n%s", to, last, nodes, status)
	return 0
}

// stays checks that the router sends packets for an address to nodes all the time.
func (r *router) stays(to netip.Addr, during time.Duration, nodes ...string) {
	r.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if is := r.hops(to); !slices.Equal(is, nodes) {
			r.Fatalf("the router sends packets for %v to %v, want %v", to, is, nodes)
		}
	}
}

// kill makes a node's uplink drop all that it receives. The link stays up, so that the router does not know.
func (r *router) kill(node string) (revive func()) {
	r.Helper()
	ns, err := r.Namespace(node)
	must(r.T, err)
	h, err := ns.Netlink()
	must(r.T, err)
	uplink, err := h.LinkByName(lab.Uplink)
	must(r.T, err)
	drop, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "dead", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	must(r.T, err)
	set := func(fd int) { must(r.T, ns.Do(func() error { return netlink.LinkSetXdpFdWithFlags(uplink, fd, 2) })) }
	set(drop.FD())
	return func() {
		set(-1)
		drop.Close()
		h.Close()
		ns.Close()
	}
}
