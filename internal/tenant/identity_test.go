package tenant

import (
	"maps"
	"testing"
)

func TestIdentityLabelsLeaveOutWhatTellsPodsApart(t *testing.T) {
	for key, kept := range map[string]bool{
		"app":                                      true,
		"tier":                                     true,
		"app.kubernetes.io/name":                   true,
		"io.kubernetes.pod.namespace":              true,
		"example.org/team":                         true,
		"io.kubernetes.pod.name":                   false,
		"io.kubernetes.pod.uid":                    false,
		"pod-template-hash":                        false,
		"pod-template-generation":                  false,
		"controller-revision-hash":                 false,
		"controller-uid":                           false,
		"batch.kubernetes.io/controller-uid":       false,
		"batch.kubernetes.io/job-completion-index": false,
		"apps.kubernetes.io/pod-index":             false,
		"statefulset.kubernetes.io/pod-name":       false,
		"kubernetes.io/hostname":                   false,
		"k8s.io/cluster-service":                   false,
		"beta.kubernetes.io/arch":                  false,
		"node.beta.kubernetes.io/x":                false,
		"annotation.kubectl":                       false,
		"etcd_node":                                false,
	} {
		_, got := IdentityLabels(map[string]string{key: "x"})[key]
		if got != kept {
			t.Errorf("%s: in the identity %v, want %v", key, got, kept)
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
