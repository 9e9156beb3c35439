package orchestrator

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/sdnotify"
	"pilaster.io/pilaster/internal/unixrpc"
)

// process is an orchestrator in a process of its own.
type process struct {
	Config
	cmd *exec.Cmd
	url string
}

// startProcess returns when the orchestrator has sent READY=1.
func startProcess(t testing.TB, etcd store.External, limits admission.Limits) *process {
	t.Helper()
	p := &process{Config: testConfig(t)}
	p.Etcd, p.Limits, p.Log = etcd, limits, nil
	text, err := json.Marshal(p.Config)
	if err != nil {
		t.Fatal(err)
	}
	ready, notify := notifySocket(t)
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), asProcess+"="+string(text), "NOTIFY_SOCKET="+notify)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Signal(syscall.SIGCONT)
		p.cmd.Process.Signal(syscall.SIGTERM)
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("orchestrator: %v", err)
		}
	})
	ready()
	status, err := operator(p.RunDir).ClusterStatus(t.Context(), connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	p.url = "https://" + status.Msg.Listen
	return p
}

// notifySocket listens as the supervisor does; ready waits for READY=1.
func notifySocket(t testing.TB) (ready func(), path string) {
	path = filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return func() {
		t.Helper()
		b := make([]byte, 64)
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := c.Read(b); err != nil || string(b[:n]) != sdnotify.Ready {
			t.Fatalf("got %q, %v on the supervisor's socket; want READY=1", b[:n], err)
		}
	}, path
}

// clients are the clients of both orchestrators, and all results that they received.
type clients struct {
	t          *testing.T
	token      string
	both       []*process
	mu         sync.Mutex
	prefixes   map[string]string // prefix: node
	tenants    map[uint32]string // id: tenant
	apps       map[uint32]string // id: label
	late       atomic.Int32      // calls without a response in time
	registered atomic.Int32
}

const (
	workers       = 64
	registrations = 1000
	stopAfter     = 150              // registrations
	stopFor       = 11 * time.Second // longer than any deadline in an orchestrator: see admission.CallTimeout
	clientTimeout = time.Second      // of a call
)

// Two orchestrators share an etcd. One of them is stopped by a signal, and continues after all its deadlines have
// passed. Changes that it decided before the stop must not take effect then.
func TestTwoOrchestratorsOneStopped(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd := storetest.Debian(t)
	c := &clients{
		t:        t,
		both:     []*process{startProcess(t, etcd, admission.Limits{}), startProcess(t, etcd, admission.Limits{})},
		prefixes: map[string]string{},
		tenants:  map[uint32]string{},
		apps:     map[uint32]string{},
	}
	token, err := os.ReadFile(filepath.Join(c.both[0].DataDir, "join-token"))
	if err != nil {
		t.Fatal(err)
	}
	if other, _ := os.ReadFile(filepath.Join(c.both[1].DataDir, "join-token")); string(other) != string(token) {
		t.Fatal("the orchestrators have different join tokens, want one cluster")
	}
	c.token = string(token)
	request := connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: "shared"})
	if _, err := operator(c.both[0].RunDir).CreateTenant(t.Context(), request); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	numbers := make(chan int)
	stopped := make(chan struct{}) // closed when the stopped orchestrator has continued
	var work sync.WaitGroup
	for range workers {
		work.Go(func() {
			for n := range numbers {
				c.node(ctx, n)
			}
		})
	}
	for n := range registrations {
		if n == stopAfter {
			go func() { defer close(stopped); c.stop(c.both[0]) }()
		}
		if n == registrations*9/10 {
			<-stopped // both run during the last registrations
		}
		numbers <- n
	}
	close(numbers)
	work.Wait()

	if c.late.Load() == 0 {
		t.Error("no call was late, want some in progress during the stop")
	}
	c.compare(ctx)
	conflicts := 0
	for _, p := range c.both {
		conflicts += metric(t, p.RunDir, "pilaster_orchestrator_store_conflicts_total")
	}
	if conflicts == 0 {
		t.Error("the orchestrators had no conflicts, want some")
	}
	t.Logf("%d registrations, %d prefixes, %d tenants, %d apps, %d conflicts, %d late calls",
		c.registered.Load(), len(c.prefixes), len(c.tenants), len(c.apps), conflicts, c.late.Load())
}

// metric returns the value of a metric from the operators' socket.
func metric(t testing.TB, runDir, name string) int {
	t.Helper()
	resp, err := unixrpc.Client(Socket(runDir)).Get(unixrpc.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			n, err := strconv.ParseFloat(value, 64) // large ones have an exponent
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

func (c *clients) stop(p *process) {
	p.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(stopFor) // until all deadlines have passed
	p.cmd.Process.Signal(syscall.SIGCONT)
}

// node joins, registers and resolves labels as a node, and creates a tenant as an operator. After each error it repeats
// the call at the other orchestrator.
func (c *clients) node(ctx context.Context, n int) {
	id := testNode(n)
	config := join.Config{
		Token:    c.token,
		StateDir: c.t.TempDir(),
		NodeName: id.Name,
		NodeUUID: id.UUID,
		Log:      slog.New(slog.DiscardHandler),
	}
	var node *pilasterv1.Node
	c.retry(ctx, n, func(ctx context.Context, p *process) error {
		config.URL = p.url
		client, err := join.Dial(ctx, config)
		if err != nil {
			return err
		}
		defer client.Close()
		resp, err := client.Register(ctx, connect.NewRequest(&pilasterv1.RegisterRequest{}))
		if err != nil {
			return err
		}
		node = resp.Msg.Node
		for _, label := range labels(n) {
			resp, err := client.Resolve(
				ctx,
				connect.NewRequest(
					&pilasterv1.ResolveRequest{Tenant: "shared", Labels: map[string]string{"app": label}},
				),
			)
			if err != nil {
				return err
			}
			record(c, c.apps, resp.Msg.App.Id, label)
		}
		return nil
	})
	if node == nil {
		return
	}
	c.registered.Add(1)
	record(c, c.prefixes, node.Prefix, node.Name)
	if n%10 != 0 {
		return
	}
	name := fmt.Sprint("t", n/20) // two clients create it, each at another orchestrator
	c.retry(ctx, n/10, func(ctx context.Context, p *process) error {
		request := connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name})
		resp, err := operator(p.RunDir).CreateTenant(ctx, request)
		if err != nil {
			if connect.CodeOf(err) == connect.CodeAlreadyExists {
				return nil // created by the other client, or by an earlier call whose response was late
			}
			return err
		}
		record(c, c.tenants, resp.Msg.Tenant.Ids[0].Id, name)
		return nil
	})
}

// labels returns the labels of a node's containers: one that several nodes share, and on every fifth node also a label
// that no other node has.
func labels(n int) []string {
	if n%5 == 0 {
		return []string{fmt.Sprint(n % 50), fmt.Sprint("own-", n)}
	}
	return []string{fmt.Sprint(n % 50)}
}

// retry repeats a call, at both orchestrators by turns, until it succeeds.
func (c *clients) retry(ctx context.Context, first int, call func(context.Context, *process) error) {
	for try := first; ; try++ {
		once, cancel := context.WithTimeout(ctx, clientTimeout)
		err := call(once, c.both[try%2])
		cancel()
		switch {
		case err == nil:
			return
		case ctx.Err() != nil:
			c.t.Errorf("gave up: %v", err)
			return
		case connect.CodeOf(err) == connect.CodeDeadlineExceeded, connect.CodeOf(err) == connect.CodeUnavailable,
			once.Err() != nil:
			c.late.Add(1)
		default:
			c.t.Error(err)
			return
		}
	}
}

func record[K comparable](c *clients, known map[K]string, id K, owner string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if other, taken := known[id]; taken && other != owner {
		c.t.Errorf("%v was allocated to %s and to %s", id, other, owner)
	}
	known[id] = owner
}

// compare compares the results that clients received with the state that each orchestrator shows.
func (c *clients) compare(ctx context.Context) {
	t := c.t
	if got := c.registered.Load(); got != registrations || len(c.prefixes) != registrations {
		t.Errorf("%d registrations and %d prefixes, want %d", got, len(c.prefixes), registrations)
	}
	for i, p := range c.both {
		op := operator(p.RunDir)
		nodes, err := op.ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil {
			t.Fatalf("orchestrator %d: %v", i, err)
		}
		prefixes := map[string]string{}
		for _, n := range nodes.Msg.Nodes {
			prefixes[n.Prefix] = n.Name
		}
		if !maps.Equal(prefixes, c.prefixes) {
			t.Errorf("orchestrator %d shows prefixes %v, nodes received %v", i, prefixes, c.prefixes)
		}
		tenants, err := op.ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
		if err != nil {
			t.Fatalf("orchestrator %d: %v", i, err)
		}
		ids := map[uint32]string{}
		for _, tenant := range tenants.Msg.Tenants {
			if other, taken := ids[tenant.Ids[0].Id]; taken {
				t.Errorf("orchestrator %d: id %d belongs to %s and %s", i, tenant.Ids[0].Id, other, tenant.Name)
			}
			ids[tenant.Ids[0].Id] = tenant.Name
		}
		if len(ids) != registrations/20+1 { // with tenant "shared"
			t.Errorf("orchestrator %d shows %d tenants, want %d", i, len(ids), registrations/20+1)
		}
		for id, name := range c.tenants {
			if ids[id] != name {
				t.Errorf("orchestrator %d: id %d belongs to %q, want %q, as the client received", i, id, ids[id], name)
			}
		}
		shared, err := op.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "shared"}))
		if err != nil {
			t.Fatalf("orchestrator %d: %v", i, err)
		}
		apps := map[uint32]string{}
		for _, a := range shared.Msg.Apps {
			apps[a.Id] = a.Labels["app"]
		}
		if !maps.Equal(apps, c.apps) || len(apps) != 50+registrations/5 {
			t.Errorf("orchestrator %d shows %d apps, clients received %d; want %d",
				i, len(apps), len(c.apps), 50+registrations/5)
		}
	}
}
