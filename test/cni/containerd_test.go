package cni_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// containerdConfig keeps all files of a containerd in one folder and in its own /run. It sets restrict_oom_score_adj,
// so that sandboxes start even without the capability to lower the OOM score.
var containerdConfig = template.Must(template.New("").Parse(`version = 2
root = "{{.Folder}}/root"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[debug]
  level = "warn"
[grpc]
  address = "{{.Folder}}/cri.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{{.Image}}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{{.Folder}}/bin"
    conf_dir = "{{.Folder}}/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
`))

// containerd is a container runtime on a node, in its own pid namespace.
type containerd struct {
	*node
	pid     int
	cgroup  string // parent of all pods' cgroups
	runtime cri.RuntimeServiceClient
}

// startContainerd starts a containerd with one image and our network. At the end of the test, it ends containerd and
// all its containers.
func startContainerd(t *testing.T, n *node, archive string, network []byte) *containerd {
	t.Helper()
	ctx := labtest.Context(t)
	n.configure(t, "10-pilaster", network)
	// containerd itself requires the loopback plugin.
	for _, plugin := range []string{filepath.Join(plugins(t), "pilaster-cni"), "/usr/lib/cni/loopback"} {
		if err := os.Symlink(plugin, filepath.Join(n.folder, "bin", filepath.Base(plugin))); err != nil {
			t.Fatal(err)
		}
	}
	config, err := os.Create(filepath.Join(n.folder, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	defer config.Close()
	if err := containerdConfig.Execute(config, map[string]string{"Folder": n.folder, "Image": image}); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(n.folder, "containerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()

	cmd := exec.Command("containerd", "--config", config.Name())
	cmd.Stdout, cmd.Stderr = log, log
	if err := n.start(cmd, unix.CLONE_NEWPID|unix.CLONE_NEWUTS|unix.CLONE_NEWIPC); err != nil {
		t.Fatal(err)
	}
	c := &containerd{node: n, pid: cmd.Process.Pid, cgroup: fmt.Sprintf("/%s-%s", n.lab.Name(), n.name)}
	running, stop := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stop(fmt.Errorf("containerd ended: %v", cmd.Wait()))
	}()
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("containerd on %s:\n%s", n.name, b[max(0, len(b)-4000):])
		}
		// containerd is the first process of its pid namespace, so all processes in the namespace end with it.
		if err := unix.Kill(c.pid, unix.SIGKILL); err != nil {
			t.Error(err)
		}
		<-ended
		for _, group := range cgroups(t, c.cgroup) {
			if err := os.Remove(group); err != nil {
				t.Error(err)
			}
		}
	})

	socket := filepath.Join(n.folder, "cri.sock")
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond,
			Multiplier: 1, MaxDelay: 20 * time.Millisecond}}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c.runtime = cri.NewRuntimeServiceClient(conn)
	poll(running, t, func() error {
		s, err := c.runtime.Status(running, &cri.StatusRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return err
		}
		for _, condition := range s.Status.Conditions {
			if !condition.Status {
				return fmt.Errorf("%s: %s", condition.Type, condition.Message)
			}
		}
		return nil
	})
	out, err := exec.CommandContext(running, "ctr", "--address", socket, "--namespace", "k8s.io", "images", "import",
		archive).CombinedOutput()
	if err != nil {
		t.Fatalf("import the image: %v: %s", err, out)
	}
	images := cri.NewImageServiceClient(conn)
	poll(running, t, func() error {
		r, err := images.ImageStatus(running, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
		if err == nil && r.Image == nil {
			err = fmt.Errorf("the image is not listed")
		}
		return err
	})
	return c
}

// poll retries until try succeeds, for changes without events from containerd.
func poll(ctx context.Context, t *testing.T, try func() error) {
	t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%v: %v", context.Cause(ctx), err)
		case <-again.C:
		}
	}
}

// cgroups returns a cgroup in each hierarchy and its descendants, the innermost first.
func cgroups(t *testing.T, name string) []string {
	t.Helper()
	roots, err := filepath.Glob(filepath.Join("/sys/fs/cgroup", "*", name))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	slices.Reverse(all)
	return all
}

// pod is a sandbox with one container.
type pod struct {
	*containerd
	config    *cri.PodSandboxConfig
	sandbox   string
	container string
}

// podConfig describes a pod in the namespace "shop".
func (c *containerd) podConfig(name string, annotations map[string]string) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "shop", Uid: c.lab.Name() + "-" + name},
		Hostname: name, Annotations: annotations, LogDirectory: filepath.Join(c.folder, "log", name),
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: c.cgroup},
	}
}

// run starts a pod whose container runs command, or sleeps if there is no command.
func (c *containerd) run(ctx context.Context, t *testing.T, config *cri.PodSandboxConfig, command ...string) *pod {
	t.Helper()
	sandbox, err := c.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{containerd: c, config: config, sandbox: sandbox.PodSandboxId}
	created, err := c.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.sandbox, SandboxConfig: config,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "main"}, Image: &cri.ImageSpec{Image: image},
			Command: command, LogPath: "main.log", Linux: &cri.LinuxContainerConfig{},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.container = created.ContainerId
	if _, err := c.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: p.container}); err != nil {
		t.Fatal(err)
	}
	return p
}

// remove removes a pod as kubelet does.
func (p *pod) remove(ctx context.Context) error {
	if _, err := p.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.sandbox}); err != nil {
		return err
	}
	_, err := p.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.sandbox})
	return err
}

// exec runs a busybox applet in the pod's container and returns its output.
func (p *pod) exec(ctx context.Context, applet ...string) (string, error) {
	r, err := p.runtime.ExecSync(ctx,
		&cri.ExecSyncRequest{ContainerId: p.container, Cmd: append([]string{"/bin/busybox"}, applet...), Timeout: 10})
	if err != nil {
		return "", err
	}
	if r.ExitCode != 0 {
		return string(r.Stdout), fmt.Errorf("%s: exit %d: %s", strings.Join(applet, " "), r.ExitCode, r.Stderr)
	}
	return string(r.Stdout), nil
}

// address returns the pod's address as the runtime reports it.
func (p *pod) address(ctx context.Context, t *testing.T) string {
	t.Helper()
	s, err := p.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.sandbox})
	if err != nil {
		t.Fatal(err)
	}
	return s.Status.Network.GetIp()
}

// namespace opens the pod's network namespace.
func (p *pod) namespace(ctx context.Context, t *testing.T) *netns.Namespace {
	t.Helper()
	s, err := p.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.sandbox, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(s.Info["info"]), &info); err != nil || info.Pid == 0 {
		t.Fatalf("no process of the sandbox in %q: %v", s.Info["info"], err)
	}
	// The pid is a number in containerd's pid namespace. The /proc of this pid namespace is in containerd's mount
	// namespace.
	ns, err := netns.Open(fmt.Sprintf("/proc/%d/root/proc/%d/ns/net", p.pid, info.Pid))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}
