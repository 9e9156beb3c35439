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
		Ports: []servicePortView{{"", "TCP", 80, 80}}, Created: v.Created}
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
	prints(t, "TENANT   NAME       ADDRESS               PORTS                                READY\n"+
		"blue     web        fd70:696c:7300:1::1   http 80/TCP to 8080, udp-53 53/UDP   1/2\n"+
		"blue     shop/db    headless              -                                    1/1\n"+
		"blue     shop/web   fd70:696c:7300:1::9   80/TCP                               0/0\n", "service", "list")
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
	refused(t, ExitUsage, db+`: document 1: Service db: unknown field "spec.externalIPs"`, "service", "apply",
		"--tenant", "blue", "-f", web, "-f", write("db.yaml", `{apiVersion: v1, kind: Service, metadata: {name: db},
  spec: {externalIPs: []}}`))
	refused(t, ExitUsage, "service shop/web is there twice", "service", "apply", "--tenant", "blue", "-f", web, "-f",
		web)
	is := ask[serviceView](t, "service", "describe", "db", "--tenant", "blue")
	if e := is.Endpoints; len(e) != 1 || e[0].Address != "fd70:696c:6100:1:0:100:100:9" || e[0].Node != "" {
		t.Errorf("service describe: %+v", is)
	}
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
