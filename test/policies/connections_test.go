package policies_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// Each container of diallers connects to each container of listened; they are on different nodes. A container of
// listened has one process per port, and a container of diallers has the same number of processes, because a process
// cannot have more than 20,000 open files.
var (
	diallers = []string{"xa", "xc", "yb", "za"}
	listened = []string{"xb", "ya", "yc", "zb"}
)

const (
	changeEvery = 100 * time.Millisecond // interval of policy changes
	wordsEvery  = 50 * time.Millisecond  // interval of exchanges on some connections; shorter than changeEvery
	wordsAtOnce = 256                    // average number of connections per exchange
)

// churn is the number of connections and the changes made meanwhile.
type churn struct {
	connections, changes int // connections is a multiple of the number of pairs of processes
	killEvery            int // number of changes between two kills of an agent
}

// TestConnectionsOutlivePolicies: connections between processes on two nodes continue while policies that allow them
// are created, changed and deleted, and agents are killed. Each message arrives and is echoed, no packet is dropped,
// and both nodes keep all sessions. Finally a policy denies the connections, and messages no longer arrive.
func TestConnectionsOutlivePolicies(t *testing.T) {
	size := churn{connections: 2_048, changes: 12, killEvery: 6}
	if long() {
		size = churn{connections: 102_400, changes: 600, killEvery: 100}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	l := labtest.New(t, podsOn(lab.Tenant{}),
		func(o *lab.Options) { o.AgentArgs = []string{"--max-sessions", fmt.Sprint(4 * size.connections)} })
	// All containers are isolated from the start.
	apply(ctx, t, l, 0, []string{allowed("ingress", 80, 81), allowed("egress", 80, 81)}, nodes)
	c := dial(t, l, size.connections)
	c.talk(t, "at first", 1)
	dropped, remembered := drops(ctx, t, l), c.mustBeRemembered(ctx, t, l, nil)

	begun, words, ended := time.Now(), 0, make(chan error, 1)
	go func() { ended <- size.run(ctx, l) }()
	for again := time.NewTicker(wordsEvery); ended != nil; {
		words += c.talk(t, "while policies change", wordsAtOnce/float64(size.connections))
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			ended = nil
			again.Stop()
		case <-again.C:
		}
	}
	took := time.Since(begun)
	apply(ctx, t, l, size.changes, size.documents(size.changes), nodes)
	c.talk(t, "when policies have changed", 1)
	c.mustBeRemembered(ctx, t, l, remembered)
	if now := drops(ctx, t, l); !slices.EqualFunc(dropped, now, maps.Equal) {
		t.Errorf("the nodes dropped packets: got counters %v, want %v", now, dropped)
	}
	t.Logf("%d connections of %d processes; %d changes of policies in %v, and %d kills of agents; %d messages were "+
		"echoed meanwhile; sessions %v",
		size.connections, len(c.dialled)+len(c.accepted), size.changes, took.Round(time.Millisecond),
		size.changes/size.killEvery, words, remembered)

	// Check the test itself: it must detect that a node has lost its sessions, and that a policy denies connections of
	// which only the other node has sessions.
	forget(t, l, nodes[0])
	if _, err := c.remembered(ctx, l, remembered); err == nil {
		t.Error("the loss of all sessions of a node was not noticed")
	}
	apply(ctx, t, l, size.changes+1, []string{allowed("ingress", 1), allowed("egress", 80, 81)}, nodes)
	if said, err := c.accepted.each("Say", 1.0); err != nil || said != size.connections {
		t.Fatalf("messages were sent on %d connections: %v", said, err)
	}
	for denied := uint64(0); denied < uint64(size.connections); {
		if ctx.Err() != nil {
			t.Fatalf("with %d denied connections, only %d packets were dropped", size.connections, denied)
		}
		denied = drops(ctx, t, l)[1]["policy-denied"]
	}
	if arrived, err := c.accepted.each("Arrived", 100*time.Millisecond); err != nil || arrived > 0 {
		t.Errorf("%d of %d denied connections still carry data: %v", arrived, size.connections, err)
	}
}

// documents returns the policies of a change. All of them allow the connections. Some name the connections' containers
// and additional ports, and some deny another container, by labels and by CIDR.
func (s churn) documents(change int) []string {
	documents := []string{allowed("ingress", 80, 81, 1000+change), allowed("egress", 80, 81)}
	if change%4 < 2 {
		documents = append(documents, fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
			"metadata": {"name": "other", "namespace": "z"},
			"spec": {"podSelector": {"matchLabels": {"pod": "c"}}, "policyTypes": ["Ingress", "Egress"],
				"egress": [{"to": [{"ipBlock": {"cidr": "10.%d.0.0/16"}}]}]}}`, change%256))
	}
	return documents
}

// run changes policies at a fixed rate, without waiting for the nodes, and kills the agents in turn.
func (s churn) run(ctx context.Context, l *lab.Lab) error {
	var kills sync.WaitGroup
	killed := make([]error, s.changes)
	defer kills.Wait()
	ticks := time.NewTicker(changeEvery)
	defer ticks.Stop()
	for i := range s.changes {
		<-ticks.C
		if _, err := l.Operator().ApplyPolicies(ctx,
			connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue",
				Documents: s.documents(i)})); err != nil {
			return err
		}
		if i%4 == 2 {
			other := []*pilasterv1.Policy{{Kind: "NetworkPolicy", Namespace: "z", Name: "other"}}
			if _, err := l.Operator().DeletePolicies(ctx,
				connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: "blue", Policies: other})); err != nil {
				return err
			}
		}
		if i%s.killEvery == s.killEvery/2 {
			kills.Go(func() { _, killed[i] = l.Kill(ctx, lab.AgentProcess(nodes[i/s.killEvery%len(nodes)])) })
		}
	}
	kills.Wait()
	return errors.Join(killed...)
}

// allowed returns a policy for one direction that allows all pods of the tenant to reach each other, but only at the
// given TCP ports.
func allowed(direction string, ports ...int) string {
	who := "from"
	if direction == "egress" {
		who = "to"
	}
	var list string
	for i, port := range ports {
		if i > 0 {
			list += ", "
		}
		list += fmt.Sprintf(`{"tcp": {"destinationPort": {"number": %d}}}`, port)
	}
	peers := `[{"namespaces": {}}]`
	return fmt.Sprintf(`{"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
		"metadata": {"name": %q},
		"spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, %q: [
			{"action": "Accept", %q: %s, "protocols": [%s]},
				{"action": "Deny", %q: %s}]}}`, direction, direction, who, peers, list, who, peers)
}

// connections are established connections: their number, and the processes at both ends.
type connections struct {
	count             int
	dialled, accepted talkers
}

// dial opens connections, evenly between all pairs of containers and ports.
func dial(t *testing.T, l *lab.Lab, count int) *connections {
	t.Helper()
	c := &connections{count: count}
	var to []netip.AddrPort
	for _, name := range listened {
		address, err := l.Address(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, port := range serverPorts {
			at := netip.AddrPortFrom(address, port)
			to = append(to, at)
			if err := c.accepted.start(t, l, name).Call("Talker.Listen", at, new(int)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, name := range diallers {
		for range serverPorts {
			c.dialled.start(t, l, name)
		}
	}
	t.Cleanup(c.dialled.end)
	t.Cleanup(c.accepted.end)
	begun := time.Now()
	made := make(chan error, 1)
	go func() {
		_, err := c.dialled.each("Dial", Dials{to, count / len(c.dialled)})
		made <- err
	}()
	_, err := c.accepted.each("Accept", count/len(c.accepted))
	if err := errors.Join(<-made, err); err != nil {
		t.Fatal(err)
	}
	t.Logf("opened %d connections within %v", count, time.Since(begun))
	return c
}

// talk sends a message on a random share of the connections. It checks that every message is echoed, and that all
// connections are open at both ends. It returns the number of messages.
func (c *connections) talk(t *testing.T, when string, share float64) int {
	t.Helper()
	said, err := c.accepted.each("Say", share)
	if err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	arrived, err := c.accepted.each("Arrived", patience)
	if err != nil || arrived != said {
		t.Errorf("%s: %d of %d messages were echoed: %v", when, arrived, said, err)
	}
	for _, ends := range []talkers{c.dialled, c.accepted} {
		if open, err := ends.each("Open", 0); err != nil || open != c.count {
			t.Errorf("%s: %d of %d connections are open at each end: %v", when, open, c.count, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return said
}

// remembered checks that both nodes have an established session for each connection, and that neither node has created,
// evicted or refused a session since before.
func (c *connections) remembered(ctx context.Context, l *lab.Lab,
	before []*pilasterv1.Sessions) (all []*pilasterv1.Sessions, err error) {
	for i, node := range nodes {
		status, failed := l.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		if failed != nil {
			return nil, failed
		}
		s := status.Msg.GetPolicies().GetSessions()
		if int(s.GetUsed()-s.GetHalfOpen()) != c.count {
			err = errors.Join(err, fmt.Errorf("%s has sessions %v, want %d established", node, s, c.count))
		}
		if before != nil && (s.Begun != before[i].Begun || s.Evicted != before[i].Evicted ||
			s.Refused != before[i].Refused) {
			err = errors.Join(err, fmt.Errorf("%s: the counters changed to %v from %v", node, s, before[i]))
		}
		all = append(all, s)
	}
	return all, err
}

func (c *connections) mustBeRemembered(ctx context.Context, t *testing.T, l *lab.Lab,
	before []*pilasterv1.Sessions) []*pilasterv1.Sessions {
	t.Helper()
	all, err := c.remembered(ctx, l, before)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// forget empties the session table of a node.
func forget(t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(l.BPF(node), "maps", "pil_sessions_v1*"))
	if err != nil || len(pins) != 1 {
		t.Fatalf("unexpected pins of the session tables: %v, %v", pins, err)
	}
	m, err := ebpf.LoadPinnedMap(pins[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	empty := make([]byte, m.ValueSize())
	for i := range m.MaxEntries() {
		if err := m.Put(i, empty); err != nil {
			t.Fatal(err)
		}
	}
}
