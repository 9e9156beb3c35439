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
	"pilaster.io/pilaster/internal/unixrpc"
)

// youth is up to which age agents are killed.
const youth = 500 * time.Millisecond

// TestKills kills the agents of two nodes PILASTER_RESTART_KILLS times, with the choices of
// PILASTER_RESTART_SEED: while they start, in the middle of ADD and DEL, and of taking over from another
// build, whose tables are laid out otherwise. Two containers send each other numbered datagrams all the
// while, and none is lost; what they send to no container is counted, each once.
func TestKills(t *testing.T) {
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
		Tenants: []lab.Tenant{{Name: "blue"}},
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
	t.Logf("%d kills; they cut %d ADDs and %d DELs off; %d starts were of another build than the one before, and %d "+
		"of those were cut off",
		k.kills, k.cutAdds, k.cutDels, k.upgrades, k.cutUpgrades)
	if kills >= 50 && (k.cutAdds == 0 || k.cutDels == 0 || k.cutUpgrades == 0) {
		t.Error("no ADD, no DEL or no upgrade was cut off: the kills come at the wrong time")
	}
	if 10*k.upgrades < k.kills {
		t.Errorf("%d of %d starts were of another build, want every tenth", k.upgrades, k.kills)
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

	added, removed time.Duration // what the last undisturbed ADD and DEL took
}

// crash kills an agent and returns when it has been started again.
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
	time.Sleep(d) // at random is what kills come at
	return d
}

// young kills an agent some time after its start, at which it was killed too.
func (k *killer) young(node string) {
	k.crash(node, "while idle")
	k.crash(node, fmt.Sprint("at the age of ", k.wait(youth)))
}

// duringUpgrade has another build take over, kills it some time after its start, and has it or the one
// before go on.
func (k *killer) duringUpgrade(node string) {
	k.builds.choose(k.T, 1-k.running[node])
	k.crash(node, "while idle, for another build")
	age := k.wait(youth / 2) // most starts are over by then
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

// duringAdd kills an agent while a container comes. Where the ADD fails, a runtime calls DEL.
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

// duringDel kills an agent while a container goes. Where the DEL fails, a runtime calls it again.
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

// works wants an agent to be ready, and an ADD and a DEL to succeed.
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

// ready waits until an agent says that it is ready and wants /readyz to agree.
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
		k.Fatalf("%s runs version %s, not build %d", node, status.Msg.Version, k.running[node])
	}
	if response.StatusCode != http.StatusOK {
		k.Fatalf("%s: /readyz says %d %s", node, response.StatusCode, body)
	}
}

// counted wants each datagram to no container to be counted once, whichever build dropped it.
func (k *killer) counted(node string, sent uint64) {
	const reason = "dst-undecryptable"
	status, err := k.lab.Agent(node).Status(k.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	k.must(err)
	for _, d := range status.Msg.Drops {
		if d.Reason == reason && (d.Packets != sent || sent == 0) {
			k.Errorf("%s counted %d drops for %s, and %d were sent", node, d.Packets, reason, sent)
		}
	}
}

// onlyOwnPins wants nothing of the other build to be left but its counters, and what builds share.
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
			k.Errorf("%s: %s is left of another build", node, pin)
		}
	}
	if labtest.OtherIsRelease() {
		own = shared
	}
	if own < 7 {
		k.Errorf("%s: %d pins of its build: %q", node, own, pins)
	}
}

// onlyOne wants a node to have one container and nothing of others.
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
		// The pair between the node and its containers is there without them.
		if name := l.Attrs().Name; strings.HasPrefix(name, "pil") && !strings.HasPrefix(name, "pilaster") {
			got["devices"]++
		}
	}
	want := map[string]uint32{"endpoints": 1, "tenants": 1, "sources": 1, "locals": 1}
	if labtest.Device() != endpoint.Macvlan {
		want["devices"] = 1 // a macvlan is not on the node
	}
	for thing := range want {
		if got[thing] != want[thing] {
			k.Errorf("%s has %d %s, want %d", node, got[thing], thing, want[thing])
		}
	}
	if len(status.Msg.Problems) > 0 {
		k.Errorf("%s: %q", node, status.Msg.Problems)
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
