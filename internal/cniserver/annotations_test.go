package cniserver

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"pilaster.io/pilaster/internal/tenant"
)

// annotated returns the key that the runtime adds to the configuration for a pod with annotations.
func annotated(t *testing.T, annotations map[string]string) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"io.kubernetes.cri.pod-annotations": annotations})
	if err != nil {
		t.Fatal(err)
	}
	return `"runtimeConfig":` + string(b)
}

const (
	blue       = `"tenant":"blue"`
	app        = `"labels":{"app":"web"}`
	redOrGreen = `"allowedTenants":["red","green"]`
	none       = `"annotations":"none"`
	labelsOnly = `"annotations":"labels"`
	all        = `"annotations":"all"`
)

// An annotation may name only the tenant of the configuration or one of allowedTenants.
func TestAnnotatedTenant(t *testing.T) {
	for _, c := range []struct {
		name  string
		keys  []string
		pod   string // tenant in the annotation; "-": no annotation
		want  string // tenant; empty: an error
		texts []string
	}{
		{"the tenant of the file", []string{blue}, "blue", "blue", nil},
		{"another tenant", []string{blue}, "red", "",
			[]string{`"red"`, "only blue", `add the tenant to "allowedTenants"`}},
		{"an empty tenant", []string{blue}, "", "", []string{`""`, "only blue"}},
		{"no tenant in the file", nil, "red", "",
			[]string{`"red"`, "allows no tenant", `set "tenant" or "allowedTenants"`}},
		{"an empty list", []string{`"allowedTenants":[]`}, "red", "", []string{"allows no tenant"}},
		{"neither", nil, "-", "", []string{"no tenant is given", `set "tenant"`, `"allowedTenants"`}},

		{"an allowed tenant", []string{blue, redOrGreen}, "green", "green", nil},
		{"an allowed tenant, explicitly", []string{blue, redOrGreen, all}, "green", "green", nil},
		{"the tenant of the file beside the list", []string{blue, redOrGreen}, "blue", "blue", nil},
		{"without an annotation", []string{blue, redOrGreen}, "-", "blue", nil},
		{"a tenant that is not in the list", []string{blue, redOrGreen}, "black", "",
			[]string{`"black"`, "only blue, red, green", "nothing was changed"}},
		{"an allowed tenant, and none in the file", []string{redOrGreen}, "red", "red", nil},
		{"a list, and no annotation", []string{redOrGreen}, "-", "",
			[]string{"no tenant is given", "one of red, green", `"tenant" in the network configuration`}},
		{"all, without a list", []string{blue, all}, "red", "", []string{"only blue"}},

		{"labels: an allowed tenant", []string{blue, redOrGreen, labelsOnly}, "red", "",
			[]string{`"red"`, `set "annotations" to "all"`, "nothing was changed"}},
		{"labels: the tenant of the file", []string{blue, redOrGreen, labelsOnly}, "blue", "blue", nil},
		{"labels: no tenant in the file", []string{redOrGreen, labelsOnly}, "-", "", []string{`set "tenant"`}},
		{"none: an allowed tenant", []string{blue, redOrGreen, none}, "red", "blue", nil},
		{"none: another tenant", []string{blue, none}, "black", "blue", nil},
		{"none: no tenant in the file", []string{redOrGreen, none}, "red", "", []string{`set "tenant"`}},

		{"an unknown word", []string{blue, `"annotations":"some"`}, "-", "",
			[]string{`"some"`, `"none", "labels" or "all"`}},
		{"an invalid name in the list", []string{blue, `"allowedTenants":["Red_1"]`}, "-", "",
			[]string{`"allowedTenants"`, "Red_1"}},
	} {
		keys := c.keys
		if c.pod != "-" {
			keys = append(keys, annotated(t, map[string]string{tenantAnnotation: c.pod}))
		}
		name, err := identityOf(t, conf(keys...))
		if c.want != "" && (err != nil || !strings.HasPrefix(name, c.want+" ")) {
			t.Errorf("%s: got %q, %v; want tenant %s", c.name, name, err, c.want)
		}
		for _, text := range c.texts {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: got %q, error %v; want an error with %q", c.name, name, err, text)
			}
		}
	}
}

// identityOf returns "TENANT LABELS".
func identityOf(t *testing.T, config string) (string, error) {
	t.Helper()
	c, err := ParseConfig([]byte(config), "")
	if err != nil {
		t.Fatal(err) // a DEL needs it
	}
	name, labels, err := c.Identity()
	return name + " " + tenant.Canonical(labels), err
}

// Annotations add labels, and cannot replace or remove one of the configuration.
func TestAnnotatedLabels(t *testing.T) {
	const (
		fromArgs  = `"args":{"cni":{"labels":{"app":"args"}}}`
		fixedPort = `"labels":{"io.kubernetes.pod.port.http":"80-TCP"}`
	)
	for _, c := range []struct {
		name          string
		keys          []string
		labels, ports string // annotations
		want          string // labels; empty: an error
		texts         []string
	}{
		{"another key", []string{app}, "tier=x", "", "app=web,tier=x", nil},
		{"the same value", []string{app}, "app=web", "", "app=web", nil},
		{"an empty annotation", []string{app}, "", "", "app=web", nil},
		{"explicitly labels", []string{app, labelsOnly}, "tier=x", "", "app=web,tier=x", nil},
		{"explicitly all", []string{app, all}, "tier=x", "", "app=web,tier=x", nil},
		{"none", []string{app, none}, "app=db,tier=x", "http=80/TCP", "app=web", nil},
		{"none, and a value that cannot be parsed", []string{app, none}, "web", "80", "app=web", nil},
		{"another value", []string{app}, "app=db", "", "",
			[]string{labelsAnnotation, "app", `"db"`, `"web"`, "nothing was changed", "remove it from the annotation"}},
		{"an empty value", []string{app}, "app=", "", "", []string{`""`, `"web"`}},
		{"another value than args", []string{app, fromArgs}, "app=web", "", "", []string{`"web"`, `"args"`}},
		{"a port", []string{app}, "", "http=80/TCP", "app=web,io.kubernetes.pod.port.http=80-TCP", nil},
		{"the same port", []string{fixedPort}, "", "http=80/TCP", "io.kubernetes.pod.port.http=80-TCP", nil},
		{"another port", []string{fixedPort}, "", "http=81/TCP", "", []string{portsAnnotation, `"81-TCP"`, `"80-TCP"`}},
	} {
		keys := append([]string{blue}, c.keys...)
		keys = append(keys, annotated(t, map[string]string{labelsAnnotation: c.labels, portsAnnotation: c.ports}))
		got, err := identityOf(t, conf(keys...))
		if c.want != "" && (err != nil || got != "blue "+c.want) {
			t.Errorf("%s: got %q, %v; want labels %s", c.name, got, err, c.want)
		}
		for _, text := range c.texts {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: got %q, error %v; want an error with %q", c.name, got, err, text)
			}
		}
	}
}

// An ADD whose annotations are refused does not call the agent; a DEL with the same annotations succeeds.
func TestRefusedAnnotations(t *testing.T) {
	for _, annotations := range []map[string]string{
		{tenantAnnotation: "red"}, {labelsAnnotation: "app=db"},
	} {
		config := conf(blue, app, annotated(t, annotations))
		out, err := serveCall(t, nil, request("ADD", config)) // a call to the agent would panic
		if err == nil {
			t.Errorf("ADD with %v: got %s, want an error", annotations, out)
			continue
		}
		if code := cniCode(t, err); code != types.ErrInvalidNetworkConfig {
			t.Errorf("ADD with %v: got code %d, want %d: %v", annotations, code, types.ErrInvalidNetworkConfig, err)
		}
		if _, err := serveCall(t, &fakeAgent{}, request("DEL", config)); err != nil {
			t.Errorf("DEL with %v: got error %v", annotations, err)
		}
	}
}

// Ignored annotations are logged at debug level.
func TestIgnoredAnnotations(t *testing.T) {
	for level, want := range map[slog.Level]bool{slog.LevelDebug: true, slog.LevelInfo: false} {
		var log bytes.Buffer
		h := Handler(&fakeAgent{}, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level})),
			func(string, uint, time.Duration) {})
		config := conf(blue, none, annotated(t, map[string]string{tenantAnnotation: "red", "example.org/x": "y"}))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("POST", "/cni", strings.NewReader(request("ADD", config))))
		if exit := w.Header().Get("Pilaster-Exit"); exit != "0" {
			t.Fatalf("got exit code %s, %s", exit, w.Body)
		}
		if got := strings.Contains(log.String(), "["+tenantAnnotation+"]"); got != want {
			t.Errorf("level %v: the log is %q; want the name of the annotation: %v", level, log.String(), want)
		}
	}
}

// Keys of another type are refused by an ADD; a DEL does not need them.
func TestMistypedTrust(t *testing.T) {
	for _, key := range []string{`"allowedTenants": "blue"`, `"annotations": {"a": "b"}`} {
		config := conf(blue, key)
		_, err := serveCall(t, nil, request("ADD", config)) // a call to the agent would panic
		if err == nil || !strings.Contains(err.Error(), "correct the network configuration") {
			t.Errorf("ADD with %s: got %v, want an error with advice", key, err)
		}
		if _, err := serveCall(t, &fakeAgent{}, request("DEL", config)); err != nil {
			t.Errorf("DEL with %s: got error %v", key, err)
		}
	}
}

// An address key comes from the configuration or from the annotation, if annotations have an effect.
func TestAddressKey(t *testing.T) {
	const db0 = `"addressKey":"db-0"`
	for _, c := range []struct {
		name, keys, pod, want, text string
	}{
		{"none", blue, "-", "", ""},
		{"of the file", blue + "," + db0, "-", "db-0", ""},
		{"of the pod", blue, "db-1", "db-1", ""},
		{"the same twice", blue + "," + db0, "db-0", "db-0", ""},
		{"two", blue + "," + db0, "db-1", "", `"db-1" there and "db-0"`},
		{"ignored", blue + "," + none, "db-1", "", ""},
		{"characters", blue, "db 1", "", "letters, digits"},
		{"length", blue, strings.Repeat("k", 129), "", "at most 128"},
	} {
		annotations := map[string]string{}
		if c.pod != "-" {
			annotations[keyAnnotation] = c.pod
		}
		config, err := ParseConfig([]byte(`{"name":"n",`+c.keys+","+annotated(t, annotations)+"}"), "")
		if err != nil {
			t.Fatal(err)
		}
		got, err := config.AddressKey()
		if got != c.want && c.text == "" || (err != nil) != (c.text != "") ||
			err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %q, %v; want %q, %q", c.name, got, err, c.want, c.text)
		}
	}
}
