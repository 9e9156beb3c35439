// Package wire_test checks the packets on a lab's fabric, and everything that a container can read, with independent
// tools: tshark, OpenSSL and the kernel's own listings.
//
//   - NP1, §6.1: the address on the wire encodes node, tenant and app
//   - NP2, §6.1: plain IPv6, without VXLAN or other encapsulation
//   - NP3, §6.2: both ends of every packet belong to one tenant
//   - NP4, §6.2: containers see encrypted addresses only, AES-128 under the tenant's key
package wire_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// patience is the timeout of one response.
const patience = 5 * time.Second

var (
	nodes = []string{"n1", "n2", "n3"}
	spec  = lab.Spec{
		Nodes:   nodes,
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "clear", Addressing: tenant.Clear}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
			{Name: "b1too", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "db"}},
			{Name: "b2", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "db"}},
			{Name: "r2", Node: "n2", Tenant: "red"},
			{Name: "r3", Node: "n3", Tenant: "red"},
			{Name: "c1", Node: "n1", Tenant: "clear"},
			{Name: "c3", Node: "n3", Tenant: "clear"},
		},
	}
	// Pairs of containers that communicate: on different nodes with two keys and without a key, and on one node.
	pairs = [][2]string{{"b1", "b2"}, {"r3", "r2"}, {"c1", "c3"}, {"b1", "b1too"}}
)

// bed is a lab with its namespaces open.
type bed struct {
	*lab.Lab
	ctx    context.Context
	router *netns.Namespace
	ports  []port
	hosts  map[string]host
	judge  judge
}

func newBed(t *testing.T) *bed {
	t.Helper()
	l := labtest.New(t, spec)
	b := &bed{Lab: l, ctx: labtest.Context(t), hosts: map[string]host{}}
	open := func(name string) *netns.Namespace {
		ns, err := l.Namespace(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close() })
		return ns
	}
	b.router = open(lab.Router)
	b.ports = openPorts(t, b.router, append([]string{lab.Orchestrator}, nodes...)...)
	b.judge = judge{
		places: map[netip.Addr]place{}, base: address.DefaultPlan().Base,
		underlay: netip.PrefixFrom(b.ports[0].router, 48).Masked(),
	}
	for _, c := range l.Containers() {
		b.hosts[c.Name] = host{c.Name, open(c.Name), c.Address}
		b.judge.places[c.Plaintext] = place{c.Node, c.Tenant}
		if !l.Clear(c.Tenant) {
			b.judge.secret = append(b.judge.secret, c.Address)
		}
	}
	return b
}

func (b *bed) talkAll(t *testing.T) {
	t.Helper()
	for _, p := range pairs {
		if err := talk(b.ctx, b.hosts[p[0]], b.hosts[p[1]]); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWire(t *testing.T) {
	b := newBed(t)
	t.Run("addresses", b.testAddresses)
	t.Run("fabric", b.testFabric)
	t.Run("planted", b.testPlanted)
	t.Run("container", b.testContainers)
	t.Run("listings", b.testListings)
	t.Run("drops", b.testDrops)
}

// testAddresses decrypts each container's address with OpenSSL and the key that an operator can read. It compares the
// result with the container's actual location.
func (b *bed) testAddresses(t *testing.T) {
	for _, c := range b.Containers() {
		text, err := b.Output(b.ctx, lab.Orchestrator, labtest.Binary(t), "tenant", "get", c.Tenant, "--show-key", "-o",
			"json")
		if err != nil {
			t.Fatal(err)
		}
		var shown struct {
			IDs []struct {
				ID  uint32 `json:"id"`
				Key string `json:"key"`
			} `json:"ids"`
			Apps []struct {
				ID     uint32            `json:"id"`
				Labels map[string]string `json:"labels"`
			} `json:"apps"`
		}
		if err := json.Unmarshal([]byte(text), &shown); err != nil || len(shown.IDs) != 1 {
			t.Fatalf("tenant get %s: %v\n%s", c.Tenant, err, text)
		}
		plain := c.Address.As16()
		if !b.Clear(c.Tenant) {
			cmd := exec.Command("openssl", "enc", "-d", "-aes-128-ecb", "-nopad", "-K", shown.IDs[0].Key)
			cmd.Stdin = strings.NewReader(string(plain[:]))
			out, err := cmd.Output()
			if err != nil || len(out) != len(plain) {
				t.Fatalf("openssl: %v, %d bytes", err, len(out))
			}
			plain = [16]byte(out)
			if !address.DefaultPlan().Private.Contains(c.Address) {
				t.Errorf("%s sees %v, which is outside the private prefix", c.Name, c.Address)
			}
		}
		if got := netip.AddrFrom16(plain); got != c.Plaintext {
			t.Errorf("%s: OpenSSL decrypts to %v from %v, the node reports %v", c.Name, got, c.Address, c.Plaintext)
		}
		// Decode by hand: 64 bits of node, 24 of tenant, 16 of app, 24 of index.
		prefix, err := b.Prefix(c.Node)
		if err != nil {
			t.Fatal(err)
		}
		if node := prefix.Addr().As16(); [8]byte(plain[:8]) != [8]byte(node[:8]) {
			t.Errorf("%s is on %s (%v), but its address encodes %x", c.Name, c.Node, prefix, plain[:8])
		}
		if id := uint32(plain[8])<<16 | uint32(plain[9])<<8 | uint32(plain[10]); id != shown.IDs[0].ID {
			t.Errorf("%s has tenant id %d, but its address encodes %d", c.Name, shown.IDs[0].ID, id)
		}
		app := uint32(plain[11])<<8 | uint32(plain[12])
		known := false
		for _, a := range shown.Apps {
			known = known || a.ID == app && a.Labels["app"] == c.Labels["app"]
		}
		if !known {
			t.Errorf("%s has labels %v, but its address encodes app %d of %v", c.Name, c.Labels, app, shown.Apps)
		}
	}
}

// testFabric checks the traffic of containers on the fabric.
func (b *bed) testFabric(t *testing.T) {
	for _, offload := range []bool{true, false} {
		name := map[bool]string{true: "offload", false: "no offload"}[offload]
		t.Run(name, func(t *testing.T) {
			for _, h := range b.offloaders(t) {
				if err := setOffload(h, map[bool]uint32{true: 1}[offload]); err != nil {
					t.Fatal(err)
				}
			}
			c := startCapture(b.ctx, t, b.router, b.ports)
			b.talkAll(t)
			r := c.stop(b.ctx, t)
			frames := r.frames(t)
			for _, finding := range b.judge.findings(t, r, frames, offload) {
				t.Error(finding)
			}
			b.wantKinds(t, frames, offload)
		})
	}
}

// offloaders returns the hosts whose eth0 determines the containers' offloads: the containers, or the nodes if
// containers have macvlans, which use their uplink's features.
func (b *bed) offloaders(t *testing.T) (all []host) {
	t.Helper()
	if labtest.Device() != endpoint.Macvlan {
		return slices.Collect(maps.Values(b.hosts))
	}
	for _, node := range nodes {
		ns, err := b.Namespace(node)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close() })
		all = append(all, host{name: node, ns: ns})
	}
	return all
}

// wantKinds checks that the recording has every kind of packet of every tenant, on both ports that the packet passes.
func (b *bed) wantKinds(t *testing.T, frames []frame, offload bool) {
	t.Helper()
	kinds := map[string]func(frame) bool{
		"TCP":                    func(f frame) bool { return strings.HasPrefix(f.layers, "eth:ethertype:ipv6:tcp") },
		"UDP":                    func(f frame) bool { return strings.HasPrefix(f.layers, "eth:ethertype:ipv6:udp") },
		"echo":                   func(f frame) bool { return f.icmpType == "128" },
		"echo reply":             func(f frame) bool { return f.icmpType == "129" },
		"unreachable with quote": func(f frame) bool { return f.icmpType == "1" && len(f.source) == 2 },
		"fragment":               func(f frame) bool { return strings.Contains(f.layers, "ipv6.fraghdr") },
		"checksum that is right": func(f frame) bool { return f.protocol != 0 && f.checksum == goodChecksum },
	}
	if offload {
		kinds["packet of segments"] = func(f frame) bool { return f.length > 15000 }
	}
	count := map[string]int{}
	total := 0
	for _, f := range frames {
		if len(f.source) == 0 || b.judge.places[f.source[0]] == (place{}) {
			continue
		}
		total++
		for kind, is := range kinds {
			if is(f) {
				count[b.judge.places[f.source[0]].tenant+" "+kind+" on "+f.port]++
			}
		}
	}
	for tenant, ports := range map[string][]string{"blue": {"n1", "n2"}, "red": {"n2", "n3"}, "clear": {"n1", "n3"}} {
		for kind := range kinds {
			for _, port := range ports {
				if count[tenant+" "+kind+" on "+port] == 0 {
					t.Errorf("no %s of %s on port %s", kind, tenant, port)
				}
			}
		}
	}
	t.Logf("checked %d packets of containers, %d frames in total", total, len(frames))
}

// testDrops checks that no packets were dropped so far: all packets of the test had to arrive, and containers send no
// others.
func (b *bed) testDrops(t *testing.T) {
	for _, node := range nodes {
		drops, err := b.Drops(b.ctx, node)
		if err != nil {
			t.Fatal(err)
		}
		for reason, packets := range drops {
			if packets > 0 {
				t.Errorf("%s dropped %d packets: %s", node, packets, reason)
			}
		}
	}
}

func colonless(a netip.Addr) string {
	b := a.As16()
	return hex.EncodeToString(b[:])
}
