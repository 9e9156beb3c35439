package tenant

import (
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
)

func TestIdentityLabelsLeaveOutWhatTellsPodsApart(t *testing.T) {
	for key, kept := range map[string]bool{
		"app":                         true,
		"tier":                        true,
		"app.kubernetes.io/name":      true,
		"io.kubernetes.pod.namespace": true,
		"example.org/team":            true,
		"io.kubernetes.pod.namespace.labels.kubernetes.io/metadata.name": true,
		"io.kubernetes.pod.namespace.labels.team":                        true,
		"io.kubernetes.pod.port.http":                                    true,
		"io.kubernetes.pod.name":                                         false,
		"io.kubernetes.pod.uid":                                          false,
		"pod-template-hash":                                              false,
		"pod-template-generation":                                        false,
		"controller-revision-hash":                                       false,
		"controller-uid":                                                 false,
		"batch.kubernetes.io/controller-uid":                             false,
		"batch.kubernetes.io/job-completion-index":                       false,
		"apps.kubernetes.io/pod-index":                                   false,
		"statefulset.kubernetes.io/pod-name":                             false,
		"kubernetes.io/hostname":                                         false,
		"k8s.io/cluster-service":                                         false,
		"beta.kubernetes.io/arch":                                        false,
		"node.beta.kubernetes.io/x":                                      false,
		"annotation.kubectl":                                             false,
		"etcd_node":                                                      false,
	} {
		_, got := IdentityLabels(map[string]string{key: "x"})[key]
		if got != kept {
			t.Errorf("%s: in the identity %v, want %v", key, got, kept)
		}
	}
}

func TestReadIdentity(t *testing.T) {
	port, value := NamedPort("http", 80, "TCP")
	got := ReadIdentity(map[string]string{
		"app": "web", NamespaceKey: "shop", NamespaceLabelKey("team"): "a",
		NamespaceLabelKey("kubernetes.io/metadata.name"): "a lie",
		port: value, "io.kubernetes.pod.port.none": "0-TCP", "io.kubernetes.pod.port.much": "65536-TCP",
	})
	want := Identity{
		Pod: map[string]string{"app": "web"}, Namespace: "shop",
		NamespaceLabels: map[string]string{"team": "a", "kubernetes.io/metadata.name": "shop"},
		Ports:           map[string]Port{"http": {80, "TCP"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read as %+v, want %+v", got, want)
	}
	if alone := ReadIdentity(nil); alone.Namespace != "default" ||
		alone.NamespaceLabels["kubernetes.io/metadata.name"] != "default" {
		t.Errorf("without labels: %+v, want namespace default", alone)
	}
}

// The longest label that a Kubernetes namespace may have is accepted with the identity's prefix.
func TestCheckLabelsTakesTheLongestOfANamespace(t *testing.T) {
	key := NamespaceLabelKey(strings.Repeat("d", 253) + "/" + strings.Repeat("n", 63))
	if err := CheckLabels(map[string]string{key: "x"}); err != nil {
		t.Error(err)
	}
	if err := CheckLabels(map[string]string{key + "n": "x"}); err == nil {
		t.Error("a key that is one too long is taken")
	}
}

// The limits for a container's own labels, its namespace's labels and its ports are separate: many labels of the
// namespace leave the container as many labels of its own as before.
func TestCheckLabelsCountsByWhose(t *testing.T) {
	labels := map[string]string{NamespaceKey: "shop"}
	for i := range maxLabels {
		labels[fmt.Sprint("own", i)] = ""
		key, value := NamedPort(fmt.Sprint("p", i), 80, "TCP")
		labels[key] = value
		if i > 0 { // beside its name
			labels[NamespaceLabelKey(fmt.Sprint("team", i))] = ""
		}
	}
	if err := CheckLabels(labels); err != nil {
		t.Errorf("as many as there may be: %v", err)
	}
	for key, whose := range map[string]string{"own": "of a container are 64",
		NamespaceLabelKey("team"): "of a namespace", "io.kubernetes.pod.port.p": "named ports"} {
		labels[key] = "1-TCP"
		if err := CheckLabels(labels); err == nil || !strings.Contains(err.Error(), whose) {
			t.Errorf("one more, %s: %v", key, err)
		}
		delete(labels, key)
	}
}

// A named port without a valid port number is rejected at once, because a policy that names it would select no
// container.
func TestCheckLabelsReadsPorts(t *testing.T) {
	for value, ok := range map[string]bool{"80-TCP": true, "65535-SCTP": true, "http": false, "80": false,
		"80-tcp": false, "0-TCP": false, "65536-UDP": false, "80-ICMP": false} {
		err := CheckLabels(map[string]string{portPrefix + "http": value})
		if (err == nil) != ok || !ok && !strings.Contains(err.Error(), "as in 80-TCP") {
			t.Errorf("%s: %v", value, err)
		}
	}
}

func TestIsPodLabel(t *testing.T) {
	for key, want := range map[string]bool{"app": true, "pod-template-hash": false, NamespaceKey: false,
		NamespaceLabelKey("team"): false, "io.kubernetes.pod.port.http": false} {
		if got := IsPodLabel(key); got != want {
			t.Errorf("%s: %v, want %v", key, got, want)
		}
	}
}

func TestCanonicalIsReadBack(t *testing.T) {
	labels := map[string]string{"tier": "front", "app": "web", "empty": ""}
	text := Canonical(labels)
	if want := "app=web,empty=,tier=front"; text != want {
		t.Fatalf("canonical form %q, want %q", text, want)
	}
	back, err := ParseLabels(" app = web, empty=,tier=front")
	if err != nil || !maps.Equal(back, labels) {
		t.Fatalf("read back %v, %v", back, err)
	}
}

func FuzzParseLabels(f *testing.F) {
	for _, s := range []string{"", "a=b", "a=b,c=d", "a=b,a=c", "=", "a", "a==b", "a.b/c=d,e=", "ä=b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		labels, err := ParseLabels(s)
		if err != nil {
			return
		}
		back, err := ParseLabels(Canonical(labels))
		if err != nil || !maps.Equal(back, labels) {
			t.Fatalf("%q became %v and back %v, %v", s, labels, back, err)
		}
	})
}
