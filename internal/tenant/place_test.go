package tenant

import (
	"maps"
	"testing"
)

func TestPlace(t *testing.T) {
	labels := map[string]string{"app": "web", NamespaceKey: "other"}
	p := Place{
		Namespace:       "shop",
		NamespaceLabels: map[string]string{"division": "x"},
		Ports:           map[string]Port{"http": {80, "TCP"}},
	}
	id := ReadIdentity(IdentityLabels(p.With(labels)))
	if id.Namespace != "shop" || id.NamespaceLabels["division"] != "x" || id.Ports["http"] != (Port{80, "TCP"}) ||
		!maps.Equal(id.Pod, map[string]string{"app": "web"}) {
		t.Errorf("%+v", id)
	}
	if labels[NamespaceKey] != "other" {
		t.Error("it wrote to the labels it was given")
	}
	if in := (Place{Namespace: DefaultNamespace}).With(labels); len(in) != 1 {
		t.Errorf("of the namespace of those without one there are two identities: %v", in)
	}
	if in := (Place{}).With(nil); in == nil || len(in) != 0 {
		t.Errorf("nothing with nothing is %v", in)
	}
}

func TestParsePorts(t *testing.T) {
	got, err := ParsePorts("http=80, dns=53/UDP,sig=9/SCTP")
	if want := map[string]Port{"http": {80, "TCP"}, "dns": {53, "UDP"}, "sig": {9, "SCTP"}}; err != nil ||
		!maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err = ParsePorts(" "); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"http", "=80", "http=0", "http=65536", "http=80/tcp", "http=80/", "HTTP=80", "a=1,a=2",
		"-a=1", "a234567890123456=1", "a b=1", ","} {
		if got, err := ParsePorts(bad); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}
