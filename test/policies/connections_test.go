package policies_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/policy/policytest"
)

const (
	someConnections = 2_000 // unless PILASTER_TEST_CONNECTIONS says how many
	dialledAtOnce   = 500   // fewer than a listener has room for
	churns          = 20    // of policies
)

// Connections run from all of the first to all of the others, which are on the other node.
var (
	diallers = []string{"xa", "xc", "yb", "za"}
	listened = []string{"xb", "ya", "yc", "zb"}
)

// TestConnectionsOutlivePolicies: policies come, change and go again, none of which forbids the connections that there are. Each packet of these arrives, and
// no packet of anybody is dropped; until one policy does forbid them.
func TestConnectionsOutlivePolicies(t *testing.T) {
	count := someConnections
	if s := os.Getenv("PILASTER_TEST_CONNECTIONS"); s != "" {
		var err error
		if count, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	need := uint64(2*count + 1_000)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: need, Max: need}); need > 20_000 && err != nil {
		t.Fatal(err)
	}
	l, ctx := labtest.New(t, podsOn(lab.Tenant{})), labtest.Context(t)
	p := newProber(t, l, slices.Sorted(maps.Keys(policytest.Pods())), calm, func(c lab.ContainerStatus) netip.Addr { return c.Address })
	// All who listen are under policies from the start, and so are all who dial.
	apply(ctx, t, l, 0, []string{allowed("ingress", 80, 81), allowed("egress", 80, 81)})
	begun := time.Now()
	all := dial(ctx, t, p, count)
	all.talk(t, "at first")
	t.Logf("%d connections within %v", count, time.Since(begun))
	before := drops(ctx, t, l)
	for i := range churns {
		documents := []string{allowed("ingress", 80, 81, 1000+i), allowed("egress", 80, 81)}
		if i%2 == 0 { // somebody else is cut off, by name and by block
			documents = append(documents, `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "other", "namespace": "z"},
				"spec": {"podSelector": {"matchLabels": {"pod": "c"}}, "policyTypes": ["Ingress", "Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}}`)
		}
		apply(ctx, t, l, i+1, documents)
		all.talk(t, fmt.Sprintf("after change %d", i+1))
	}
	if now := drops(ctx, t, l); !slices.EqualFunc(before, now, maps.Equal) {
		t.Errorf("nodes dropped %v, and before policies changed %v", now, before)
	}
	t.Logf("%d changes of policies, %v", churns, time.Since(begun))

	// That this is not blind.
	apply(ctx, t, l, churns+1, []string{allowed("ingress", 1), allowed("egress", 80, 81)})
	if err := all.write(); err != nil {
		t.Fatal(err)
	}
	for denied := uint64(0); denied < uint64(count); {
		if ctx.Err() != nil {
			t.Fatalf("of %d connections that are forbidden, %d packets were dropped", count, denied)
		}
		denied = drops(ctx, t, l)[1]["policy-denied"]
	}
	if came, err := all.read(0); err != nil || came > 0 {
		t.Errorf("%d of %d connections that are forbidden carry something: %v", came, count, err)
	}
}

// allowed is a policy by which all of the tenant reach each other by some ports of TCP and no others, in one direction.
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
	return fmt.Sprintf(`{"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy", "metadata": {"name": %q},
		"spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, %q: [
			{"action": "Accept", %q: %s, "protocols": [%s]}, {"action": "Deny", %q: %s}]}}`, direction, direction, who, peers, list, who, peers)
}

// connections are established ones, by number. Each end is a socket of this process.
type connections struct {
	dialled []int
	epoll   int // of the other ends
	said    byte
	heard   []byte // of each the last that it said
}

// dial makes connections, evenly between all pairs of containers and ports.
func dial(ctx context.Context, t *testing.T, p *prober, count int) *connections {
	t.Helper()
	c := &connections{heard: make([]byte, count)}
	var err error
	if c.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	var others []int
	t.Cleanup(func() {
		for _, fd := range slices.Concat(c.dialled, others) {
			p.hangUp(fd)
		}
		unix.Close(c.epoll)
	})
	err = netns.OnThread(func() error {
		for len(c.dialled) < count {
			from := diallers[len(c.dialled)/dialledAtOnce%len(diallers)]
			if err := unix.Setns(p.spaces[from].FD(), unix.CLONE_NEWNET); err != nil {
				return err
			}
			for range min(dialledAtOnce, count-len(c.dialled)) {
				fd, err := unix.Socket(family(p.addresses[from]), unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
				if err != nil {
					return err
				}
				n := len(c.dialled)
				c.dialled = append(c.dialled, fd)
				to := end{listened[n%len(listened)], serverPorts[n/len(listened)%len(serverPorts)]}
				if err := unix.Connect(fd, p.place(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
					return fmt.Errorf("connection %d from %s to %v: %w", n, from, to, err)
				}
			}
			for len(others) < len(c.dialled) {
				if err := ctx.Err(); err != nil {
					return fmt.Errorf("%d of %d connections were accepted: %w", len(others), len(c.dialled), err)
				}
				if err := p.accept(func(fd int) error {
					others = append(others, fd)
					return unix.EpollCtl(c.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
				}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// write has each connection say its number, and how often it has said something.
func (c *connections) write() error {
	c.said++
	for n, fd := range c.dialled {
		if _, err := unix.Write(fd, append(binary.BigEndian.AppendUint32(nil, uint32(n)), c.said)); err != nil {
			return fmt.Errorf("connection %d: %w", n, err)
		}
	}
	return nil
}

// read takes what comes within so many milliseconds after the last that came, and counts it.
func (c *connections) read(patience int) (came int, err error) {
	events, b := make([]unix.EpollEvent, 512), make([]byte, 5)
	for came < len(c.dialled) {
		n, err := unix.EpollWait(c.epoll, events, patience)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return came, err
		}
		for _, e := range events[:n] {
			n, err := unix.Read(int(e.Fd), b)
			if err != nil || n != len(b) {
				return came, fmt.Errorf("%d bytes of one connection: %w", n, err)
			}
			if number := binary.BigEndian.Uint32(b); c.heard[number]+1 != b[4] {
				return came, fmt.Errorf("connection %d says its %dth after its %dth", number, b[4], c.heard[number])
			} else {
				c.heard[number] = b[4]
			}
			came++
		}
	}
	return came, nil
}

// talk wants each connection to carry something.
func (c *connections) talk(t *testing.T, when string) {
	t.Helper()
	if err := c.write(); err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	if came, err := c.read(int(patience.Milliseconds())); err != nil || came != len(c.dialled) {
		t.Fatalf("%s: %d of %d connections carry something: %v", when, came, len(c.dialled), err)
	}
}
