package cniserver

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// conf returns a configuration with additional keys.
func conf(more ...string) string {
	keys := append([]string{`{"cniVersion":"1.1.0","name":"pil","type":"pilaster-cni"`}, more...)
	return strings.Join(keys, ",") + `}`
}

const (
	fileTenant  = `"tenant":"file"`
	fileLabels  = `"labels":{"from":"file"}`
	argsList    = `"args":{"cni":{"labels":[{"key":"from","value":"args"}]}}`
	argsObject  = `"args":{"cni":{"labels":{"from":"args"}}}`
	annotations = `"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{` +
		`"pilaster.io/tenant":"annotation","pilaster.io/labels":"tier=annotation"}}`
	allowed = `"allowedTenants":["other","annotation"]`
)

func TestPrecedence(t *testing.T) {
	for _, c := range []struct {
		name, stdin, tenant, labels string
	}{
		{"file", conf(fileTenant, fileLabels), "file", "from=file"},
		{"args over file", conf(fileTenant, fileLabels, argsList), "file", "from=args"},
		{"args as an object", conf(fileTenant, fileLabels, argsObject), "file", "from=args"},
		{"annotations with args and file", conf(fileTenant, fileLabels, argsList, allowed, annotations), "annotation",
			"from=args,tier=annotation"},
		{"annotations alone", conf(allowed, annotations), "annotation", "tier=annotation"},
		{"annotation for the tenant, args for labels", conf(fileTenant, fileLabels, argsList, allowed,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/tenant":"annotation"}}`), "annotation",
			"from=args"},
		{"annotation for labels, file for the tenant", conf(fileTenant, fileLabels,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/labels":"a=b, c=d"}}`), "file",
			"a=b,c=d,from=file"},
		{"annotation without labels", conf(fileTenant, fileLabels,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/labels":""}}`), "file", "from=file"},
		{"args with an empty list", conf(fileTenant, fileLabels, `"args":{"cni":{"labels":[]}}`), "file", ""},
		{"args without labels", conf(fileTenant, fileLabels, `"args":{"cni":{"ips":["10.0.0.1"]}}`), "file",
			"from=file"},
		{"other annotations", conf(fileTenant, fileLabels,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"example.org/x":"y"}}`), "file", "from=file"},
	} {
		config, err := ParseConfig([]byte(c.stdin), "")
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		name, labels, err := config.Identity()
		if err != nil || name != c.tenant || tenant.Canonical(labels) != c.labels {
			t.Errorf(
				"%s: got tenant %q, labels %q, %v; want %q and %q",
				c.name,
				name,
				tenant.Canonical(labels),
				err,
				c.tenant,
				c.labels,
			)
		}
	}
}

// The namespace is the one that the runtime reports. A pod's annotations cannot set it.
func TestNamespace(t *testing.T) {
	annotated := func(labels string) string {
		return conf(
			fileTenant,
			fileLabels,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/ports":"http=80/TCP",`+
				`"pilaster.io/labels":"`+labels+`"}}`,
		)
	}
	for _, c := range []struct{ stdin, args, labels string }{
		{conf(fileTenant, fileLabels), "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a",
			"from=file,io.kubernetes.pod.namespace=shop"},
		{conf(fileTenant, fileLabels), "K8S_POD_NAMESPACE=default;K8S_POD_NAME=a", "from=file"},
		{conf(fileTenant, `"labels":{"io.kubernetes.pod.namespace":"other"}`), "K8S_POD_NAMESPACE=shop",
			"io.kubernetes.pod.namespace=shop"},
		{conf(fileTenant, `"labels":{"io.kubernetes.pod.namespace":"shop"}`), "", "io.kubernetes.pod.namespace=shop"},
		{annotated("a=b"), "K8S_POD_NAMESPACE=shop",
			"a=b,from=file,io.kubernetes.pod.namespace=shop,io.kubernetes.pod.port.http=80-TCP"},
		{annotated("io.kubernetes.pod.namespace=other"), "K8S_POD_NAMESPACE=shop", ""},
		{annotated("io.kubernetes.pod.namespace.labels.division=x"), "K8S_POD_NAMESPACE=shop", ""},
		{annotated("io.kubernetes.pod.namespace=other"), "",
			"from=file,io.kubernetes.pod.namespace=other,io.kubernetes.pod.port.http=80-TCP"},
	} {
		config, err := ParseConfig([]byte(c.stdin), c.args)
		if err != nil {
			t.Fatal(err)
		}
		_, labels, err := config.Identity()
		if c.labels == "" {
			if err == nil || !strings.Contains(err.Error(), "a pod may not set") {
				t.Errorf("%s\n%s: got labels %v, error %v; want a refusal", c.stdin, c.args, labels, err)
			}
		} else if err != nil || tenant.Canonical(labels) != c.labels {
			t.Errorf("%s\n%s: got labels %s, %v; want %s", c.stdin, c.args, tenant.Canonical(labels), err, c.labels)
		}
	}
}

func TestInvalidConfigurations(t *testing.T) {
	for want, stdin := range map[string]string{
		"network configuration": `{"tenant":`,
		"cannot unmarshal":      conf(`"tenant":5`),
		"agentSocket":           conf(fileTenant, `"agentSocket":5`),
	} {
		if _, err := ParseConfig([]byte(stdin), ""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\ngot error %v, want %q", stdin, err, want)
		}
	}
	for want, stdin := range map[string]string{
		"no tenant is given": conf(),
		"tenant name":        conf(`"tenant":"Not_A_Name"`),
		"label key":          conf(fileTenant, `"labels":{"a b":"c"}`),
		"value":              conf(fileTenant, `"labels":{"a":"`+strings.Repeat("x", 64)+`"}`),
		"are 64 at most":     conf(fileTenant, manyLabels()),
		"args.cni.labels":    conf(fileTenant, `"args":{"cni":{"labels":7}}`),
		"key \"a\" twice": conf(fileTenant,
			`"args":{"cni":{"labels":[{"key":"a","value":"b"},{"key":"a","value":"c"}]}}`),
		"annotation pilaster.io": conf(fileTenant,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/labels":"web"}}`),
		"is not NAME=80/TCP": conf(fileTenant,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/ports":"80"}}`),
		"is given twice": conf(fileTenant,
			`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"pilaster.io/labels":"a=b,a=c"}}`),
	} {
		// A DEL calls only ParseConfig, and must succeed.
		c, err := ParseConfig([]byte(stdin), "")
		if err != nil {
			t.Errorf("%s\nParseConfig, as for a DEL: %v", stdin, err)
			continue
		}
		if _, _, err := c.Identity(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\ngot error %v, want %q", stdin, err, want)
		}
	}
	c, err := ParseConfig([]byte(conf(fileTenant, `"prevResult":{"cniVersion":"9.9.9"}`)), "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.claimed("eth0", "/x"); err == nil || !strings.Contains(err.Error(), "prevResult") {
		t.Errorf("prevResult of another version: got error %v", err)
	}
}

// TestHostPorts: portMappings of the CNI conventions, as containerd and podman pass them. A DEL ignores them.
func TestHostPorts(t *testing.T) {
	const loopback = `[{"hostPort":80,"containerPort":80,"protocol":"tcp","hostIP":"127.0.0.1"}]`
	for mappings, want := range map[string]string{
		`[]`: "",
		`[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]`:                    "8080/TCP to 80",
		`[{"hostPort":8080,"containerPort":80,"protocol":"TCP","hostIP":"0.0.0.0"}]`: "8080/TCP to 80",
		`[{"hostPort":53,"containerPort":53,"protocol":"udp","hostIP":"2001:db8::1"},` +
			`{"hostPort":80,"containerPort":80}]`: "[2001:db8::1]:53/UDP to 53 80/TCP to 80",
		`[{"hostPort":70000,"containerPort":80}]`:                "portMappings: host port 70000: use 1 to 65535",
		`[{"containerPort":80,"protocol":"tcp"}]`:                "host port 0: use 1 to 65535",
		`[{"hostPort":80,"containerPort":80,"protocol":"sctp"}]`: "host ports are of tcp or udp only",
		loopback:    "hosts outside reach no loopback address",
		`{"80":80}`: "portMappings is no list of {hostPort, containerPort, protocol, hostIP}",
		`["80"]`:    "portMappings is no list of",
	} {
		c, err := ParseConfig([]byte(conf(fileTenant, `"runtimeConfig":{"portMappings":`+mappings+`}`)), "")
		if err != nil {
			t.Errorf("%s: ParseConfig, as for a DEL: %v", mappings, err)
			continue
		}
		ports, given, err := c.HostPorts()
		var texts []string
		for _, p := range ports {
			is, err := endpoint.NewHostPort(int(p.Host), int(p.Container), p.Protocol, p.Address)
			if err != nil {
				t.Error(err)
			}
			texts = append(texts, is.String())
		}
		got := strings.Join(texts, " ")
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) || err == nil && got != want || !given {
			t.Errorf("%s: got %s, given %v; want %s", mappings, got, given, want)
		}
	}
	for _, without := range []string{conf(fileTenant), conf(fileTenant, `"runtimeConfig":{"portMappings":null}`)} {
		c, err := ParseConfig([]byte(without), "")
		if err != nil {
			t.Fatal(err)
		}
		if ports, given, err := c.HostPorts(); given || len(ports) > 0 || err != nil {
			t.Errorf("%s: got %v, %v, %v", without, ports, given, err)
		}
	}
}

func manyLabels() string {
	var pairs []string
	for n := range 65 {
		pairs = append(pairs, fmt.Sprintf(`"k%d":"v"`, n))
	}
	return `"labels":{` + strings.Join(pairs, ",") + `}`
}

func TestPodName(t *testing.T) {
	for args, want := range map[string]string{
		"":                             "",
		"IgnoreUnknown=1":              "",
		"K8S_POD_NAMESPACE=default":    "",
		"K8S_POD_NAME=a;K8S_POD_UID=x": "",
		"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc": "default/web-0",
	} {
		if got := podName(args); got != want {
			t.Errorf("%q: got %q, want %q", args, got, want)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{
		conf(), conf(fileTenant, fileLabels, argsList, allowed, annotations), conf(argsObject),
		conf(allowed, annotations, `"annotations":"labels"`),
		conf(`"prevResult":{"cniVersion":"1.1.0","ips":[{"address":"fc00::1/128","interface":0}],` +
			`"interfaces":[{"name":"eth0","sandbox":"/x"}]}`),
		conf(`"prevResult":{"ips":[{"address":"fc00::1/128","interface":-1}]}`),
		conf(fileTenant, `"runtimeConfig":{"portMappings":[{"hostPort":80,"containerPort":80,"hostIP":"::"}]}`),
		conf(`"cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]`),
	} {
		f.Add([]byte(s), "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b")
	}
	f.Fuzz(func(t *testing.T, stdin []byte, args string) {
		c, err := ParseConfig(stdin, args)
		if err != nil {
			return
		}
		c.claimed("eth0", "/x") // must not panic
		c.HostPorts()
		name, labels, err := c.Identity()
		if err != nil {
			return
		}
		if tenant.CheckLabels(labels) != nil || tenant.CheckName(name) != nil {
			t.Errorf("got tenant %q, labels %v, want an error", name, labels)
		}
		if again, err := tenant.ParseLabels(tenant.Canonical(labels)); err != nil ||
			len(labels) > 0 && !maps.Equal(again, labels) {
			t.Errorf("labels %v are parsed again as %v, %v", labels, again, err)
		}
	})
}
