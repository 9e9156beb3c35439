package cli

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/service"
)

func TestServices(t *testing.T) {
	s := startOrchestrator(t)
	n1 := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{Rack: "r1"})
	command(t, "tenant", "create", "blue", "--addressing", "clear")
	command(t, "tenant", "create", "green", "--network", "nimitz", "--cidr", "fd12:3456::/48")
	if _, err := n1.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"})); err != nil {
		t.Fatal(err)
	}

	create := []string{"service", "create", "web", "--tenant", "blue", "--port", "http:80:8080", "--port", "53/udp",
		"--select", "app=web,tier=front", "--affinity", "3h", "--distribution", "same-node", "--publish-not-ready"}
	prints(t, "service web of tenant blue created: its containers reach it at fd70:696c:7300:1::1, "+
		"http 80/TCP to 8080, udp-53 53/UDP\n", create...)
	prints(t, "headless service shop/db of tenant blue created\n", "service", "create", "db", "--tenant", "blue",
		"--namespace", "shop", "--headless", "--endpoint", "fd70:696c:6100:1:0:100:100:9")
	v := ask[serviceView](t, "service", "create", "shop/web", "--tenant", "blue", "--port", "80",
		"--address", "fd70:696c:7300:1::9")
	want := serviceView{Tenant: "blue", Namespace: "shop", Name: "web", Address: "fd70:696c:7300:1::9",
		Ports: []servicePortView{{"", "TCP", 80, 80, 0}}, Created: v.Created}
	if !reflect.DeepEqual(v, want) || time.Since(v.Created) > time.Hour {
		t.Errorf("service create: %+v, want %+v", v, want)
	}
	for _, c := range []struct {
		code       int
		says, args string
	}{
		{ExitUsage, "required flag", "service create web"},
		{ExitUsage, "has no port", "service create new --tenant blue"},
		{ExitUsage, `service name "Web"`, "service create Web --tenant blue --port 80"},
		{ExitUsage, "leave --namespace out", "service create shop/new --namespace shop --tenant blue --port 80"},
		{ExitUsage, `--port "0": "0" is not a port`, "service create new --tenant blue --port 0"},
		{ExitUsage, `"http" is not a port`, "service create new --tenant blue --port 80:http"},
		{ExitUsage, "as in http:80:8080", "service create new --tenant blue --port a:80:81:82"},
		{ExitUsage, `use TCP or UDP`, "service create new --tenant blue --port 80/sctp"},
		{ExitUsage, "two ports with the name", "service create new --tenant blue --port a:80 --port a:81"},
		{ExitUsage, `"app" is not key=value`, "service create new --tenant blue --port 80 --select app"},
		{ExitUsage, `--address "x" is not an IPv6`, "service create new --tenant blue --port 80 --address x"},
		{ExitUsage, `--endpoint "10.0.0.1" is not an IPv6`, "service create new --tenant blue --port 80 --endpoint " +
			"10.0.0.1"},
		{ExitUsage, "--distribution", "service create new --tenant blue --port 80 --distribution near"},
		{ExitUsage, "affinity of 25h0m0s", "service create new --tenant blue --port 80 --affinity 25h"},
		{ExitUsage, "cannot be the address of a container", "service create new --tenant blue --port 80 --endpoint " +
			"2001:db8::1"},
		{ExitUsage, "none of the tenant's", "service create new --tenant blue --port 80 --address 2001:db8::1"},
		{ExitUsage, `--external-ip "x" is not an IPv6`, "service create new --tenant blue --port 80 --external-ip x"},
		{ExitUsage, "write NAME=NODEPORT", "service create new --tenant blue --port 80 --node-port 30080"},
		{ExitUsage, "of 30000 to 32767", "service create new --tenant blue --port 80 --node-port 80=8080"},
		{ExitUsage, `no --port has name or number "81"`, "service create new --tenant blue --port 80 --node-port " +
			"81=30080"},
		{ExitUsage, "port 80/TCP has node port 30081 already", "service create new --tenant blue --port 80 " +
			"--node-port 80=30081 --node-port 80=30082"},
		{ExitUsage, "--traffic-policy", "service create new --tenant blue --port 80 --traffic-policy near"},
		{ExitUsage, "policy Local is for hosts outside", "service create new --tenant blue --port 80 " +
			"--traffic-policy local"},
		{ExitUsage, "is in fc00::/8", "service create new --tenant blue --port 80 --external-ip fc00::9"},
		{ExitFailed, "has service web already", strings.Join(create, " ")},
		{ExitFailed, "on network nimitz, and only tenants of network netpila", "service create web --tenant green " +
			"--port 80"},
		{ExitFailed, "no service new", "service delete new --tenant blue"},
		{ExitFailed, "no service new", "service describe new --tenant blue"},
		{ExitFailed, `no node "n9"`, "service describe web --tenant blue --node n9"},
		{ExitFailed, `no tenant "red"`, "service list --tenant red"},
		{ExitUsage, "required flag", "service apply --tenant blue"},
		{ExitUsage, "no such file", "service apply --tenant blue -f /nonexistent"},
	} {
		refused(t, c.code, c.says, strings.Fields(c.args)...)
	}
	put := &pilasterv1.PutEndpointsRequest{Slices: []*pilasterv1.EndpointSlice{{
		Tenant: "blue", Service: "web", Name: "n1.0", Endpoints: []*pilasterv1.ServiceEndpoint{
			{Address: "fd70:696c:6100:1:0:100:100:1", Name: "web-1"},
			{Address: "fd70:696c:6100:1:0:100:100:2", Name: "web-2", Terminating: true},
		},
	}}}
	if _, err := n1.PutEndpoints(t.Context(), connect.NewRequest(put)); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ask[serviceView](t, "service", "describe", "web", "--tenant",
		"blue").Counts.All != 2; { // the call does not wait for the cache
		if time.Now().After(end) {
			t.Fatal("the endpoints of a node do not appear")
		}
	}
	prints(t, "TENANT   NAME       ADDRESS               PORTS                                EXPOSED   READY\n"+
		"blue     web        fd70:696c:7300:1::1   http 80/TCP to 8080, udp-53 53/UDP   -         1/2\n"+
		"blue     shop/db    headless              -                                    -         1/1\n"+
		"blue     shop/web   fd70:696c:7300:1::9   80/TCP                               -         0/0\n",
		"service", "list")
	r := command(t, "service", "describe", "web", "--tenant", "blue")
	for _, line := range []string{
		"selector       app=web,tier=front\n", "affinity       ClientIP, 3h0m0s\n", "distribution   PreferSameNode\n",
		"endpoints      1 of 2 ready\n", "nodes          n1\n",
		"ENDPOINT                       NAME    NODE   ZONE   STATE      WHY\n",
		"fd70:696c:6100:1:0:100:100:1   web-1   n1     r1     ready      -\n",
		"fd70:696c:6100:1:0:100:100:2   web-2   n1     r1     draining   terminating\n",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("service describe: %swant %s", r.stdout, line)
		}
	}
	endpoints := []endpointOf{
		{"fd70:696c:6100:1:0:100:100:1", "web-1", "n1", "r1", "ready", ""},
		{"fd70:696c:6100:1:0:100:100:2", "web-2", "n1", "r1", "draining", "terminating"},
	}
	v = ask[serviceView](t, "service", "describe", "web", "--tenant", "blue", "--node", "n1")
	if !reflect.DeepEqual(v.Endpoints, endpoints) || !reflect.DeepEqual(v.Nodes, []string{"n1"}) {
		t.Errorf("service describe: %+v, want endpoints %+v", v, endpoints)
	}
	put.Slices[0].Endpoints[0].Terminating = true
	if _, err := n1.PutEndpoints(t.Context(), connect.NewRequest(put)); err != nil {
		t.Fatal(err)
	}
	for i := range endpoints {
		endpoints[i].State, endpoints[i].Why = "serving", "terminating, and none is ready"
	}
	for end := time.Now().Add(10 * time.Second); !reflect.DeepEqual(v.Endpoints, endpoints); {
		if time.Now().After(end) {
			t.Fatalf("service describe: %+v, want endpoints %+v", v.Endpoints, endpoints)
		}
		v = ask[serviceView](t, "service", "describe", "web", "--tenant", "blue")
	}
	for line, says := range map[string]string{
		"service create web --tenant": "blue\ngreen\n:", "service describe --tenant blue": "web\nshop/db\nshop/web\n:",
		"service delete --tenant blue": "web\nshop/db\nshop/web\n:", "service describe web --node": "n1\n:",
		"service create web --distribution": "anywhere\nsame-zone\nsame-node\n:", "service create web --port": ":",
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout, says) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}
	prints(t, "service web of tenant blue deleted\n", "service", "delete", "web", "--tenant", "blue")
	prints(t, "service shop/db of tenant blue deleted\n", "service", "delete", "shop/db", "--tenant", "blue")
	if all := ask[[]serviceView](t, "service", "list", "--tenant", "blue"); len(all) != 1 || all[0].Counts.All != 0 {
		t.Errorf("service list: %+v, want shop/web", all)
	}
}

func TestZoneOf(t *testing.T) {
	all := []service.Slice{{Node: "n2", Zone: "z2"}, {Node: "n1", Zone: "z1"}}
	for node, want := range map[string]string{"n1": "z1", "n2": "z2", "n3": "r1"} {
		if is := zoneOf(node, "r1", all); is != want {
			t.Errorf("the zone of %s is %q, want %q", node, is, want)
		}
	}
}

func TestServiceApply(t *testing.T) {
	startOrchestrator(t)
	command(t, "tenant", "create", "blue", "--addressing", "clear")
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	web := write("web.yaml", `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`)
	db := write("db.yaml", `
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {ports: [{port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: old, labels: {kubernetes.io/service-name: db}}
addressType: IPv6
endpoints: [{addresses: ["fd70:696c:6100:1:0:100:100:9"]}]
`)
	apply := func(want string, args ...string) {
		t.Helper()
		prints(t, want, append([]string{"service", "apply", "--tenant", "blue"}, args...)...)
	}
	apply("service shop/web created (dry run)\nservice db created (dry run)\n", "-f", web, "-f", db, "--dry-run")
	if all := ask[[]serviceView](t, "service", "list"); len(all) != 0 {
		t.Errorf("a dry run made %+v", all)
	}
	apply("service shop/web created\nservice db created\n", "-f", web, "-f", db)
	apply("service shop/web unchanged\n", "-f", web)
	text, err := os.ReadFile(web)
	if err != nil {
		t.Fatal(err)
	}
	write("web.yaml", strings.ReplaceAll(string(text), "8080", "8081"))
	v := ask[[]serviceView](t, "service", "apply", "--tenant", "blue", "-f", web)
	if len(v) != 1 || v[0].Action != "configured" || v[0].Ports[0].Target != 8081 {
		t.Errorf("service apply: %+v", v)
	}
	refused(t, ExitUsage, db+": document 1: Service db: spec.externalName: Forbidden", "service", "apply",
		"--tenant", "blue", "-f", web, "-f", write("db.yaml", `{apiVersion: v1, kind: Service, metadata: {name: db},
  spec: {externalName: a.example}}`))
	refused(t, ExitUsage, "service shop/web is there twice", "service", "apply", "--tenant", "blue", "-f", web, "-f",
		web)
	is := ask[serviceView](t, "service", "describe", "db", "--tenant", "blue")
	if e := is.Endpoints; len(e) != 1 || e[0].Address != "fd70:696c:6100:1:0:100:100:9" || e[0].Node != "" {
		t.Errorf("service describe: %+v", is)
	}
}

// TestExposedService: hosts outside reach a service at external addresses and node ports.
func TestExposedService(t *testing.T) {
	startOrchestrator(t)
	command(t, "tenant", "create", "blue")
	prints(t, "service dns of tenant blue created: its containers reach it at fd70:696c:7300:1::1, tcp-53 53/TCP, "+
		"udp-53 53/UDP, web 80/TCP to 8080\nhosts outside of the cluster reach it at [2001:db8:7::9]:53/TCP, "+
		"[2001:db8:7::9]:53/UDP, [2001:db8:7::9]:80/TCP, node port 30053/TCP to 53, node port 30053/UDP to 53, "+
		"node port 30080/TCP to 80, policy Local\n", "service", "create", "dns", "--tenant", "blue", "--port", "53",
		"--port", "53/udp", "--port", "web:80:8080", "--external-ip", "2001:db8:7::9", "--node-port",
		"53=30053", "--node-port", "web=30080", "--traffic-policy", "Local")
	v := ask[serviceView](t, "service", "create", "web", "--tenant", "blue", "--port", "80", "--node-ports")
	if v.Ports[0].NodePort < service.FirstNodePort || v.TrafficPolicy != "Cluster" || v.ExternalIPs != nil {
		t.Errorf("service create: %+v", v)
	}
	if r := command(t, "service", "describe", "dns", "--tenant", "blue"); !strings.Contains(r.stdout,
		"exposed     [2001:db8:7::9]:53/TCP, [2001:db8:7::9]:53/UDP, ") {
		t.Errorf("service describe: %s", r.stdout)
	}
	file := filepath.Join(t.TempDir(), "web.yaml")
	text := `{apiVersion: v1, kind: Service, metadata: {name: dns}, spec: {externalIPs: ["2001:db8:7::a"], ` +
		`ports: [{port: 53}]}}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	all := ask[[]serviceView](t, "service", "apply", "--tenant", "blue", "-f", file)
	if len(all) != 1 || all[0].Action != "configured" || all[0].exposed() != "[2001:db8:7::a]:53/TCP, policy Cluster" {
		t.Errorf("service apply: %+v", all)
	}
}

// TestLoadBalancer: a service gets an address of a pool, and keeps it.
func TestLoadBalancer(t *testing.T) {
	startOrchestrator(t)
	command(t, "tenant", "create", "blue")
	create := []string{"service", "create", "web", "--tenant", "blue", "--port", "80", "--load-balancer"}
	refused(t, ExitFailed, "add one with `pilaster service pool add PREFIX`", create...)
	refused(t, ExitUsage, `"2001:db8:8::1" is an address`, "service", "pool", "add", "2001:db8:8::1")
	prints(t, "2001:db8:8::7/128, 2001:db8:9::/112: added\n", "service", "pool", "add", "2001:db8:8::7/128",
		"2001:db8:9::/112")
	prints(t, "service web of tenant blue created: its containers reach it at fd70:696c:7300:1::1, 80/TCP\n"+
		"hosts outside of the cluster reach it at [2001:db8:8::7]:80/TCP, policy Cluster\n", create...)
	refused(t, ExitUsage, "is in no pool", "service", "create", "dns", "--tenant", "blue", "--port", "53",
		"--load-balancer-ip", "2001:db8:7::7")
	v := ask[serviceView](t, "service", "create", "dns", "--tenant", "blue", "--port", "53", "--load-balancer-ip",
		"2001:db8:9::7", "--node-ports")
	if v.LoadBalancerIP != "2001:db8:9::7" || v.Ports[0].NodePort == 0 {
		t.Errorf("service create: %+v", v)
	}
	if r := command(t, "service", "describe", "web", "--tenant", "blue"); !strings.Contains(r.stdout,
		"exposed     [2001:db8:8::7]:80/TCP, policy Cluster\n") {
		t.Errorf("service describe: %s", r.stdout)
	}
	prints(t, "POOL                ALLOCATED\n2001:db8:8::7/128   1\n2001:db8:9::/112    1\n",
		"service", "pool", "list")
	refused(t, ExitFailed, "service web of tenant blue (2001:db8:8::7)",
		"service", "pool", "remove", "2001:db8:8::7/128")
	file := filepath.Join(t.TempDir(), "web.yaml")
	text := `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {type: TYPE, ports: [{port: 81}]}}`
	for _, kind := range []string{"LoadBalancer", "ClusterIP"} {
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "TYPE", kind)), 0o600); err != nil {
			t.Fatal(err)
		}
		all := ask[[]serviceView](t, "service", "apply", "--tenant", "blue", "-f", file)
		want := choose(kind == "LoadBalancer", "[2001:db8:8::7]:81/TCP, policy Cluster", "")
		if len(all) != 1 || all[0].exposed() != want {
			t.Errorf("service apply: %+v, want %q", all, want)
		}
	}
	prints(t, "2001:db8:8::7/128: removed\n", "service", "pool", "remove", "2001:db8:8::7/128")
}

func TestParsePort(t *testing.T) {
	for text, want := range map[string]service.Port{
		"80":             {Protocol: service.TCP, Port: 80, Target: 80},
		"80:8080":        {Protocol: service.TCP, Port: 80, Target: 8080},
		"http:80":        {Name: "http", Protocol: service.TCP, Port: 80, Target: 80},
		"http:80:8080":   {Name: "http", Protocol: service.TCP, Port: 80, Target: 8080},
		"dns:53:530/udp": {Name: "dns", Protocol: service.UDP, Port: 53, Target: 530},
		"53/UDP":         {Protocol: service.UDP, Port: 53, Target: 53},
		"80/tcp":         {Protocol: service.TCP, Port: 80, Target: 80},
		"":               {}, "http": {}, "80:": {}, "65536": {}, "80:0": {}, "a:b:80": {}, "1:2:3": {}, "80/x": {},
	} {
		got, err := parsePort(text)
		if (err != nil) != (want == service.Port{}) || err == nil && got != want {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
}
