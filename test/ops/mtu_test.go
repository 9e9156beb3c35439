package ops_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestMTUFollowsTheUplink: running containers get the uplink's MTU minus the reserve, even if the uplink's MTU changed
// while no agent ran. The agent never sets an MTU that is too small for IPv6.
func TestMTUFollowsTheUplink(t *testing.T) {
	l := labtest.New(t, lab.Spec{
		Name: labtest.Name(t), Nodes: []string{"n1", "n2"}, Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"}},
	}, func(o *lab.Options) { o.AgentArgs = []string{"--mtu-reserve", "20"} })
	ctx := labtest.Context(t)
	s := startStream(ctx, t, l, "b1", "b2")
	link := func(mtu int) {
		setMTU(t, l, "n1", lab.Uplink, mtu)
		setMTU(t, l, lab.Router, "n1", mtu)
	}
	awaitMTU(ctx, t, l, 1480)
	s.flows(ctx, t, "at first")

	link(1400)
	awaitMTU(ctx, t, l, 1380)
	s.flows(ctx, t, "through a narrower link")
	link(1500)
	awaitMTU(ctx, t, l, 1480)
	s.flows(ctx, t, "through a wider one")

	must(t, l.Stop(ctx, lab.AgentProcess("n1")))
	link(1300)
	s.flows(ctx, t, "through a narrower link, without an agent")
	must(t, l.Start(ctx, lab.AgentProcess("n1")))
	awaitMTU(ctx, t, l, 1280)
	s.flows(ctx, t, "once an agent runs again")

	link(1290)
	for !strings.Contains(problems(ctx, t, l), "less the reserve of 20, that is below IPv6's minimum of 1280") {
		pause(ctx, t)
	}
	awaitMTU(ctx, t, l, 1280)
	s.flows(ctx, t, "with a link that is too narrow")
	s.end(t)
}

func setMTU(t *testing.T, l *lab.Lab, namespace, device string, mtu int) {
	t.Helper()
	inside(t, l, namespace, func(h *netlink.Handle) error {
		link, err := h.LinkByName(device)
		if err != nil {
			return err
		}
		return h.LinkSetMTU(link, mtu)
	})
}

func inside(t *testing.T, l *lab.Lab, namespace string, do func(*netlink.Handle) error) {
	t.Helper()
	ns, err := l.Namespace(namespace)
	must(t, err)
	defer ns.Close()
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	must(t, do(h))
}

// awaitMTU waits until b1's device has the MTU on both ends and the command line shows it.
func awaitMTU(ctx context.Context, t *testing.T, l *lab.Lab, want int) {
	t.Helper()
	since := time.Now()
	for {
		var said struct {
			MTU        int    `json:"mtu"`
			HostDevice string `json:"hostDevice"`
		}
		out, err := l.Output(ctx, "n1", labtest.Binary(t), "endpoint", "get", l.ContainerID("b1"), "-o", "json")
		must(t, err)
		must(t, json.Unmarshal([]byte(out), &said))
		container := deviceMTU(t, l, "b1", lab.Interface)
		host := container // a macvlan has no end on the node
		if labtest.Device() != endpoint.Macvlan {
			host = deviceMTU(t, l, "n1", said.HostDevice)
		}
		if said.MTU == want && host == want && container == want {
			t.Logf("MTU %d after %v", want, time.Since(since).Round(time.Millisecond))
			return
		}
		if time.Since(since) > 20*time.Second {
			t.Fatalf("the agent reports MTU %d, the node's end has %d and the container's %d; want %d",
				said.MTU, host, container,
				want)
		}
		pause(ctx, t)
	}
}

func deviceMTU(t *testing.T, l *lab.Lab, namespace, device string) (mtu int) {
	t.Helper()
	inside(t, l, namespace, func(h *netlink.Handle) error {
		link, err := h.LinkByName(device)
		if err == nil {
			mtu = link.Attrs().MTU
		}
		return err
	})
	return mtu
}

func problems(ctx context.Context, t *testing.T, l *lab.Lab) string {
	t.Helper()
	resp, err := l.Agent("n1").Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	must(t, err)
	return resp.Msg.String()
}

func pause(ctx context.Context, t *testing.T) {
	t.Helper()
	select {
	case <-ctx.Done():
		t.Fatal(context.Cause(ctx))
	case <-time.After(20 * time.Millisecond):
	}
}

// stream is a TCP connection between containers that sends continuously until it ends.
type stream struct {
	arrived atomic.Int64
	stop    context.CancelFunc
	sent    chan int64
	all     chan int64
}

func startStream(ctx context.Context, t *testing.T, l *lab.Lab, from, to string) *stream {
	t.Helper()
	address, err := l.Address(to)
	must(t, err)
	var listener net.Listener
	within(t, l, to, func() (err error) {
		listener, err = net.Listen("tcp6", netip.AddrPortFrom(address, 0).String())
		return err
	})
	ctx, stop := context.WithCancel(ctx)
	s := &stream{stop: stop, sent: make(chan int64, 1), all: make(chan int64, 1)}
	t.Cleanup(func() { stop(); listener.Close() })
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			s.all <- -1
			return
		}
		defer conn.Close()
		n, err := io.Copy(counter{&s.arrived}, conn)
		if err != nil {
			n = -1
		}
		s.all <- n
	}()
	var conn net.Conn
	within(t, l, from, func() (err error) {
		conn, err = net.DialTimeout("tcp6", listener.Addr().String(), 5*time.Second)
		return err
	})
	go func() {
		defer conn.Close()
		var sent int64
		for ctx.Err() == nil {
			n, err := conn.Write(make([]byte, 1<<14))
			sent += int64(n)
			if err != nil {
				sent = -2
				break
			}
			time.Sleep(time.Millisecond) // a steady flow, not a flood
		}
		s.sent <- sent
	}()
	return s
}

func within(t *testing.T, l *lab.Lab, container string, do func() error) {
	t.Helper()
	ns, err := l.Namespace(container)
	must(t, err)
	defer ns.Close()
	must(t, ns.Do(do))
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) { c.n.Add(int64(len(b))); return len(b), nil }

// flows waits until more data has arrived than can have been in flight when flows was called.
func (s *stream) flows(ctx context.Context, t *testing.T, when string) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, 20*time.Second, errors.New("no data flows "+when))
	defer cancel()
	since := time.Now()
	for until := s.arrived.Load() + 4<<20; s.arrived.Load() < until; {
		pause(ctx, t)
	}
	t.Logf("flows %s, in %v", when, time.Since(since).Round(time.Millisecond))
}

func (s *stream) end(t *testing.T) {
	t.Helper()
	s.stop()
	if sent, arrived := <-s.sent, <-s.all; sent != arrived {
		t.Errorf("sent %d bytes, but %d arrived", sent, arrived)
	}
}
