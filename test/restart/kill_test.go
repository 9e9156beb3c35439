package restart_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// youth is the maximum age at which agents are killed again after a restart.
const youth = 500 * time.Millisecond

// TestKills kills the agents of two nodes PILASTER_RESTART_KILLS times: during their start, during ADD and DEL, and
// during an upgrade to another build with other table layouts. PILASTER_RESTART_SEED determines the random choices.
// Meanwhile two containers exchange numbered datagrams. No datagram is lost, and each datagram to an address without a
// container is counted once as dropped. Without PILASTER_TEST_NETWORK, it runs on a network without mappings and on one
// with them.
func TestKills(t *testing.T) {
	networks := []string{tenant.Netpila, tenant.Nimitz}
	if _, set := os.LookupEnv(labtest.NetworkVariable); set || labtest.Device() == endpoint.Macvlan {
		networks = []string{labtest.Network()}
	}
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			t.Setenv(labtest.NetworkVariable, network)
			killAgents(t)
		})
	}
}

func killAgents(t *testing.T) {
	kills := setting(t, "PILASTER_RESTART_KILLS", 8)
	seed := uint64(rand.Uint32())
	if text, set := os.LookupEnv("PILASTER_RESTART_SEED"); set {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("PILASTER_RESTART_SEED: %v", err)
		}
	}
	t.Logf("PILASTER_RESTART_SEED=%d", seed)
	builds := newBuilds(t)
	l := labtest.New(t, lab.Spec{
		Nodes:   []string{"n1", "n2"},
		Tenants: []lab.Tenant{labtest.Tenant("blue", 1)},
		Containers: []lab.Container{
			{Name: "left", Node: "n1", Tenant: "blue"},
			{Name: "right", Node: "n2", Tenant: "blue"},
		},
	}, func(o *lab.Options) { o.Binary = builds.binary })
	k := &killer{T: t, lab: l, builds: builds, running: map[string]int{}, random: rand.New(rand.NewPCG(seed, 0)),
		start: time.Now()}
	sending, stop := context.WithCancel(t.Context())
	defer stop()
	streams := []*stream{
		startStream(sending, t, l, "left", "right"),
		startStream(sending, t, l, "right", "left"),
	}
	nodes := []string{"n1", "n2"}
	for _, node := range nodes {
		k.works(node)
	}
	for turn := 0; k.kills < kills; turn++ {
		node := nodes[k.random.IntN(len(nodes))]
		switch turn % 4 {
		case 0:
			k.duringUpgrade(node)
		case 1:
			k.young(node)
		case 2:
			k.duringAdd(node)
		case 3:
			k.duringDel(node)
		}
		k.works(node)
	}
	stop()
	for i, s := range streams {
		s.finish(t, k.start)
		k.counted(nodes[i], s.noise)
	}
	t.Logf("%d kills; they interrupted %d ADDs and %d DELs; %d starts were of another build than the "+
		"previous one, and %d of those were interrupted",
		k.kills, k.cutAdds, k.cutDels, k.upgrades, k.cutUpgrades)
	if kills >= 50 && (k.cutAdds == 0 || k.cutDels == 0 || k.cutUpgrades == 0) {
		t.Error("no ADD, no DEL or no upgrade was interrupted: the kills have the wrong timing")
	}
	if 10*k.upgrades < k.kills {
		t.Errorf("%d of %d starts were of another build, want at least every tenth", k.upgrades, k.kills)
	}
	for _, node := range nodes {
		k.onlyOne(node)
		k.onlyOwnPins(node)
	}
}

// killer kills agents.
type killer struct {
	*testing.T
	lab    *lab.Lab
	random *rand.Rand
	start  time.Time

	builds  *builds
	running map[string]int // build of each node's agent

	kills, cutAdds, cutDels, names int
	upgrades, cutUpgrades          int

	added, removed time.Duration // durations of the last uninterrupted ADD and DEL
}

// crash kills an agent and returns when the supervisor has restarted it.
func (k *killer) crash(node, when string) {
	k.Helper()
	k.kills++
	k.Logf("%v: kill %d, %s %s", time.Since(k.start).Round(time.Millisecond), k.kills, node, when)
	_, err := k.lab.Crash(k.Context(), lab.AgentProcess(node))
	k.must(err)
	if k.running[node] != k.builds.next {
		k.upgrades++
	}
	k.running[node] = k.builds.next
}

func (k *killer) wait(most time.Duration) time.Duration {
	d := time.Duration(k.random.Int64N(int64(most) + 1))
	time.Sleep(d) // the test needs kills at random times
	return d
}

// young kills an idle agent, and kills it again at a random time after its restart.
func (k *killer) young(node string) {
	k.crash(node, "while idle")
	k.crash(node, fmt.Sprint("at the age of ", k.wait(youth)))
}

// duringUpgrade starts another build on the node, kills it at a random time after its start, and then starts this build
// again or the previous build.
func (k *killer) duringUpgrade(node string) {
	k.builds.choose(k.T, 1-k.running[node])
	k.crash(node, "while idle, for another build")
	age := k.wait(youth / 2) // most starts are complete by then
	before := k.taken(node)
	if k.random.IntN(2) == 0 {
		k.builds.choose(k.T, 1-k.running[node])
	}
	k.crash(node, fmt.Sprint("at the age of ", age, ", before it was ready: ", !before))
	if !before {
		k.cutUpgrades++
	}
}

// taken reports whether the agent is ready.
func (k *killer) taken(node string) bool {
	states, err := k.lab.Processes(k.Context())
	k.must(err)
	return slices.ContainsFunc(states,
		func(s lab.ProcessState) bool { return s.Name == lab.AgentProcess(node) && s.Ready })
}

// duringAdd kills an agent during an ADD. If the ADD fails, duringAdd calls DEL, as a runtime does.
func (k *killer) duringAdd(node string) {
	c := k.next(node)
	added := make(chan error, 1)
	go func() { added <- k.lab.AddContainer(k.Context(), c) }()
	k.crash(node, fmt.Sprint(k.wait(k.added), " into an ADD"))
	err := <-added
	k.ready(node)
	if err == nil {
		k.must(k.lab.RemoveContainer(k.Context(), c.Name))
		return
	}
	k.cutAdds++
	_, err = k.lab.Agent(node).DeleteEndpoint(k.Context(), connect.NewRequest(&pilasterv1.DeleteEndpointRequest{
		ContainerId: k.lab.ContainerID(c.Name), Interface: lab.Interface,
	}))
	k.must(err)
}

// duringDel kills an agent during a DEL. If the DEL fails, duringDel repeats it, as a runtime does.
func (k *killer) duringDel(node string) {
	c := k.next(node)
	k.must(k.lab.AddContainer(k.Context(), c))
	removed := make(chan error, 1)
	go func() { removed <- k.lab.RemoveContainer(k.Context(), c.Name) }()
	k.crash(node, fmt.Sprint(k.wait(k.removed), " into a DEL"))
	err := <-removed
	k.ready(node)
	if err != nil {
		k.cutDels++
		k.must(k.lab.RemoveContainer(k.Context(), c.Name))
	}
}

// works checks that an agent becomes ready, and that an ADD and a DEL on its node succeed.
func (k *killer) works(node string) {
	k.Helper()
	k.ready(node)
	c := k.next(node)
	start := time.Now()
	k.must(k.lab.AddContainer(k.Context(), c))
	k.added = time.Since(start)
	start = time.Now()
	k.must(k.lab.RemoveContainer(k.Context(), c.Name))
	k.removed = time.Since(start)
}

// ready waits until an agent reports that it is ready, and checks /readyz.
func (k *killer) ready(node string) {
	k.Helper()
	k.must(k.lab.Await(k.Context(), lab.AgentProcess(node)))
	client := unixrpc.Client(k.lab.AgentSocket(node))
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(k.Context(), http.MethodGet, unixrpc.URL+"/readyz", nil)
	k.must(err)
	response, err := client.Do(request)
	k.must(err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	k.must(err)
	status, err := k.lab.Agent(node).Status(k.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	k.must(err)
	if is := labtest.IsOther(status.Msg.Version); is != (k.running[node] == 1) {
		k.Fatalf("%s runs version %s, want build %d", node, status.Msg.Version, k.running[node])
	}
	if response.StatusCode != http.StatusOK {
		k.Fatalf("%s: /readyz returned %d %s", node, response.StatusCode, body)
	}
}

// counted checks that the node counted each datagram to an address without a container once, whichever build dropped
// it.
func (k *killer) counted(node string, sent uint64) {
	reason := map[string]string{
		tenant.Netpila: "dst-undecryptable", tenant.ILA: "no-mapping", tenant.Nimitz: "no-endpoint",
		tenant.EVPN: "no-endpoint",
	}[labtest.Network()]
	status, err := k.lab.Agent(node).Status(k.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	k.must(err)
	var counted uint64
	for _, d := range status.Msg.Drops {
		if d.Reason == reason {
			counted = d.Packets
		}
	}
	if counted != sent || sent == 0 {
		k.Errorf("%s counted %d drops for %s, want %d", node, counted, reason, sent)
	}
}

// onlyOwnPins checks that no pins of the other build remain, except its counters and the pins that both builds share.
func (k *killer) onlyOwnPins(node string) {
	pins, err := filepath.Glob(filepath.Join(k.lab.BPF(node), "maps", "*"))
	k.must(err)
	own, shared := 0, 0
	for _, pin := range pins {
		name := filepath.Base(pin)
		switch {
		case labtest.IsShared(name):
			shared++
		case strings.Contains(name, "_v99") == (k.running[node] == 1):
			own++
		case !strings.HasPrefix(name, "pil_drops") && !strings.HasPrefix(name, "pil_mark"):
			k.Errorf("%s: pin %s of another build remains", node, pin)
		}
	}
	if labtest.OtherIsRelease() {
		own = shared
	}
	if own < 7 {
		k.Errorf("%s: unexpected number of pins of its build, %d: %q", node, own, pins)
	}
}

// onlyOne checks that a node has the resources of one container.
func (k *killer) onlyOne(node string) {
	k.Helper()
	status, err := k.lab.Agent(node).Status(k.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	k.must(err)
	got := map[string]uint32{"endpoints": status.Msg.Endpoints, "tenants": status.Msg.Tenants}
	for _, e := range status.Msg.Datapath.Entries {
		if !e.Cache {
			got[e.Table] = e.Used
		}
	}
	ns, err := k.lab.Namespace(node)
	k.must(err)
	links, err := linksOf(ns)
	k.must(err)
	for _, l := range links {
		// The veth pair between the node and its containers exists without containers.
		if name := l.Attrs().Name; strings.HasPrefix(name, "pil") && !strings.HasPrefix(name, "pilaster") {
			got["devices"]++
		}
	}
	want := map[string]map[string]uint32{
		tenant.Netpila: {"endpoints": 1, "tenants": 1, "sources": 1, "locals": 1},
		tenant.ILA:     {"endpoints": 1, "ila-locals": 1, "ila-mappings": 1},
		// Forwarding: its own container, the one on the other node, and the CIDR.
		tenant.Nimitz: {"endpoints": 1, "nimitz-register": 1, "nimitz-forwarding": 3},
		tenant.EVPN:   {"endpoints": 1, "evpn-register": 1, "evpn-forwarding": 3},
	}[labtest.Network()]
	if labtest.Device() != endpoint.Macvlan {
		want["devices"] = 1 // a macvlan is not in the node's namespace
	}
	want["devices"] += map[string]uint32{tenant.Nimitz: 3, tenant.EVPN: 1}[labtest.Network()] // tunnel and gateway
	for thing := range want {
		if got[thing] != want[thing] {
			k.Errorf("%s has %d %s, want %d", node, got[thing], thing, want[thing])
		}
	}
	if len(status.Msg.Problems) > 0 {
		k.Errorf("%s: unexpected problems %q", node, status.Msg.Problems)
	}
}

func (k *killer) next(node string) lab.Container {
	k.names++
	return lab.Container{Name: fmt.Sprint("c", k.names), Node: node, Tenant: "blue",
		Labels: map[string]string{"app": "web"}}
}

func (k *killer) must(err error) {
	k.Helper()
	if err != nil {
		k.Fatal(err)
	}
}
