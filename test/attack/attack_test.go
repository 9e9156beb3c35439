// Package attack_test attacks a lab from containers and from the fabric, with crafted frames. The node must drop each
// frame for the expected reason and count it once, and no receiver may get it.
//
//   - NP3, §6.2: nodes drop by default. They check that the source and the destination of every packet have the base
//     prefix and the same tenant ID, so a random address passes with probability 2^-64.
//   - NP4, §6.2: a container has only encrypted addresses. Even with its tenant's key, it reaches only endpoints of its
//     own tenant.
//   - NP1, §6.1: tenant 0 is the node itself, which containers cannot reach.
package attack_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var spec = withOthers(lab.Spec{
	Nodes:   []string{"n1", "n2", "n3"},
	Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "green"}},
	Containers: []lab.Container{
		{Name: "mallory", Node: "n1", Tenant: "blue"},
		{Name: "b1", Node: "n1", Tenant: "blue"},
		{Name: "b2", Node: "n2", Tenant: "blue"},
		{Name: "b3", Node: "n3", Tenant: "blue"},
		{Name: "r1", Node: "n1", Tenant: "red"},
		{Name: "r2", Node: "n2", Tenant: "red"},
		{Name: "gone1", Node: "n1", Tenant: "blue"},
		{Name: "gone2", Node: "n2", Tenant: "blue"},
	},
})

// sentinels are pairs of containers: a sentinel goes from the first to the second container of each pair. Together the
// sentinels pass every container except mallory, and every port of the fabric.
var sentinels = func() [][2]string {
	all := [][2]string{{"mallory", "b1"}, {"mallory", "b2"}, {"b2", "b3"}, {"r2", "r1"}, {"r1", "r2"}}
	if hasNimitz() {
		all = append(all, [2]string{"v1", "v2"}, [2]string{"a2", "a1"}, [2]string{"s1", "s2"}, [2]string{"t2", "t1"},
			[2]string{"o1", "o2"}, [2]string{"p2", "p1"})
	}
	return all
}()

// Senders of frames, besides containers.
const (
	onRouter = "router-"  // + node: from the router's port, as by the fabric itself
	onNode   = "node-"    // + node: from the uplink, as by a process with raw sockets
	outsider = "outsider" // a machine on the fabric that is not a node
)

// bed is a lab under attack.
type bed struct {
	*lab.Lab
	spec      lab.Spec
	sentinels [][2]string
	ctx       context.Context
	inject    map[string]*packet.Injector // by container, or by one of the names above
	captures  map[string]*packet.Capture  // of each container's device except mallory's, and each port of the router
	tenants   map[string]tenantKey
	released  map[string]lab.ContainerStatus
	sent      map[string]uint64 // number of frames so far, by node and reason, as in drops
}

type tenantKey struct {
	id     address.TenantID
	cipher *address.Cipher
}

func newBed(t *testing.T, spec lab.Spec, sentinels [][2]string) *bed {
	t.Helper()
	b := &bed{
		Lab: labtest.New(t, spec), spec: spec, sentinels: sentinels, ctx: labtest.Context(t),
		inject: map[string]*packet.Injector{}, captures: map[string]*packet.Capture{},
		tenants: map[string]tenantKey{}, released: map[string]lab.ContainerStatus{},
		sent: map[string]uint64{},
	}
	for _, of := range spec.Tenants {
		if of.Network == tenant.Nimitz || of.Network == tenant.EVPN {
			continue
		}
		got, err := b.Operator().GetTenant(b.ctx,
			connect.NewRequest(&pilasterv1.GetTenantRequest{Name: of.Name, ShowKey: true}))
		if err != nil {
			t.Fatal(err)
		}
		id := got.Msg.Tenant.Ids[0]
		b.tenants[of.Name] = tenantKey{address.TenantID(id.Id), address.NewCipher(address.Key(id.Key))}
	}
	for _, c := range spec.Containers {
		if strings.HasPrefix(c.Name, "gone") {
			b.release(t, c.Name)
		}
	}
	for _, c := range b.Containers() {
		b.open(t, c.Name, c.Name, lab.Interface, c.Name != "mallory")
	}
	for _, node := range spec.Nodes {
		b.open(t, onRouter+node, lab.Router, node, true)
		b.open(t, onNode+node, node, lab.Uplink, false)
	}
	b.open(t, outsider, lab.Orchestrator, lab.Uplink, false)
	b.open(t, onRouter+outsider, lab.Router, lab.Orchestrator, false)
	for _, node := range spec.Nodes {
		if b.late() { // wait until earlier packets are counted
			b.appctl(t, node, "revalidator/wait")
		}
	}
	return b
}

// open opens an injector, and optionally a capture, on a device of a namespace.
func (b *bed) open(t *testing.T, as, namespace, device string, capture bool) {
	t.Helper()
	ns, err := b.Namespace(namespace)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	inject, err := packet.NewInjector(ns, device)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inject.Close() })
	b.inject[as] = inject
	if !capture {
		return
	}
	c, err := packet.NewCapture(ns, device)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	b.captures[as] = c
}

// release removes a container with which mallory has just communicated, so that all caches have entries of this
// container.
func (b *bed) release(t *testing.T, name string) {
	t.Helper()
	if e, err := b.Ping(b.ctx, "mallory", name, packet.PingOptions{Count: 3}); err != nil || e.Received != 3 {
		t.Fatalf("ping from mallory to %s: %+v, %v", name, e, err)
	}
	b.released[name] = b.container(t, name)
	if err := b.RemoveContainer(b.ctx, name); err != nil {
		t.Fatal(err)
	}
}

func (b *bed) container(t *testing.T, name string) lab.ContainerStatus {
	t.Helper()
	c, err := b.Container(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (b *bed) prefix(t *testing.T, node string) netip.Prefix {
	t.Helper()
	p, err := b.Prefix(node)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// attack is a set of frames from one sender, with the expected result.
type attack struct {
	name   string
	from   string // key of bed.inject
	frames [][]byte
	why    dropreason.Reason // 0: no counter of our programs rises
	at     string            // the node that drops them
	ports  int               // number of fabric ports that each frame passes
}

// try sends an attack. It checks that the node counts every frame once, for the attack's reason, and that no other
// counter rises and no receiver captures a frame.
func (b *bed) try(t *testing.T, a attack) {
	t.Helper()
	before := b.drops(t)
	sentinel, err := b.send(t, a)
	if err != nil {
		t.Fatal(err)
	}
	if passed := b.judgeCaptures(t, sentinel); passed != a.ports*len(a.frames) {
		t.Errorf("frames passed ports of the fabric %d times, want %d", passed, a.ports*len(a.frames))
	}
	want := maps.Clone(before)
	if a.why != 0 {
		want[a.at+" "+a.why.String()] += uint64(len(a.frames))
		b.sent[a.at+" "+a.why.String()] += uint64(len(a.frames))
	}
	judged := func(now map[string]uint64) map[string]uint64 {
		maps.DeleteFunc(now, func(key string, _ uint64) bool {
			// Kernels send listener reports at any time.
			return a.why != dropreason.MldIgnored && strings.HasSuffix(key, " "+dropreason.MldIgnored.String())
		})
		return now
	}
	want = judged(want)
	after := judged(b.drops(t))
	for deadline := time.Now().Add(patience); b.late() && !maps.Equal(after, want) &&
		time.Now().Before(deadline); after = judged(b.drops(t)) {
		time.Sleep(tryAgain)
	}
	for _, key := range slices.Sorted(maps.Keys(after)) {
		if after[key] != want[key] {
			t.Errorf("%s increased by %d, want %d", key, after[key]-before[key], want[key]-before[key])
		}
	}
}

// late reports whether counters lag behind the packets. This is the case with Open vSwitch, which adds the packets of
// its cached flows to the counters later.
func (b *bed) late() bool { return b.spec.Nimitz == lab.OVS }

// drops reads the counters of every node, with keys such as "n1 dst-undecryptable".
func (b *bed) drops(t *testing.T) map[string]uint64 {
	t.Helper()
	all := map[string]uint64{}
	for _, node := range b.spec.Nodes {
		b.settle(t, node)
		drops, err := b.Drops(b.ctx, node)
		if err != nil {
			t.Fatal(err)
		}
		for why, packets := range drops {
			all[node+" "+why] = packets
		}
	}
	return all
}

// settle makes the node's Open vSwitch update its counters.
func (b *bed) settle(t *testing.T, node string) {
	t.Helper()
	if b.late() {
		b.appctl(t, node, "revalidator/purge")
	}
}

// appctl runs a command of a node's Open vSwitch.
func (b *bed) appctl(t *testing.T, node, what string) {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(b.OVS(node), "ovs-vswitchd.*.ctl"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("find the control socket of Open vSwitch on %s: %v: %v", node, sockets, err)
	}
	if out, err := exec.CommandContext(b.ctx, "ovs-appctl", "-t", sockets[0], what).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// send sends the frames and then the sentinels, all on one CPU, whose queues are FIFO. So when a sentinel has arrived,
// the kernel has processed all earlier packets.
func (b *bed) send(t *testing.T, a attack) (packet.Sentinel, error) {
	t.Helper()
	sentinel := packet.NewSentinel()
	var last [][]byte
	for _, s := range b.sentinels {
		// an echo reply without a request: no kernel responds to it
		last = append(last, toGateway(packet.Packet{Source: b.container(t, s[0]).Address,
			Destination: b.container(t, s[1]).Address,
			Body:        packet.ICMP{Type: packet.EchoReply, Payload: sentinel[:]}}.Marshal()))
	}
	return sentinel, netns.OnThread(func() error {
		var cpu unix.CPUSet
		cpu.Set(0)
		if err := unix.SchedSetaffinity(0, &cpu); err != nil {
			return err
		}
		if err := b.sendFrames(a); err != nil {
			return err
		}
		for i, s := range b.sentinels {
			if err := b.inject[s[0]].Burst(1, func(int) []byte { return last[i] }); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *bed) sendFrames(a attack) error {
	if !strings.HasPrefix(a.from, onNode) {
		return b.inject[a.from].Burst(len(a.frames), func(k int) []byte { return a.frames[k] })
	}
	// The program drops these frames at egress, so the sender gets an error.
	for _, f := range a.frames {
		if err := b.inject[a.from].Send(f); !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("the frame was not refused: %w", err)
		}
	}
	return nil
}

// judgeCaptures reads every capture up to the sentinels, which prove that the capture works. Containers must have
// received nothing else. passed is the number of containers' frames on all ports of the fabric.
func (b *bed) judgeCaptures(t *testing.T, sentinel packet.Sentinel) (passed int) {
	t.Helper()
	due := map[string]int{}
	for _, s := range b.sentinels {
		from, to := b.container(t, s[0]), b.container(t, s[1])
		due[from.Name]++
		due[to.Name]++
		if from.Node != to.Node {
			due[onRouter+from.Node]++
			due[onRouter+to.Node]++
		}
	}
	for name, c := range b.captures {
		if due[name] == 0 {
			t.Fatalf("no sentinel passed %s", name)
		}
		for range due[name] {
			frames, err := c.Until(b.ctx, sentinel.In)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for _, f := range frames[:len(frames)-1] {
				switch {
				case !strings.HasPrefix(name, onRouter) && f.Outgoing: // an attack from this container
				case !strings.HasPrefix(name, onRouter):
					t.Errorf("%s received %d bytes: %.80x", name, len(f.Frame), f.Frame)
				case !fabricsOwn(f):
					passed++
				}
			}
		}
	}
	return passed
}

// fabricsOwn reports whether a frame has addresses of the fabric, or is a probe of a gateway. All other addresses,
// plaintext and ciphertext, are unique local addresses (fc00::/7).
func fabricsOwn(c packet.Captured) bool {
	p, err := c.Packet()
	if err != nil {
		return false
	}
	of := func(a netip.Addr) netip.Addr { return tenant.EgressTunnel(netip.PrefixFrom(a, 64).Masked()) }
	probe := p.Source != p.Destination && p.Source == of(p.Source) && p.Destination == of(p.Destination) &&
		c.Frame[14+6] == packet.NoNextHeader
	return probe || !p.Source.IsPrivate() && !p.Destination.IsPrivate()
}
