package speaker

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	ours "pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/netns"
)

// The other side of these tests: a node with FRR, its VTEP, a segment and an L3 VNI.
const (
	frrAddr   = "10.9.0.2"
	ourAddr   = "10.9.0.1"
	frrVTEP   = "10.2.0.7"
	frrConfig = `
vni 4000
router bgp 65002
 bgp router-id 10.2.0.7
 no bgp default ipv4-unicast
 no bgp ebgp-requires-policy
 no bgp network import-check
 neighbor 10.9.0.1 remote-as 65001
 neighbor 10.9.0.1 ebgp-multihop 2
 neighbor 10.9.0.1 timers connect 1
 address-family ipv4 unicast
  network 172.20.1.0/24
 exit-address-family
 address-family l2vpn evpn
  neighbor 10.9.0.1 activate
  advertise-all-vni
  advertise ipv4 unicast
 exit-address-family
`
)

// frrNode is the node: what FRR has put into its kernel, and what its hosts are.
type frrNode struct {
	*bgptest.FRR
	t     *testing.T
	kern  *netlink.Handle
	links map[string]netlink.Link
}

func newFRRNode(t *testing.T) *frrNode {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), "frr"))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	kern, err := ns.Netlink()
	must(t, err)
	t.Cleanup(kern.Close)
	n := &frrNode{t: t, kern: kern, links: map[string]netlink.Link{}}
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "bgp0"}, PeerName: "bgp1", PeerNamespace: netlink.NsFd(ns.FD()),
	}))
	here, err := netlink.LinkByName("bgp0")
	must(t, err)
	t.Cleanup(func() { netlink.LinkDel(here) })
	must(t, netlink.AddrAdd(here, address(ourAddr+"/24")))
	must(t, netlink.LinkSetUp(here))
	n.up("lo", frrVTEP+"/32")
	n.up("bgp1", frrAddr+"/24")
	// FRR resolves next hops, so it needs a route to our VTEPs.
	must(t, kern.RouteAdd(&netlink.Route{Dst: address("10.1.0.0/24").IPNet, Gw: net.ParseIP(ourAddr)}))
	n.segment(100, evpn.MAC{0x02, 0, 0, 0, 0x0e, 1})
	n.segment(4000, evpn.MAC{0x02, 0, 0, 0, 0x0f, 7})
	n.add(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "host", MasterIndex: n.links["br100"].Attrs().Index}, PeerName: "beyond",
	})
	n.up("beyond")
	n.FRR = bgptest.StartFRR(t, ns, frrConfig)
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func address(text string) *netlink.Addr {
	a, err := netlink.ParseAddr(text)
	if err != nil {
		panic(err)
	}
	return a
}

// up sets a device up, with an address.
func (n *frrNode) up(name string, addresses ...string) {
	n.t.Helper()
	l, err := n.kern.LinkByName(name)
	must(n.t, err)
	for _, a := range addresses {
		must(n.t, n.kern.AddrAdd(l, address(a)))
	}
	must(n.t, n.kern.LinkSetUp(l))
	n.links[name] = l
}

func (n *frrNode) add(l netlink.Link) {
	n.t.Helper()
	must(n.t, n.kern.LinkAdd(l))
	n.up(l.Attrs().Name)
}

// segment adds a bridge and a VXLAN device in it.
func (n *frrNode) segment(vni int, mac evpn.MAC) {
	n.t.Helper()
	bridge, tunnel := fmt.Sprint("br", vni), fmt.Sprint("vx", vni)
	n.add(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge, HardwareAddr: mac[:]}})
	n.add(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: tunnel, MasterIndex: n.links[bridge].Attrs().Index},
		VxlanId:   vni, SrcAddr: net.ParseIP(frrVTEP), Port: 4789, Learning: false,
	})
}

// host puts a host behind the bridge, as if the bridge and the kernel had learnt it from its packets.
func (n *frrNode) host(mac evpn.MAC, ip string) {
	n.t.Helper()
	must(n.t, n.kern.NeighSet(&netlink.Neigh{
		LinkIndex: n.links["host"].Attrs().Index, Family: unix.AF_BRIDGE, Flags: unix.NTF_MASTER,
		State: unix.NUD_REACHABLE, HardwareAddr: mac[:],
	}))
	must(n.t, n.kern.NeighSet(&netlink.Neigh{
		LinkIndex: n.links["br100"].Attrs().Index, IP: net.ParseIP(ip), State: unix.NUD_REACHABLE, HardwareAddr: mac[:],
	}))
}

// removeHost is the opposite of host.
func (n *frrNode) removeHost(mac evpn.MAC, ip string) {
	n.t.Helper()
	must(n.t, n.kern.NeighDel(&netlink.Neigh{
		LinkIndex: n.links["br100"].Attrs().Index, IP: net.ParseIP(ip), HardwareAddr: mac[:],
	}))
	must(n.t, n.kern.NeighDel(&netlink.Neigh{
		LinkIndex: n.links["host"].Attrs().Index, Family: unix.AF_BRIDGE, Flags: unix.NTF_MASTER,
		HardwareAddr: mac[:],
	}))
}

// tunnelTo returns to which VTEPs the kernel sends frames for a MAC; that with zeros is for replicated frames.
func (n *frrNode) tunnelTo(device string, mac evpn.MAC) (vteps []string) {
	n.t.Helper()
	entries, err := netns.List(func() ([]netlink.Neigh, error) {
		return n.kern.NeighList(n.links[device].Attrs().Index, unix.AF_BRIDGE)
	})
	must(n.t, err)
	for _, e := range entries {
		if slices.Equal(e.HardwareAddr, mac[:]) && e.IP != nil {
			vteps = append(vteps, e.IP.String())
		}
	}
	return vteps
}

// routeTo returns the gateway of the kernel's route to a prefix; empty without one.
func (n *frrNode) routeTo(p netip.Prefix) string {
	n.t.Helper()
	routes, err := netns.List(func() ([]netlink.Route, error) { return n.kern.RouteList(nil, unix.AF_INET) })
	must(n.t, err)
	for _, r := range routes {
		if r.Dst != nil && r.Dst.String() == p.String() && r.Gw != nil {
			return r.Gw.String()
		}
	}
	return ""
}

// until waits for a condition that FRR and its kernel reach in their own time.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); !ok(); time.Sleep(waitInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v: not %s", waitTimeout, what)
		}
	}
}

// TestFRR exchanges routes of all types with FRR, which shows what it makes of ours in its kernel.
func TestFRR(t *testing.T) {
	t.Parallel()
	n := newFRRNode(t)
	capture := startCapture(t, "bgp0")
	hostMAC, hostIP := evpn.MAC{0x02, 0, 0, 0, 2, 0x22}, "10.0.2.22"
	n.host(hostMAC, hostIP)
	s := start(t, Config{
		Peers: []ours.Peer{{Addr: addr(frrAddr), ASN: peerASN}}, Limits: Limits{Routes: 1000}, Stale: 3 * time.Second,
	})
	find := func(key evpn.RecordKey) (evpn.Record, bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.table.Record(key)
	}
	hostKey := evpn.RecordKey{Kind: evpn.RecordHost, VNI: 100, Prefix: evpn.HostPrefix(addr(hostIP))}
	macKey := evpn.RecordKey{Kind: evpn.RecordMAC, VNI: 100, MAC: hostMAC}
	has := func(key evpn.RecordKey) func() bool {
		return func() bool { _, ok := find(key); return ok }
	}
	until(t, "with FRR's host", has(hostKey))
	until(t, "with FRR's MAC", has(macKey))
	memberKey := evpn.RecordKey{Kind: evpn.RecordMember, VNI: 100, Prefix: prefix(frrVTEP + "/32")}
	until(t, "with FRR's VTEP", has(memberKey))
	prefixKey := evpn.RecordKey{Kind: evpn.RecordPrefix, VNI: 4000, Prefix: prefix("172.20.1.0/24")}
	until(t, "with FRR's prefix", has(prefixKey))
	routerMAC := evpn.MAC{0x02, 0, 0, 0, 0x0f, 7}
	if r, _ := find(prefixKey); r.VTEP != addr(frrVTEP) || r.RouterMAC != routerMAC || r.Tenant != "shop" {
		t.Errorf("prefix: %+v", r)
	}
	if r, _ := find(hostKey); r.VTEP != addr(frrVTEP) || r.HostMAC != hostMAC || r.L3VNI != 4000 ||
		r.RouterMAC != routerMAC {
		t.Errorf("host: %+v", r)
	}

	// FRR's kernel sends to our container, to our VTEP and to our prefix.
	container := own()[0].Containers[0]
	vtep := container.Node.VTEP.String()
	at := func(device string, mac evpn.MAC) func() bool {
		return func() bool { return slices.Contains(n.tunnelTo(device, mac), vtep) }
	}
	until(t, "our container's MAC in FRR's kernel", at("vx100", container.MAC))
	until(t, "our VTEP among those of replicated frames", at("vx100", evpn.MAC{}))
	until(t, "our router's MAC in FRR's kernel", at("vx4000", container.Node.RouterMAC))
	until(t, "a route to our prefix", func() bool { return n.routeTo(prefix("10.0.1.0/24")) == vtep })
	until(t, "a route to our container", func() bool { return n.routeTo(prefix("10.0.0.11/32")) == vtep })

	t.Run("withdrawal", func(t *testing.T) {
		n.host(evpn.MAC{0x02, 0, 0, 0, 2, 0x33}, "10.0.2.33")
		key := evpn.RecordKey{Kind: evpn.RecordHost, VNI: 100, Prefix: prefix("10.0.2.33/32")}
		until(t, "with the second host", has(key))
		n.removeHost(evpn.MAC{0x02, 0, 0, 0, 2, 0x33}, "10.0.2.33")
		until(t, "without the second host", func() bool { return !has(key)() })

		less := own()
		less[0].Subnets = nil
		must(t, s.Announce(t.Context(), less))
		until(t, "without a route to our prefix", func() bool { return n.routeTo(prefix("10.0.1.0/24")) == "" })
		must(t, s.Announce(t.Context(), own()))
		until(t, "a route to our prefix", func() bool { return n.routeTo(prefix("10.0.1.0/24")) == vtep })
	})
	t.Run("move", func(t *testing.T) { move(t, s, n, hostMAC, hostIP, has(hostKey)) })
	t.Run("loss", func(t *testing.T) {
		n.Kill("bgpd")
		until(t, "without the peer", func() bool { return !s.Status().Peers[0].Up })
		if r, ok := find(prefixKey); !ok || !r.Stale {
			t.Errorf("prefix right after the loss: %+v, %v", r, ok)
		}
		until(t, "without records", func() bool { return records(s.Status()) == 0 })
		n.Start("bgpd")
		until(t, "with FRR's prefix again", has(prefixKey))
		until(t, "a route to our prefix again", func() bool { return n.routeTo(prefix("10.0.1.0/24")) == vtep })
	})
	checkCapture(t, capture())
}

// move moves a host from FRR to this cluster and back (RFC 7432 §15).
func move(t *testing.T, s *Speaker, n *frrNode, mac evpn.MAC, ip string, theirs func() bool) {
	vtep := own()[0].Nodes[0].VTEP.String()
	here := own()
	here[0].Containers = append(here[0].Containers, evpn.Container{
		Node: here[0].Nodes[0], MAC: mac, Addrs: []netip.Addr{addr(ip)}, Sequence: s.NextSequence(100, mac),
	})
	if is := here[0].Containers[1].Sequence; is != 1 {
		t.Errorf("sequence of the container %d, not 1", is)
	}
	must(t, s.Announce(t.Context(), here))
	until(t, "the MAC at our VTEP in FRR's kernel", func() bool {
		return slices.Contains(n.tunnelTo("vx100", mac), vtep)
	})
	until(t, "without FRR's record", func() bool { return !theirs() })

	n.host(mac, ip)
	until(t, "FRR's route with a higher sequence", func() bool { return s.NextSequence(100, mac) == 3 })
	if c := s.Status().Contested; len(c) == 0 || theirs() {
		t.Errorf("contested: %v; the container's record is FRR's: %v", c, theirs())
	}
	must(t, s.Announce(t.Context(), own()))
	until(t, "with FRR's record", theirs)
	if is := n.Run("show evpn mac vni 100 mac " + mac.String()); !strings.Contains(is, "Intf: host") {
		t.Errorf("the MAC in FRR:\n%s", is)
	}
}

// startCapture records the packets of a device. The returned function ends it and returns the file.
func startCapture(t *testing.T, device string) func() string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "bgp.pcap")
	// dumpcap gives up root and writes into a folder of its own user, so the file is opened here.
	out, err := os.Create(file)
	must(t, err)
	defer out.Close()
	cmd := exec.Command("dumpcap", "-q", "-i", device, "-f", "tcp port 179", "-P", "-w", "-")
	cmd.Stdout = out
	must(t, cmd.Start())
	stop := func() string {
		cmd.Process.Signal(os.Interrupt)
		cmd.Wait()
		return file
	}
	t.Cleanup(func() { stop() })
	until(t, "capturing", func() bool {
		info, err := os.Stat(file)
		return err == nil && info.Size() > 0
	})
	return stop
}

// checkCapture has tshark decode the routes of both sides.
func checkCapture(t *testing.T, file string) {
	t.Helper()
	out, err := exec.Command("tshark", "-r", file, "-Y", "bgp.evpn.nlri", "-T", "json", "-J", "ip bgp",
		"--no-duplicate-keys").Output()
	must(t, err)
	var packets []struct {
		Source struct{ Layers map[string]any } `json:"_source"`
	}
	must(t, json.Unmarshal(out, &packets))
	seen := map[string]bool{}
	for _, p := range packets {
		text, err := json.Marshal(p.Source.Layers)
		must(t, err)
		from := "theirs"
		if strings.Contains(string(text), `"ip.src":"`+ourAddr+`"`) {
			from = "ours"
		}
		for _, want := range []string{
			`"bgp.evpn.nlri.rt":"2"`, `"bgp.evpn.nlri.rt":"3"`, `"bgp.evpn.nlri.rt":"5"`,
			`"bgp.ext_com.tunnel_type":"8"`, `"bgp.ext_com_evpn.mmac.seq":"1"`,
		} {
			if strings.Contains(string(text), want) {
				seen[from+" "+want] = true
			}
		}
		if strings.Contains(string(text), "_ws.malformed") {
			t.Errorf("tshark calls a message of %s malformed: %s", from, text)
		}
	}
	var missing []string
	for _, from := range []string{"ours", "theirs"} {
		for _, rt := range []string{"2", "3", "5"} {
			if want := from + ` "bgp.evpn.nlri.rt":"` + rt + `"`; !seen[want] {
				missing = append(missing, want)
			}
		}
	}
	for _, want := range []string{`ours "bgp.ext_com.tunnel_type":"8"`, `ours "bgp.ext_com_evpn.mmac.seq":"1"`} {
		if !seen[want] {
			missing = append(missing, want)
		}
	}
	if missing != nil {
		t.Errorf("tshark does not see %q in %d packets; it sees %v", missing, len(packets), seen)
	}
}
