package lab_test

import (
	"encoding/json"
	"errors"
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

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var small = lab.Spec{
	Nodes:   []string{"n1", "n2"},
	Outside: []lab.OutsideHost{{Name: "internet"}, {Name: "far", Address: netip.MustParseAddr("2001:db8:9::7")}},
	Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "glass", Addressing: tenant.Clear}},
	Containers: []lab.Container{
		{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
		{Name: "b2", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "db"}},
		{Name: "r1", Node: "n1", Tenant: "red"},
		{Name: "g1", Node: "n1", Tenant: "glass"},
		{Name: "g2", Node: "n2", Tenant: "glass"},
	},
}

// TestLab covers the functions of a lab. All subtests share one lab, because each lab takes seconds.
func TestLab(t *testing.T) {
	l := labtest.New(t, small)
	ctx := labtest.Context(t)

	t.Run("containers reach their tenant and no other", func(t *testing.T) {
		echoes, err := l.PingAll(ctx, packet.PingOptions{Timeout: 300 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if len(echoes) != 20 {
			t.Errorf("got %d pairs, want 20", len(echoes))
		}
		for _, e := range echoes {
			must, err := l.MustReach(e.From, e.To)
			if err != nil {
				t.Fatal(err)
			}
			if e.Reached() != must || (e.RTTUs == nil) == must {
				t.Errorf("got %+v, must reach: %v", e, must)
			}
		}
	})

	t.Run("names are completed", func(t *testing.T) {
		for typed, want := range map[string]string{
			"--lab":   l.Name(),
			"down":    l.Name(),
			"ping":    "b1 b2 r1 g1 g2 n1 n2 internet far :4",
			"ping b1": "b1 b2 r1 g1 g2 n1 n2 internet far :4",
			"exec":    "b1 b2 r1 g1 g2 n1 n2 orchestrator router internet far :4",
			"exec b1": ":0",
		} {
			args := append(append([]string{"__complete", "lab", "--lab", l.Name()}, strings.Fields(typed)...), "")
			out, err := exec.CommandContext(ctx, labtest.Binary(t), args...).Output()
			if is := strings.Join(strings.Fields(string(out)), " "); err != nil ||
				!strings.Contains(" "+is+" ", " "+want+" ") ||
				strings.HasPrefix(want, ":") != strings.HasPrefix(is, ":") {
				t.Errorf("completion of %q: got %q, want %q (%v)", typed, is, want, err)
			}
		}
	})

	t.Run("commands find the lab's own binaries", func(t *testing.T) {
		for _, argv := range [][]string{{"pilaster", "version"}, {"sh", "-c", "pilaster version"}} {
			if out, err := l.Output(ctx, "n1", argv...); err != nil || !strings.Contains(out, "pilaster") {
				t.Errorf("%q printed %q: %v", argv, out, err)
			}
		}
	})

	t.Run("hosts outside reach nodes, and containers only with egress rules", func(t *testing.T) {
		for _, pair := range [][2]string{{"n1", "internet"}, {"n2", "far"}, {"far", "internet"}, {"internet", "n1"}} {
			e, err := l.Ping(ctx, pair[0], pair[1], packet.PingOptions{Timeout: 5 * time.Second})
			if err != nil || !e.Reached() {
				t.Errorf("%+v, %v", e, err)
			}
		}
		e, err := l.Ping(ctx, "b1", "internet", packet.PingOptions{Timeout: 100 * time.Millisecond})
		if err != nil || e.Reached() {
			t.Errorf("without an egress rule: %+v, %v", e, err)
		}
		s, err := l.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Outside) != 2 || s.Outside[0].Address.String() != "2001:db8:f00d::2" ||
			s.Outside[1].Address.String() != "2001:db8:9::7" || s.Outside[0].Netns == "" {
			t.Errorf("status: %+v", s.Outside)
		}
		if hosts, err := l.Output(ctx, "b1", "cat", "/etc/hosts"); !strings.Contains(hosts, "2001:db8:9::7 far\n") {
			t.Errorf("hosts of b1: %q, %v", hosts, err)
		}
	})

	t.Run("status lists nodes, containers and the orchestrator", func(t *testing.T) {
		s, err := l.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var shape struct {
			Nodes []struct {
				Name, Prefix, Netns, AgentSocket string
				AgentPid                         int
			}
			Containers []struct {
				Name, Node, Tenant, Plaintext, Ciphertext, Netns string
				App, Pid                                         int
			}
			Orchestrator struct {
				Pid            int
				Listen, Socket string
			}
		}
		if err := json.Unmarshal(b, &shape); err != nil {
			t.Fatal(err)
		}
		if len(shape.Nodes) != 2 || len(shape.Containers) != 5 {
			t.Fatalf("%s", b)
		}
		for i, n := range shape.Nodes {
			if want := fmt.Sprintf("fd70:696c:6100:%d::/64", i+1); n.Name != small.Nodes[i] || n.Prefix != want ||
				!runsIn(t, n.AgentPid, n.Netns) {
				t.Errorf("unexpected status of node %+v", n)
			}
			if _, err := os.Stat(n.AgentSocket); err != nil {
				t.Error(err)
			}
		}
		for i, c := range shape.Containers {
			want := small.Containers[i]
			if c.Name != want.Name || c.Node != want.Node || c.Tenant != want.Tenant || c.App == 0 ||
				c.Plaintext == "" ||
				(c.Ciphertext == "") != (want.Tenant == "glass") ||
				!runsIn(t, c.Pid, c.Netns) {
				t.Errorf("unexpected status of container %+v", c)
			}
		}
		if _, err := os.Stat(shape.Orchestrator.Socket); err != nil || shape.Orchestrator.Pid == 0 ||
			shape.Orchestrator.Listen == "" {
			t.Errorf("unexpected status of orchestrator %+v: %v", shape.Orchestrator, err)
		}
	})

	t.Run("exec runs inside the namespace and returns the exit status", func(t *testing.T) {
		out, err := l.Output(ctx, "b1", "sh", "-c", "hostname; getent hosts b2; cat /proc/net/if_inet6")
		if err != nil {
			t.Fatal(err)
		}
		b2, err := l.Container("b2")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(out, "b1\n"+b2.Address.String()) || !strings.Contains(out, "eth0") {
			t.Errorf("unexpected output in b1: %s", out)
		}
		err = l.Run("n1", exec.CommandContext(ctx, "sh", "-c", "exit 7"))
		if status, ran := lab.ExitStatus(err); !ran || status != 7 {
			t.Errorf("exit 7: got status %d, %v, %v", status, ran, err)
		}
		err = l.Run("b1", exec.CommandContext(ctx, "sh", "-c", "kill -9 $$"))
		if status, ran := lab.ExitStatus(err); !ran || status != 128+9 {
			t.Errorf("SIGKILL: got status %d, %v, %v", status, ran, err)
		}
		if _, ran := lab.ExitStatus(l.Run("b1", exec.CommandContext(ctx, "/no/such/command"))); ran {
			t.Error("a missing command has an exit status")
		}
		if err := l.Run("missing", exec.CommandContext(ctx, "true")); err == nil ||
			!strings.Contains(err.Error(), "lab status lists") {
			t.Error("running a command in a missing container did not fail as expected")
		}
		if host, _ := os.Hostname(); host == "b1" || host == "n1" {
			t.Errorf("exec changed the machine's host name to %s", host)
		}
	})

	t.Run("pilaster finds the lab's folders, not the machine's", func(t *testing.T) {
		said := func(name string, args ...string) string {
			cmd := exec.CommandContext(ctx, labtest.Binary(t), args...)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			_ = l.Run(name, cmd) // only the output is checked
			return out.String()
		}
		if out := said("n1", "node", "reset", "--yes"); !strings.Contains(
			out,
			"an agent runs: it answers on "+l.AgentSocket("n1"),
		) {
			t.Errorf("node reset on n1: %s", out)
		}
		if out := said("n1", "sysdump", filepath.Join(t.TempDir(), "n1.tar.gz")); strings.Count(
			out,
			"agent/state.json             ok\n",
		) != 1 ||
			strings.Count(out, "datapath/pins.json           ok\n") != 1 {
			t.Errorf("sysdump on n1: %s", out)
		}
		if out := said(lab.Orchestrator, "orchestrator", "backup",
			filepath.Join(t.TempDir(), "backup")); !strings.Contains(
			out,
			"records of cluster",
		) {
			t.Errorf("backup: %s", out)
		}
	})

	t.Run("a container's hosts file names its tenant's containers and hosts outside only", func(t *testing.T) {
		for name, want := range map[string]string{
			"b1": "localhost localhost b1 b2", "r1": "localhost localhost r1", "g1": "localhost localhost g1 g2",
		} {
			out, err := l.Output(ctx, name, "cat", "/etc/hosts")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for line := range strings.Lines(out) {
				got = append(got, strings.Fields(line)[1])
			}
			if strings.Join(got, " ") != want+" internet far" {
				t.Errorf("/etc/hosts of %s names %q, want %q", name, got, want)
			}
			if plain := strings.Contains(out, "fd70:696c:61"); plain != (name == "g1") {
				t.Errorf("/etc/hosts of %s has plaintext addresses: %v, want only for the clear tenant\n%s",
					name, plain, out)
			}
		}
	})

	t.Run("the fabric drops packets with another node's source address", func(t *testing.T) {
		n1, err := l.Namespace("n1")
		if err != nil {
			t.Fatal(err)
		}
		defer n1.Close()
		router, err := l.Namespace(lab.Router)
		if err != nil {
			t.Fatal(err)
		}
		defer router.Close()
		capture, err := packet.NewCapture(router, "n2")
		if err != nil {
			t.Fatal(err)
		}
		defer capture.Close()
		inject, err := packet.NewInjector(n1, lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		defer inject.Close()
		p1, _ := l.Prefix("n1")
		p2, _ := l.Prefix("n2")
		gateway := routerMAC(t, l, "n1")
		forged, sentinel := packet.NewSentinel(), packet.NewSentinel()
		// The address of node n2, not of a container, so that the agents' programs do not drop the packet.
		to := p2.Addr().Next()
		bad := packet.Packet{
			Source:      to.Next(),
			Destination: to,
			Body:        packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: forged[:]},
		}
		good := packet.Packet{
			Source:      p1.Addr().Next(),
			Destination: to,
			Body:        packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: sentinel[:]},
		}
		for _, p := range []packet.Packet{bad, good} {
			if err := inject.Send(p.Frame(gateway, inject.MAC())); err != nil {
				t.Fatal(err)
			}
		}
		seen, err := capture.Until(ctx, sentinel.In)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(seen, forged.In) {
			t.Error("the forged packet passed the router")
		}
	})

	t.Run("the router reports a missing route to the container", func(t *testing.T) {
		b1, err := l.Namespace("b1")
		if err != nil {
			t.Fatal(err)
		}
		defer b1.Close()
		b2, err := l.Container("b2")
		if err != nil {
			t.Fatal(err)
		}
		p2, err := l.Prefix("n2")
		if err != nil {
			t.Fatal(err)
		}
		route, err := l.Output(ctx, lab.Router, "ip", "-6", "route", "show", p2.String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Output(ctx, lab.Router, "ip", "-6", "route", "del", p2.String()); err != nil {
			t.Fatal(err)
		}
		defer func() {
			fields := strings.Fields(route) // PREFIX via ADDRESS dev DEVICE …
			if _, err := l.Output(ctx, lab.Router,
				append([]string{"ip", "-6", "route", "add"}, fields[:5]...)...); err != nil {
				t.Error(err)
			}
		}()
		if err := receivedError(b1, netip.AddrPortFrom(b2.Address, 9)); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("without a route to n2, b1 received %v, want %v", err, unix.ENETUNREACH)
		}
	})

	t.Run("the supervisor restarts a killed daemon", func(t *testing.T) {
		for _, process := range []string{lab.AgentProcess("n1"), lab.Orchestrator} {
			before, err := l.Processes(ctx)
			if err != nil {
				t.Fatal(err)
			}
			pid, err := l.Kill(ctx, process)
			if err != nil {
				t.Fatal(err)
			}
			after, err := l.Processes(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range after {
				if p.Name == process &&
					(p.PID != pid || !p.Ready || p.Restarts != 1 || p.LastExit != "signal: killed") {
					t.Errorf("unexpected state %+v, new pid %d", p, pid)
				}
				if i := slices.IndexFunc(before,
					func(b lab.ProcessState) bool { return b.Name == p.Name }); p.Name != process &&
					before[i] != p {
					t.Errorf("another process changed: got %+v, want %+v", p, before[i])
				}
			}
		}
		if e, err := l.Ping(ctx, "b1", "b2", packet.PingOptions{Count: 3}); err != nil || e.Received != 3 {
			t.Errorf("%+v, %v", e, err)
		}
	})

	t.Run("a daemon can be killed while it starts", func(t *testing.T) {
		agent := lab.AgentProcess("n1")
		first, err := l.Crash(ctx, agent)
		if err != nil {
			t.Fatal(err)
		}
		second, err := l.Crash(ctx, agent)
		if err != nil || second == first {
			t.Fatalf("got pid %d, then %d: %v", first, second, err)
		}
		if err := l.Await(ctx, agent); err != nil {
			t.Fatal(err)
		}
		if pid, err := l.Kill(ctx, agent); err != nil || pid == second {
			t.Errorf("got pid %d, then %d: %v", second, pid, err)
		}
	})

	t.Run("a stopped daemon stays stopped until it is started", func(t *testing.T) {
		agent := lab.AgentProcess("n2")
		if err := l.Stop(ctx, agent); err != nil {
			t.Fatal(err)
		}
		if e, err := l.Ping(ctx, "b1", "b2", packet.PingOptions{Count: 3}); err != nil || e.Received != 3 {
			t.Errorf("ping without an agent: %+v, %v", e, err)
		}
		if err := l.AddContainer(ctx, lab.Container{Name: "late", Node: "n2", Tenant: "blue"}); err == nil {
			t.Error("AddContainer succeeded without an agent")
		}
		if err := l.Start(ctx, agent); err != nil {
			t.Fatal(err)
		}
		if err := l.Start(ctx, agent); err == nil {
			t.Error("a second Start of a running process succeeded")
		}
	})

	t.Run("containers are added and removed", func(t *testing.T) {
		if err := l.AddContainer(ctx, lab.Container{Name: "late", Node: "n2", Tenant: "blue"}); err != nil {
			t.Fatal(err)
		}
		// Another process sees the container too.
		other, err := lab.Open("", l.Name())
		if err != nil {
			t.Fatal(err)
		}
		if e, err := other.Ping(ctx, "b1", "late", packet.PingOptions{}); err != nil || !e.Reached() {
			t.Errorf("%+v, %v", e, err)
		}
		if err := l.RemoveContainer(ctx, "late"); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Namespace("late"); err == nil {
			t.Error("the removed container's namespace still exists")
		}
	})
}

// receivedError sends a datagram and returns the ICMP error that its socket receives.
func receivedError(from *netns.Namespace, to netip.AddrPort) error {
	return from.Do(func() error {
		conn, err := net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return fmt.Errorf("no datagram was sent: %v", err)
		}
		defer conn.Close()
		raw, err := conn.SyscallConn()
		if err != nil {
			return err
		}
		// Without this option, a socket receives only errors that the kernel treats as final.
		var failed error
		err = raw.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
		})
		if err := errors.Join(err, failed); err != nil {
			return fmt.Errorf("no datagram was sent: %v", err)
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			return fmt.Errorf("no datagram was sent: %v", err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		_, err = conn.Read(make([]byte, 1))
		return err
	})
}

func runsIn(t *testing.T, pid int, netns string) bool {
	t.Helper()
	var process, namespace unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &process); err != nil {
		t.Error(err)
	}
	if err := unix.Stat(netns, &namespace); err != nil {
		t.Error(err)
	}
	return process.Ino == namespace.Ino
}

func routerMAC(t *testing.T, l *lab.Lab, device string) net.HardwareAddr {
	t.Helper()
	router, err := l.Namespace(lab.Router)
	if err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	var mac net.HardwareAddr
	err = router.Do(func() error {
		dev, err := net.InterfaceByName(device)
		if err == nil {
			mac = dev.HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return mac
}
