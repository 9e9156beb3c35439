package evpn_test

import (
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/bgp/bgptest"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Addresses of what the lab does not have: etcd is in the fabric's namespace, and the second orchestrator in its own.
const (
	etcdClients  = "http://[2001:db8:70::1]:2379"
	etcdPeers    = "http://[2001:db8:70::1]:2380"
	secondHost   = "2001:db8:98::2"
	secondRouter = "2001:db8:98::1"
	serverHost   = "2001:db8:97::2"
	serverRouter = "2001:db8:97::1"
)

// startRouteServer starts an FRR through which orchestrators and a router exchange routes. The router's session stays
// up when an orchestrator ends.
func startRouteServer(b bed) *bgptest.FRR {
	b.Helper()
	ns := b.host("server", serverHost, serverRouter)
	h := handle(b.T, ns)
	routeVia(b.T, h, "eth0", "10.0.0.0/8", serverRouter) // FRR resolves next hops, but sends nothing to them
	config := readHowTo(b.T).block("router bgp")
	return bgptest.StartFRR(b.T, ns, withPeers(config, ourASN, orchestratorAt, secondHost))
}

// host connects a namespace to the fabric.
func (b bed) host(name, address, router string) *netns.Namespace {
	b.Helper()
	ns := namespace(b.T, name)
	fabric, h := handle(b.T, b.namespace(lab.Router)), handle(b.T, ns)
	wire(b.T, fabric, name, ns, "eth0", "")
	up(b.T, fabric, name, router+"/64")
	up(b.T, h, "lo")
	up(b.T, h, "eth0", address+"/64")
	routeVia(b.T, h, "eth0", "2001:db8::/32", router)
	return ns
}

// daemon is a process in a namespace.
type daemon struct {
	t    *testing.T
	ns   *netns.Namespace
	argv []string
	log  string
	cmd  *exec.Cmd // nil while it does not run
}

func newDaemon(t *testing.T, ns *netns.Namespace, name string, argv ...string) *daemon {
	d := &daemon{t: t, ns: ns, argv: argv, log: filepath.Join(t.TempDir(), name)}
	t.Cleanup(func() {
		d.kill()
		if text, _ := os.ReadFile(d.log); t.Failed() {
			t.Logf("%s:\n%s", name, text[max(0, len(text)-4000):])
		}
	})
	return d
}

func (d *daemon) start() {
	d.t.Helper()
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(d.t, err)
	defer log.Close()
	cmd := exec.Command(d.argv[0], d.argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	must(d.t, d.ns.Start(cmd))
	d.cmd = cmd
}

// kill kills the process with SIGKILL and waits for its end.
func (d *daemon) kill() {
	if d.cmd != nil {
		d.cmd.Process.Signal(syscall.SIGKILL)
		d.cmd.Wait()
		d.cmd = nil
	}
}

// withEtcd makes the lab's orchestrator use an etcd that several orchestrators can reach.
func withEtcd(t *testing.T) func(*lab.Options) {
	name, started := labtest.Name(t), false
	return func(o *lab.Options) {
		o.OrchestratorArgs = append(o.OrchestratorArgs, "--etcd", etcdClients)
		o.Progress = func(string) { // the fabric's namespace exists at the step before the orchestrator's start
			router, err := netns.Open(filepath.Join(lab.DefaultRoot, name, "netns", lab.Router))
			if err != nil || started {
				return
			}
			started = true
			t.Cleanup(func() { router.Close() })
			newDaemon(t, router, "etcd", "/usr/bin/etcd", "--data-dir", filepath.Join(t.TempDir(), "etcd"),
				"--listen-client-urls", etcdClients, "--advertise-client-urls", etcdClients,
				"--listen-peer-urls", etcdPeers, "--initial-advertise-peer-urls", etcdPeers,
				"--initial-cluster", "default="+etcdPeers).start()
		}
	}
}

// second is an orchestrator beside that of the lab.
type second struct {
	*daemon
	runDir string
}

func newSecond(b bed, peer string) *second {
	b.Helper()
	ns := b.host("second", secondHost, secondRouter)
	dir, err := os.MkdirTemp("", "second") // short, because it has a socket
	must(b.T, err)
	b.Cleanup(func() { os.RemoveAll(dir) })
	s := &second{runDir: filepath.Join(dir, "run")}
	s.daemon = newDaemon(b.T, ns, "second", append([]string{
		labtest.Binary(b.T), "orchestrator", "--listen", "[" + secondHost + "]:7070", "--etcd", etcdClients,
		"--data-dir", filepath.Join(dir, "data"), "--run-dir", s.runDir,
	}, bgpFlags(peer)...)...)
	return s
}

// evpnStatus returns what `pilaster evpn status` shows; false while the orchestrator does not answer.
func evpnStatus(runDir string) (s evpnroutes.Status, ok bool) {
	resp, err := unixrpc.Client(orchestrator.Socket(runDir)).Get(unixrpc.URL + orchestrator.EVPNStatusPath)
	if err != nil {
		return s, false
	}
	defer resp.Body.Close()
	return s, resp.StatusCode == http.StatusOK && json.NewDecoder(resp.Body).Decode(&s) == nil
}

// pair is a bed with two orchestrators that announce to the same FRR.
type pair struct {
	bed
	*second
	peer      *bgptest.FRR // of both: the router n, or a route server
	n         *frrNode
	announced int // routes of each orchestrator
}

func newPair(t *testing.T, routeServer bool) *pair {
	t.Helper()
	at := frrAddress
	if routeServer {
		at = serverHost
	}
	p := &pair{bed: newBed(t, withEtcd(t), bgpArguments(at))}
	p.second = newSecond(p.bed, at)
	p.second.start()
	if routeServer {
		p.peer = startRouteServer(p.bed)
		p.n = newFRRNode(t, p.Lab, p.id, frrASN, serverHost)
	} else {
		p.n = newFRRNode(t, p.Lab, p.id, ourASN, orchestratorAt, secondHost)
		p.peer = p.n.FRR
	}
	pings(p.n.switched, segmentSide) // so that FRR knows the host
	run := filepath.Join(p.Folder(), "orchestrator", "run")
	until(t, "both orchestrators announce and import the same", func() bool {
		first, ok1 := evpnStatus(run)
		last, ok2 := evpnStatus(p.runDir)
		p.announced = p.routesOf(secondHost)
		return ok1 && ok2 && p.announced > 0 && p.announced == p.routesOf(orchestratorAt) &&
			len(first.Records) > 0 && maps.Equal(first.Records, last.Records) &&
			maps.Equal(first.Announced, last.Announced)
	})
	p.bothWays(p.n)
	return p
}

// routesOf returns how many routes FRR has from an orchestrator; -1 while their session is down.
func (p *pair) routesOf(address string) int {
	p.Helper()
	var s struct {
		Peers map[string]struct {
			State    string `json:"state"`
			Prefixes int    `json:"pfxRcd"`
		} `json:"peers"`
	}
	must(p.T, json.Unmarshal([]byte(p.peer.Run("show bgp l2vpn evpn summary json")), &s))
	if is := s.Peers[address]; is.State == "Established" {
		return is.Prefixes
	}
	return -1
}

// TestOneOfTwoOrchestratorsIsKilled sends both ways, between containers and hosts of FRR's kernel. Each orchestrator is
// killed in turn, and starts again: not one datagram is lost.
func TestOneOfTwoOrchestratorsIsKilled(t *testing.T) {
	t.Run("peers of a router", func(t *testing.T) {
		p := newPair(t, false)
		p.killEach(p.switchedFlows())
	})
	t.Run("peers of a route server", func(t *testing.T) {
		p := newPair(t, true)
		// A router with sessions to both orchestrators would lose these: FRR 8.4 forgets the router MAC of a VTEP when
		// the best path to the VTEP changes to another peer's (FRR issue 12391).
		routed := start(t, "the routed host to c1", p.n.routed, p.namespace("c1"), p.address("c1"))
		p.killEach(append(p.switchedFlows(), routed))
	})
}

// switchedFlows are those that FRR receives, or sends in the tenant's segment.
func (p *pair) switchedFlows() []*flow {
	c1, c2 := p.namespace("c1"), p.namespace("c2")
	return []*flow{
		start(p.T, "c1 to the routed host", c1, p.n.routed, routedHost),
		start(p.T, "c2 to the switched host", c2, p.n.switched, switchedHost),
		start(p.T, "the switched host to c2", p.n.switched, c2, p.address("c2")),
	}
}

// killEach kills each orchestrator while flows are sent.
func (p *pair) killEach(flows []*flow) {
	for _, o := range []struct {
		address     string
		kill, start func()
	}{
		{
			orchestratorAt,
			func() { must(p.T, p.KillNoRestart(p.T.Context(), lab.Orchestrator)) },
			func() { must(p.T, p.Start(labtest.Context(p.T), lab.Orchestrator)) },
		},
		{secondHost, p.second.kill, p.second.start},
	} {
		o.kill()
		until(p.T, "FRR has lost "+o.address, func() bool { return p.routesOf(o.address) < 0 })
		for _, f := range flows {
			f.await(p.T, int((stale+2*time.Second)/flowEvery)) // longer than the routes of a lost peer remain
		}
		o.start()
		until(p.T, "FRR has all routes of "+o.address, func() bool { return p.routesOf(o.address) == p.announced })
		for _, f := range flows {
			f.await(p.T, int(time.Second/flowEvery))
		}
	}
	for _, f := range flows {
		sent, lost := f.end()
		p.Logf("%s: %d datagrams", f.name, sent)
		if len(lost) > 0 {
			p.Errorf("%s: %d of %d datagrams are lost: %v", f.name, len(lost), sent, lost[:min(20, len(lost))])
		}
	}
}
