package ops_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/modules/evpn"
	"pilaster.io/pilaster/internal/netns"
)

// node is the node of a lab. pristine is the state of its machine before the first start of the agent.
type node struct {
	*lab.Lab
	ns       *netns.Namespace
	flags    []string // flags with the agent's folders for a command
	bpffs    string
	folders  []string
	pristine machine
}

const name = "n1"

// newNode brings up a lab of one node with two containers. If mounted is true, the agent must mount a bpffs for its
// pins. Otherwise the pins are in a folder of an existing bpffs.
func newNode(t *testing.T, mounted bool) *node {
	n := &node{}
	spec := lab.Spec{
		Name: labtest.Name(t), Nodes: []string{name}, Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{{Name: "b1", Node: name, Tenant: "blue"}, {Name: "b2", Node: name, Tenant: "blue"}},
	}
	if labtest.Device() != endpoint.Macvlan { // networks ila and evpn have no macvlans
		spec.Tenants = append(spec.Tenants, lab.Tenant{Name: "silver", Network: "ila"}, lab.Tenant{
			Name: "bronze", Network: "evpn", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")},
		})
		spec.Containers = append(spec.Containers, lab.Container{Name: "s1", Node: name, Tenant: "silver"},
			lab.Container{Name: "z1", Node: name, Tenant: "bronze"})
	}
	folder := filepath.Join(lab.DefaultRoot, spec.Name)
	n.bpffs = filepath.Join(folder, "bpf", name)
	if mounted {
		n.bpffs = filepath.Join(t.TempDir(), "bpf")
		t.Cleanup(func() { // if the test has failed
			_ = exec.Command("umount", n.bpffs).Run()
		})
	}
	state, run := filepath.Join(folder, "nodes", name, "state"), filepath.Join(folder, "nodes", name, "run")
	n.flags = []string{"--state-dir", state, "--run-dir", run, "--bpffs", n.bpffs}
	n.folders = []string{state, run, n.bpffs}
	ctx := labtest.Context(t)
	n.Lab = labtest.New(t, spec, func(o *lab.Options) {
		o.AgentArgs = []string{"--bpffs", n.bpffs}
		o.Progress = func(doing string) {
			if doing != "1 agent" {
				return
			}
			var err error
			n.ns, err = netns.Open(filepath.Join(folder, "netns", name))
			must(t, err)
			say(ctx, t, n.ns, "ip link add eth1 type veth peer name eth2") // further interfaces
			n.pristine = look(ctx, t, n.ns, n.folders...)
		}
	})
	t.Cleanup(func() { n.ns.Close() })
	if labtest.Device() != endpoint.Macvlan {
		say(ctx, t, n.ns, "ip route del "+evpn.Pool{}.Prefix().String()) // the lab's own
	}
	return n
}

// reset runs the command as an administrator does, in the mount namespace of the agent.
func (n *node) reset(t *testing.T, stdin string, args ...string) (status int, out, complaint string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(labtest.Context(t), labtest.Binary(t),
		append(append([]string{"node", "reset"}, n.flags...), args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	status, ok := lab.ExitStatus(n.ns.Run(cmd))
	if !ok {
		t.Fatalf("node reset did not run: %s", &stderr)
	}
	return status, stdout.String(), stderr.String()
}

func (n *node) refuses(t *testing.T, why, stdin string, args ...string) {
	t.Helper()
	ctx := labtest.Context(t)
	before := look(ctx, t, n.ns, n.folders...)
	status, out, complaint := n.reset(t, stdin, args...)
	if status != 1 || !strings.Contains(complaint, why) || !strings.Contains(complaint, "nothing was changed") {
		t.Errorf("got exit status %d, want a refusal with %q\n%s%s", status, why, out, complaint)
	}
	for _, d := range before.differences(look(ctx, t, n.ns, n.folders...)) {
		t.Errorf("a refused reset changed the machine: %s", d)
	}
}

func TestResetLeavesTheMachineAsItWasFound(t *testing.T) {
	for kind, mounted := range map[string]bool{"bpffs of the agent": true, "folder of a bpffs": false} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t, mounted)
			ctx := labtest.Context(t)
			if made := n.pristine.differences(look(ctx, t, n.ns, n.folders...)); len(made) < 20 {
				t.Fatalf("an agent with two containers causes only %d differences: %q", len(made), made)
			}
			n.live(ctx, t)
			programs, maps := n.objects(t)

			n.refuses(t, "an agent runs", "", "--yes", "--force")
			must(t, n.Stop(ctx, lab.AgentProcess(name)))
			n.refuses(t, "container "+n.ContainerID("b1")+" eth0, container "+n.ContainerID("b2")+" eth0", "", "--yes")
			n.refuses(t, "Remove all of it? [y/N]", "n\n", "--force")
			device := cmp.Or(map[string]string{endpoint.Macvlan: "device eth0 in "}[labtest.Device()], "device pil1")
			n.refuses(t, device, "", "--force")

			status, out, complaint := n.reset(t, "", "--yes", "--force", "-o", "json")
			var said struct{ Removed []struct{ Kind, Name string } }
			if err := json.Unmarshal([]byte(out), &said); status != 0 || err != nil || len(said.Removed) < 15 {
				t.Fatalf("exit %d, %v\n%s%s", status, err, out, complaint)
			}
			for _, d := range n.pristine.differences(look(ctx, t, n.ns, n.folders...)) {
				t.Errorf("after the reset: %s", d)
			}
			for id := range programs {
				vanishes(t, "program", func() error { p, err := ebpf.NewProgramFromID(id); p.Close(); return err })
			}
			for id := range maps {
				vanishes(t, "map", func() error { m, err := ebpf.NewMapFromID(id); m.Close(); return err })
			}
			if status, out, complaint := n.reset(t, ""); status != 0 ||
				out != "nothing of the agent is on this machine\n" {
				t.Errorf("a second reset: got exit status %d\n%s%s", status, out, complaint)
			}
			n.joinsAgain(ctx, t)
		})
	}
}

// live makes changes on a node before the reset.
func (n *node) live(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := n.Operator().RotateKey(ctx, connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: "blue"}))
	must(t, err)
	must(t, n.AddContainer(ctx,
		lab.Container{Name: "b3", Node: name, Tenant: "blue", Labels: map[string]string{"app": "late"}}))
	must(t, n.RemoveContainer(ctx, "b3"))
	say(ctx, t, n.ns, "ip link set eth0 mtu 1400")
	_, err = n.Kill(ctx, lab.AgentProcess(name))
	must(t, err)
	say(ctx, t, n.ns, "ip link set eth0 mtu 1500")
	if status, d, complaint := n.sysdump(ctx, t, filepath.Join(t.TempDir(), "before.tar.gz")); status != 0 ||
		d.Failed != 0 {
		t.Errorf("sysdump: got exit status %d\n%s", status, complaint)
	}
}

// joinsAgain checks that, after the reset, the machine can join like a new machine.
func (n *node) joinsAgain(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := n.Operator().DeleteNode(ctx, connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: name}))
	must(t, err)
	must(t, n.Start(ctx, lab.AgentProcess(name)))
	must(t, n.Stop(ctx, lab.AgentProcess(name)))
	if status, out, complaint := n.reset(t, "yes\n"); status != 0 ||
		!strings.Contains(out, "removed   route     unreachable ") {
		t.Errorf("reset without containers: got exit status %d\n%s%s", status, out, complaint)
	}
	for _, d := range n.pristine.differences(look(ctx, t, n.ns, n.folders...)) {
		t.Errorf("after the second reset: %s", d)
	}
}

// objects returns the IDs of the node's programs and maps in the kernel.
func (n *node) objects(t *testing.T) (programs map[ebpf.ProgramID]bool, maps map[ebpf.MapID]bool) {
	t.Helper()
	programs, maps = map[ebpf.ProgramID]bool{}, map[ebpf.MapID]bool{}
	must(t, filepath.WalkDir(n.bpffs, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		switch {
		case strings.HasPrefix(path, n.bpffs+"/links/"):
			l, err := link.LoadPinnedLink(path, nil)
			must(t, err)
			defer l.Close()
			attached, err := l.Info()
			must(t, err)
			programs[attached.Program] = true
			p, err := ebpf.NewProgramFromID(attached.Program)
			must(t, err)
			defer p.Close()
			info, err := p.Info()
			must(t, err)
			used, _ := info.MapIDs()
			for _, id := range used {
				maps[id] = true
			}
		case strings.HasPrefix(path, n.bpffs+"/maps/"):
			m, err := ebpf.LoadPinnedMap(path, nil)
			must(t, err)
			defer m.Close()
			info, err := m.Info()
			must(t, err)
			id, _ := info.ID()
			maps[id] = true
		}
		return nil
	}))
	if len(programs) == 0 || len(maps) < 7 {
		t.Fatalf("found programs %v, maps %v", programs, maps)
	}
	return programs, maps
}

// vanishes waits until the kernel has freed an object, which happens some time after its last user has ended.
func vanishes(t *testing.T, what string, open func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if err = open(); errors.Is(err, os.ErrNotExist) {
			return
		}
	}
	t.Errorf("a %s still exists: %v", what, err)
}
