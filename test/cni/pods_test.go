package cni_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// TestPods runs pods on two nodes with containerd and runc, as kubelet does.
func TestPods(t *testing.T) {
	ctx := labtest.Context(t)
	l := labtest.New(t, lab.Spec{Nodes: []string{"n1", "n2"}, Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}}})
	archive, network := writeImage(t), allowing(t, docExample(t, "containerd"), "red", "missing")
	n1 := startContainerd(t, newNode(t, l, "n1"), archive, network)
	n2 := startContainerd(t, newNode(t, l, "n2"), archive, network)

	// web sends its name to each client. client has no annotations, so its tenant is blue, as in the configuration
	// file.
	web := n1.run(ctx, t, n1.podConfig("web",
		map[string]string{"pilaster.io/tenant": "blue", "pilaster.io/labels": "app=web"}),
		"/bin/busybox", "nc", "-ll", "-p", "80", "-e", "/bin/busybox", "hostname")
	client := n2.run(ctx, t, n2.podConfig("client", nil))
	stranger := n2.run(ctx, t, n2.podConfig("stranger", map[string]string{"pilaster.io/tenant": "red"}))
	address := web.address(ctx, t)
	poll(ctx, t, func() error { // until it listens
		_, err := web.exec(ctx, "nc", "-w", "1", address, "80")
		return err
	})

	t.Run("the agent lists pods by name", func(t *testing.T) {
		got := endpointList(ctx, t, l, "n1")
		if len(got) != 1 || got[0].Pod != "shop/web" || got[0].Tenant != "blue" || got[0].Labels["app"] != "web" ||
			got[0].Attachments[0].Address != address {
			t.Errorf("endpoint list on n1: got %+v, want address %s as in the runtime", got, address)
		}
		var pods []string
		for _, e := range endpointList(ctx, t, l, "n2") {
			pods = append(pods, e.Pod+" "+e.Tenant)
		}
		slices.Sort(pods)
		if !slices.Equal(pods, []string{"shop/client blue", "shop/stranger red"}) {
			t.Errorf("endpoint list on n2: got %v", pods)
		}
	})

	t.Run("a pod sees only ciphertext", func(t *testing.T) {
		out, err := web.exec(ctx, "ip", "address")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "inet6 "+address+"/128") || strings.Contains(out, "fd70:") {
			t.Errorf("%s", out)
		}
	})

	t.Run("pods of one tenant reach each other", func(t *testing.T) {
		if out, err := client.exec(ctx, "ping6", "-c", "2", "-W", "2", address); err != nil {
			t.Errorf("ping failed: %v %s", err, out)
		}
		if out, err := client.exec(ctx, "nc", "-w", "2", address, "80"); err != nil || out != "web\n" {
			t.Errorf("TCP: got %q, %v", out, err)
		}
		if err := exchange(web.namespace(ctx, t), client.namespace(ctx, t), address); err != nil {
			t.Errorf("UDP failed: %v", err)
		}
	})

	t.Run("a pod of another tenant reaches nothing", func(t *testing.T) {
		before := undecryptable(ctx, t, l, "n2")
		if out, err := stranger.exec(ctx, "ping6", "-c", "2", "-W", "1", address); err == nil {
			t.Errorf("ping succeeded: %s", out)
		}
		sent := uint64(2)
		if labtest.Device() != endpoint.Veth {
			sent = 1 // the sender gets an error and stops
		}
		if rose := undecryptable(ctx, t, l, "n2") - before; rose != sent {
			t.Errorf("%d packets were dropped as dst-undecryptable, want %d", rose, sent)
		}
		if out, err := stranger.exec(ctx, "nc", "-w", "1", address, "80"); err == nil || out != "" {
			t.Errorf("TCP: got %q, %v", out, err)
		}
	})

	t.Run("a pod that cannot be attached leaves nothing", func(t *testing.T) {
		before := endpointList(ctx, t, l, "n1")
		for tenant, text := range map[string]string{"missing": "missing", "green": "allows only blue, red, missing"} {
			config := n1.podConfig("lost", map[string]string{"pilaster.io/tenant": tenant})
			_, err := n1.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("a pod of tenant %s: got error %v, want one with %q", tenant, err, text)
			}
		}
		if after := endpointList(ctx, t, l, "n1"); len(after) != len(before) {
			t.Errorf("the resources changed from %+v to %+v", before, after)
		}
		list, err := n1.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		if err != nil || len(list.Items) != 1 {
			t.Errorf("sandboxes remain: %v, %v", list, err)
		}
	})

	t.Run("removed pods leave nothing", func(t *testing.T) {
		for _, p := range []*pod{web, client, stranger} {
			if err := p.remove(ctx); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range []*containerd{n1, n2} {
			c.empty(ctx, t)
			// The folders of containerd's network namespaces for pods, and of libcni's cache.
			for _, dir := range []string{fmt.Sprintf("/proc/%d/root/run/netns", c.pid),
				filepath.Join(c.folder, "cni", "results")} {
				if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
					t.Errorf("files remain in %s of %s: %v, %v", dir, c.name, left, err)
				}
			}
			for _, group := range cgroups(t, c.cgroup) {
				if filepath.Base(group) != filepath.Base(c.cgroup) {
					t.Errorf("cgroup %s remains", group)
				}
			}
		}
	})
}

// allowing returns a configuration that also allows other tenants.
func allowing(t *testing.T, network []byte, tenants ...string) []byte {
	t.Helper()
	var list map[string]any
	if err := json.Unmarshal(network, &list); err != nil {
		t.Fatal(err)
	}
	list["plugins"].([]any)[0].(map[string]any)["allowedTenants"] = tenants
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// endpointView is the part of `pilaster endpoint list -o json` that the test needs.
type endpointView struct {
	Pod, Tenant string
	Labels      map[string]string
	Attachments []struct{ Address string }
}

func endpointList(ctx context.Context, t *testing.T, l *lab.Lab, node string) []endpointView {
	t.Helper()
	out, err := l.Output(ctx, node, labtest.Binary(t), "endpoint", "list", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var list []endpointView
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return list
}

func undecryptable(ctx context.Context, t *testing.T, l *lab.Lab, node string) uint64 {
	t.Helper()
	drops, err := l.Drops(ctx, node)
	if err != nil {
		t.Fatal(err)
	}
	return drops["dst-undecryptable"]
}

// exchange sends one UDP datagram to a server and back.
func exchange(server, client *netns.Namespace, address string) error {
	const port = "5000"
	var listener net.PacketConn
	err := server.Do(func() (err error) {
		listener, err = net.ListenPacket("udp6", net.JoinHostPort(address, port))
		return err
	})
	if err != nil {
		return err
	}
	defer listener.Close()
	var conn net.Conn
	err = client.Do(func() (err error) {
		conn, err = net.Dial("udp6", net.JoinHostPort(address, port))
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, c := range []interface{ SetDeadline(time.Time) error }{listener, conn} {
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
	}
	if _, err := conn.Write([]byte("ping")); err != nil {
		return err
	}
	b := make([]byte, 16)
	size, from, err := listener.ReadFrom(b)
	if err != nil {
		return err
	}
	if _, err := listener.WriteTo(b[:size], from); err != nil {
		return err
	}
	if size, err = conn.Read(b); err == nil && string(b[:size]) != "ping" {
		err = fmt.Errorf("got echo %q", b[:size])
	}
	return err
}
