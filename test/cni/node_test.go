// Package cni_test tests the real plugin with container runtimes on the nodes of a lab: cnitool for every verb, libcni
// for error codes, and containerd by CRI.
package cni_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// Environment variables that make this binary execute a command on a node. They have the folder of the node, and the
// folder of its agent's socket.
const (
	nodeFolder  = "PILASTER_TEST_NODE"
	agentFolder = "PILASTER_TEST_AGENT"
)

func TestMain(m *testing.M) {
	if folder := os.Getenv(nodeFolder); folder != "" {
		err := becomeNode(folder, os.Getenv(agentFolder), os.Args[1:])
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// becomeNode mounts a node's folders at the default paths, in the process's own mount namespace, and executes a
// command.
func becomeNode(folder, agent string, argv []string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := forgetNamespaces(folder); err != nil {
		return err
	}
	socket, err := unix.Open(agent, unix.O_PATH|unix.O_DIRECTORY, 0) // a mount will hide /run
	if err != nil {
		return fmt.Errorf("%s: %w", agent, err)
	}
	for _, step := range []func() error{
		func() error { return unix.Mount("proc", "/proc", "proc", 0, "") },
		func() error { return unix.Mount("tmpfs", "/run", "tmpfs", 0, "") },
		func() error { return os.Mkdir("/run/pilaster", 0o755) },
		func() error {
			return unix.Mount(fmt.Sprintf("/proc/self/fd/%d", socket), "/run/pilaster", "", unix.MS_BIND, "")
		},
		func() error { return unix.Mount("tmpfs", "/var/lib", "tmpfs", 0, "") },
		func() error { return os.Mkdir("/var/lib/cni", 0o755) },
		func() error { return unix.Mount(filepath.Join(folder, "cni"), "/var/lib/cni", "", unix.MS_BIND, "") },
		func() error { return unix.Close(socket) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return unix.Exec(path, argv, os.Environ())
}

// forgetNamespaces unmounts network namespaces of other tests from the new mount namespace, because these copies of
// mounts would keep the network namespaces alive. The mounts of this node's network namespaces stay.
func forgetNamespaces(folder string) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if slices.Contains(fields, "nsfs") && !strings.HasPrefix(fields[4], folder+"/") {
			_ = unix.Unmount(fields[4], unix.MNT_DETACH)
		}
	}
	return nil
}

// node is a node of a lab as a container runtime expects it: the agent's socket is at its default path, and the node
// has its own /run, /var/lib and /var/lib/cni.
type node struct {
	lab    *lab.Lab
	name   string
	folder string // cni/ is its /var/lib/cni; net.d/ and bin/ have network configurations and plugins
}

func newNode(t *testing.T, l *lab.Lab, name string) *node {
	t.Helper()
	n := &node{lab: l, name: name, folder: t.TempDir()}
	for _, dir := range []string{"bin", "cni", "net.d"} {
		if err := os.Mkdir(filepath.Join(n.folder, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// start starts a command on the node, with its own mounts and these namespaces.
func (n *node) start(cmd *exec.Cmd, namespaces uintptr) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd.Args = append([]string{self}, cmd.Args...)
	cmd.Path = self
	cmd.Env = append(cmd.Environ(), nodeFolder+"="+n.folder, agentFolder+"="+filepath.Dir(n.lab.AgentSocket(n.name)))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | namespaces}
	ns, err := n.lab.Namespace(n.name)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Start(cmd)
}

// output runs a command on the node. An error includes its standard error.
func (n *node) output(cmd *exec.Cmd) ([]byte, error) {
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := n.start(cmd, 0); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(complaint.Bytes()))
	}
	return out.Bytes(), nil
}

// container creates a network namespace without attachments.
func (n *node) container(t *testing.T, name string) *netns.Namespace {
	t.Helper()
	path := filepath.Join(n.folder, "netns", name)
	ns, err := netns.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(ns.Close(), netns.Remove(path)); err != nil {
			t.Error(err)
		}
	})
	return ns
}

// configure writes a network configuration list for the runtimes of the node.
func (n *node) configure(t *testing.T, name string, conflist []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(n.folder, "net.d", name+".conflist"), conflist, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (n *node) endpoints(ctx context.Context, t *testing.T) []*pilasterv1.Endpoint {
	t.Helper()
	list, err := n.lab.Agent(n.name).ListEndpoints(ctx, connect.NewRequest(&pilasterv1.ListEndpointsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return list.Msg.Endpoints
}

// devices returns the names of the node's own devices and those of its containers.
func (n *node) devices(t *testing.T) []string {
	t.Helper()
	ns, err := n.lab.Namespace(n.name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var names []string
	for _, l := range links(t, ns) {
		if name := l.Attrs().Name; name != "pilvxlan" { // of networks evpn and nimitz, with or without containers
			names = append(names, name)
		}
	}
	containers, err := filepath.Glob(filepath.Join(n.folder, "netns", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range containers {
		names = append(names, onUplink(t, path)...)
	}
	slices.Sort(names)
	return names
}

// onUplink returns the devices of a container whose parent is the node's uplink.
func onUplink(t *testing.T, path string) (names []string) {
	t.Helper()
	ns, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for _, l := range links(t, ns) {
		if l.Type() == endpoint.Macvlan {
			names = append(names, l.Attrs().Name+" in "+path)
		}
	}
	return names
}

// withoutContainers are the devices of a node without containers.
var withoutContainers = []string{lab.Uplink, "lo", "pilaster0", "pilaster1"}

// empty fails the test if the node has any resources of a container.
func (n *node) empty(ctx context.Context, t *testing.T) {
	t.Helper()
	if left := n.endpoints(ctx, t); len(left) > 0 {
		t.Errorf("endpoints remain on %s: %v", n.name, left)
	}
	if d := n.devices(t); !slices.Equal(d, withoutContainers) {
		t.Errorf("devices remain on %s: %v", n.name, d)
	}
}

// plugins returns the folder of the plugin under test.
func plugins(t *testing.T) string { return filepath.Dir(labtest.Binary(t)) }
