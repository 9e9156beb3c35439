package cni_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// docExample returns the JSON under a heading of the installation guide.
func docExample(t *testing.T, heading string) []byte {
	t.Helper()
	guide, err := os.ReadFile("../../docs/howto/cni.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?s)\n## " + regexp.QuoteMeta(heading) + "\n.*?```json\n(.*?)```").FindSubmatch(guide)
	if found == nil {
		t.Fatalf("the guide has no JSON under %q", heading)
	}
	return found[1]
}

// cnitool runs the plugin on a node with CNI's own tool.
type cnitool struct {
	*node
	binary  string
	network string   // name of a network that is configured on the node
	env     []string // in addition to the usual variables
}

func newCNITool(t *testing.T, n *node, network string) cnitool {
	t.Helper()
	path, err := exec.Command("go", "tool", "-n", "cnitool").Output()
	if err != nil {
		t.Fatalf("build cnitool: %v", err)
	}
	return cnitool{node: n, binary: strings.TrimSpace(string(path)), network: network, env: []string{
		"CNI_PATH=" + plugins(t), "NETCONFPATH=" + filepath.Join(n.folder, "net.d"),
	}}
}

func (c cnitool) run(ctx context.Context, verb string, ns *netns.Namespace) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.binary, verb, c.network, ns.Path())
	cmd.Env = append(os.Environ(), c.env...)
	return c.output(cmd)
}

func (c cnitool) must(ctx context.Context, t *testing.T, verb string, ns *netns.Namespace) []byte {
	t.Helper()
	out, err := c.run(ctx, verb, ns)
	if err != nil {
		t.Fatalf("cnitool %s: %v", verb, err)
	}
	return out
}

// add attaches a container and returns its endpoint.
func (c cnitool) add(ctx context.Context, t *testing.T, ns *netns.Namespace) *pilasterv1.Endpoint {
	t.Helper()
	c.must(ctx, t, "add", ns)
	all := c.endpoints(ctx, t)
	i := slices.IndexFunc(all, func(e *pilasterv1.Endpoint) bool { return e.Netns == ns.Path() })
	if i < 0 {
		t.Fatalf("the agent has no endpoint in %s; its endpoints are %v", ns.Path(), all)
	}
	return all[i]
}

// conflist is a network configuration list with our plugin only.
func conflist(t *testing.T, version, name string, plugin map[string]any) []byte {
	t.Helper()
	plugin["type"] = "pilaster-cni"
	b, err := json.Marshal(map[string]any{"cniVersion": version, "name": name, "plugins": []any{plugin}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCNITool covers the verbs and their failures. All subtests share one lab.
func TestCNITool(t *testing.T) {
	spec := lab.Spec{
		Nodes:   []string{"n1"},
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "glass", Addressing: tenant.Clear}},
	}
	if labtest.Device() != endpoint.Macvlan {
		spec.Tenants = append(spec.Tenants, lab.Tenant{Name: "silver", Network: tenant.ILA},
			lab.Tenant{Name: "bronze", Network: tenant.EVPN, CIDRs: []netip.Prefix{netip.MustParsePrefix("fd12::/48")}})
	}
	n := newNode(t, labtest.New(t, spec), "n1")
	t.Run("example", func(t *testing.T) { testExample(t, n) })
	t.Run("result", func(t *testing.T) { testResult(t, n) })
	t.Run("precedence", func(t *testing.T) { testPrecedence(t, n) })
	t.Run("annotations", func(t *testing.T) { testAnnotations(t, n) })
	t.Run("check", func(t *testing.T) { testCheck(t, n) })
	t.Run("garbage", func(t *testing.T) { testGarbage(t, n) })
	t.Run("codes", func(t *testing.T) { testCodes(t, n) })
	t.Run("host ports", func(t *testing.T) { testHostPorts(t, n) })
	t.Run("alone", func(t *testing.T) { testAlone(t, n) })
}

// testExample follows the installation guide.
func testExample(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	n.configure(t, "10-pilaster", docExample(t, "Anything else that speaks CNI"))
	tool := newCNITool(t, n, "pilaster")
	ns := n.container(t, "c1")
	tool.must(ctx, t, "status", ns)
	e := tool.add(ctx, t, ns)
	if e.Tenant != "blue" || e.Labels["app"] != "web" || e.CniNetwork != "pilaster" {
		t.Errorf("endpoint %v does not match the example", e)
	}
	tool.must(ctx, t, "check", ns)
	if _, err := tool.run(ctx, "add", ns); err == nil || !strings.Contains(err.Error(), "already has interface eth0") {
		t.Errorf("a second ADD: got error %v", err)
	}
	tool.must(ctx, t, "check", ns)
	tool.must(ctx, t, "del", ns)
	tool.must(ctx, t, "del", ns)
	if _, err := tool.run(ctx, "check", ns); err == nil {
		t.Error("CHECK succeeded after DEL")
	}
	n.empty(ctx, t)
}

// testResult compares the result of ADD with the kernel's view of the container.
func testResult(t *testing.T, n *node) {
	for _, version := range []string{"1.1.0", "1.0.0"} {
		for _, tenantName := range []string{"blue", "glass"} {
			t.Run(version+" "+tenantName, func(t *testing.T) {
				ctx := labtest.Context(t)
				n.configure(t, "result", conflist(t, version, "result", map[string]any{"tenant": tenantName}))
				tool, ns := newCNITool(t, n, "result"), n.container(t, "c1")
				tool.env = append(tool.env, "CNI_IFNAME=net7")
				tool.must(ctx, t, "status", ns)
				out := tool.must(ctx, t, "add", ns)
				tool.must(ctx, t, "check", ns)

				var r types100.Result
				if err := json.Unmarshal(out, &r); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				var hosts []*types100.Interface // on the node; for a macvlan there is none
				if labtest.Device() != endpoint.Macvlan && len(r.Interfaces) > 0 {
					hosts = r.Interfaces[:1]
				}
				if r.CNIVersion != version || len(r.Interfaces) != len(hosts)+1 || len(r.IPs) != 1 {
					t.Fatalf("unexpected result %s", out)
				}
				for _, hostLink := range hosts {
					if hostLink.Sandbox != "" || !slices.Contains(n.devices(t), hostLink.Name) {
						t.Errorf("host side %+v is not among the node's devices %v", hostLink, n.devices(t))
					}
				}
				inside := r.Interfaces[len(hosts)]
				if inside.Name != "net7" || inside.Sandbox != ns.Path() || *r.IPs[0].Interface != len(hosts) {
					t.Errorf("unexpected container side %+v, with the address on interface %d",
						inside, *r.IPs[0].Interface)
				}
				said := device{mac: inside.Mac, mtu: inside.Mtu, addresses: []string{r.IPs[0].Address.String()}}
				for _, route := range r.Routes {
					said.routes = append(said.routes, fmt.Sprintf("%v via %v", &route.Dst, route.GW))
				}
				is := read(t, ns, "net7")
				if fmt.Sprint(said) != fmt.Sprint(is) {
					t.Errorf("the result has %+v, but the container has %+v", said, is)
				}
				if clear := strings.HasPrefix(is.addresses[0], "fd70:696c:61"); clear != (tenantName == "glass") {
					t.Errorf("unexpected addresses of a container of %s: %v", tenantName, is.addresses)
				}
				tool.must(ctx, t, "del", ns)
				n.empty(ctx, t)
			})
		}
	}
}

// capability is the plugin's capability with which a runtime passes the annotations of pods.
const capability = "io.kubernetes.cri.pod-annotations"

// annotate makes the tool pass these annotations of a pod in all following calls.
func (c *cnitool) annotate(t *testing.T, annotations map[string]string) {
	t.Helper()
	b, err := json.Marshal(map[string]any{capability: annotations})
	if err != nil {
		t.Fatal(err)
	}
	c.env = append(c.env, "CAP_ARGS="+string(b))
}

// testAnnotations calls ADD with annotations that the configuration does not allow. ADD must fail and leave nothing
// behind.
func testAnnotations(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	n.configure(t, "trust", conflist(t, "1.0.0", "trust", map[string]any{
		"tenant": "blue", "labels": map[string]string{"app": "file"}, "capabilities": map[string]bool{capability: true},
	}))
	ns := n.container(t, "c1")
	for _, c := range []struct{ annotation, value, text string }{
		{"pilaster.io/tenant", "red", "allows only blue"},
		{"pilaster.io/labels", "app=pod", `label app is "pod" there and "file" in the network configuration`},
	} {
		tool := newCNITool(t, n, "trust")
		tool.annotate(t, map[string]string{c.annotation: c.value})
		if out, err := tool.run(ctx, "add", ns); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("ADD with %s=%s: got %s, error %v; want an error with %q", c.annotation, c.value, out, err, c.text)
		}
		n.empty(ctx, t)
		if d := links(t, ns); len(d) != 1 {
			t.Errorf("the refused container has %d devices, want lo only", len(d))
		}
		tool.must(ctx, t, "del", ns)
	}
}

// testPrecedence sets tenant and labels in several places at once. The pod's namespace becomes one of the labels.
func testPrecedence(t *testing.T, n *node) {
	args := map[string]any{"cni": map[string]any{"labels": []map[string]string{{"key": "app", "value": "args"}}}}
	for _, c := range []struct {
		name           string
		args           map[string]any
		annotations    map[string]string
		tenant, labels string
	}{
		{"file", nil, nil, "blue", "map[app:file io.kubernetes.pod.namespace:shop]"},
		{"args before the file", args, nil, "blue", "map[app:args io.kubernetes.pod.namespace:shop]"},
		{"annotations and args", args,
			map[string]string{"pilaster.io/tenant": "red", "pilaster.io/labels": "tier=x"}, "red",
			"map[app:args io.kubernetes.pod.namespace:shop tier:x]"},
		{"only the tenant annotated", args, map[string]string{"pilaster.io/tenant": "red"}, "red",
			"map[app:args io.kubernetes.pod.namespace:shop]"},
		{"only labels annotated", nil, map[string]string{"pilaster.io/labels": "tier=x"}, "blue",
			"map[app:file io.kubernetes.pod.namespace:shop tier:x]"},
		{"other annotations", nil, map[string]string{"example.com/tenant": "red"}, "blue",
			"map[app:file io.kubernetes.pod.namespace:shop]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := labtest.Context(t)
			plugin := map[string]any{
				"tenant": "blue", "allowedTenants": []string{"red"}, "labels": map[string]string{"app": "file"},
				"capabilities": map[string]bool{capability: true},
			}
			if c.args != nil {
				plugin["args"] = c.args
			}
			n.configure(t, "places", conflist(t, "1.0.0", "places", plugin))
			tool, ns := newCNITool(t, n, "places"), n.container(t, "c1")
			if c.annotations != nil {
				tool.annotate(t, c.annotations)
			}
			tool.env = append(tool.env, "CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0")
			e := tool.add(ctx, t, ns)
			if e.Tenant != c.tenant || fmt.Sprint(e.Labels) != c.labels || e.Pod != "shop/web-0" {
				t.Errorf("tenant %s, labels %v, pod %s; want %s, %s, shop/web-0", e.Tenant, e.Labels, e.Pod, c.tenant,
					c.labels)
			}
			tool.must(ctx, t, "del", ns)
			n.empty(ctx, t)
		})
	}
}
