package datapath

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
)

// cgroup makes a cgroup of version 2 for a test.
func cgroup(t testing.TB) string {
	t.Helper()
	mount := filepath.Join(t.TempDir(), "cgroup2")
	must(t, os.Mkdir(mount, 0o700))
	must(t, unix.Mount("none", mount, "cgroup2", 0, ""))
	t.Cleanup(func() { unix.Unmount(mount, unix.MNT_DETACH) })
	dir, err := os.MkdirTemp(mount, "pilaster-test-")
	must(t, err)
	t.Cleanup(func() { os.Remove(dir) })
	return dir
}

const connectorVar = "PILASTER_TEST_CONNECT"

// TestConnector is not a test but a process of connector: it connects to an address several times and prints what it
// receives, and who its peer is.
func TestConnector(t *testing.T) {
	to := os.Getenv(connectorVar)
	if to == "" {
		return
	}
	for range 20 {
		conn, err := net.DialTimeout("tcp6", to, patience)
		if err != nil {
			fmt.Printf("error %v\n", err)
			os.Exit(0)
		}
		conn.SetDeadline(time.Now().Add(patience))
		name := make([]byte, 1)
		io.ReadFull(conn, name)
		fmt.Printf("%s %v\n", name, conn.RemoteAddr())
		conn.Close()
	}
	os.Exit(0)
}

// connector runs a process in a namespace and a cgroup that connects to an address, and returns its lines.
func connector(t testing.TB, ns *netns.Namespace, cgroup, to string) []string {
	t.Helper()
	dir, err := os.Open(cgroup)
	must(t, err)
	defer dir.Close()
	command := exec.Command("/proc/self/exe", "-test.run=^TestConnector$")
	command.Env = append(os.Environ(), connectorVar+"="+to)
	command.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	must(t, ns.Do(command.Start))
	must(t, command.Wait())
	return strings.Split(strings.TrimSpace(out.String()), "\n")
}

// TestServiceConnect: a process of the cgroup gets a backend when it connects, so the packet path sees no packet to the
// service; the process sees the address of the service. Without a backend it is refused at once.
func TestServiceConnect(t *testing.T) {
	w := newLink(t)
	w.nodes[0].cgroup = cgroup(t)
	openAll(t, joined, w.nodes[:]...)
	b := newServiceBedOn(t, w, serving(blue, 7))
	b.put(t, []int{0, 1, 2}, nil)
	must(t, b.nodes[0].datapath.Objects.PilServicesV1.Delete(uint32(0))) // packets to services are dropped
	seen := map[string]int{}
	for _, line := range connector(t, b.client.ns, w.nodes[0].cgroup, b.tcp.Address.String()) {
		name, peer, _ := strings.Cut(line, " ")
		if peer != b.tcp.Address.String() {
			t.Errorf("%q: the process is connected to %s, want %v", line, peer, b.tcp.Address)
		}
		seen[name]++
	}
	if len(seen) != 3 || seen["0"]+seen["1"]+seen["2"] != 20 {
		t.Errorf("connections by backend: %v; drops %v", seen, b.nodes[0].drops(t))
	}
	counts, err := b.nodes[0].datapath.ServiceCounts()
	must(t, err)
	if counts[b.tcp].Flows != 20 {
		t.Errorf("counts %+v, want 20 flows", counts[b.tcp])
	}
	b.put(t, nil, nil)
	begun := time.Now()
	lines := connector(t, b.client.ns, w.nodes[0].cgroup, b.tcp.Address.String())
	if !strings.Contains(lines[0], "connection refused") || time.Since(begun) > time.Second {
		t.Errorf("without a backend: %q after %v", lines, time.Since(begun))
	}
	// The packet path decides about the services of other tenants, and about what is not a container.
	b.put(t, []int{0}, nil)
	must(t, b.nodes[0].datapath.AttachServicePrograms())
	stranger := b.nodes[0].addClient(t, serving(red, 9), 1)
	lines = connector(t, stranger.ns, w.nodes[0].cgroup, b.tcp.Address.String())
	if !strings.Contains(lines[0], "connection refused") || b.nodes[0].drops(t)["no-service"] == 0 {
		t.Errorf("another tenant: %q, drops %v", lines, b.nodes[0].drops(t))
	}
	// A tenant that gets its first service.
	late := serving(plain, 0)
	c := b.nodes[0].addClient(t, late, 1)
	answerTCP(t, c, 8080, "9")
	late.ServicesNumber = 11
	key := b.tcp
	key.Address = netip.AddrPortFrom(serviceAddress(t, late, 1), 80)
	must(t, b.nodes[0].datapath.putTenant(late))
	must(t, b.nodes[0].datapath.PutServices([]dpapi.Frontend{
		{FrontendKey: key, Backends: []dpapi.Backend{backendAt(c, 8080)}},
	}))
	must(t, b.nodes[0].datapath.Objects.PilServicesV1.Delete(uint32(0)))
	lines = connector(t, c.ns, w.nodes[0].cgroup, key.Address.String())
	if len(lines) != 20 || lines[0] != "9 "+key.Address.String() {
		t.Errorf("a tenant with its first service: %q", lines)
	}
}
