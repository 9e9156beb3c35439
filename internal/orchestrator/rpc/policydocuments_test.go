package rpc

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

func TestSplitDocuments(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
	}{
		{"", nil},
		{"a: 1", []string{"a: 1"}},
		{"---\na: 1\n---\n", []string{"\na: 1\n"}},
		{"# a\n\n---\r\nb: 1\n--- # c\nd: 1\n---", []string{"\r\nb: 1\n", " # c\nd: 1\n"}},
		{"a: |\n  ---\n---x: 1\n---\nb: 1\n", []string{"a: |\n  ---\n---x: 1\n", "\nb: 1\n"}},
		{"--- {a: 1}\n--- {b: 1}", []string{" {a: 1}\n", " {b: 1}"}},
	} {
		if got := SplitDocuments(c.text); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
}

func TestReadPolicies(t *testing.T) {
	const cluster = "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nspec: {tier: " +
		"Baseline, priority: 1, subject: {namespaces: {}}}\nmetadata:\n  name: base\n"
	const jsonPolicy = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"a"},"spec":{}}`
	annotated := func(annotations string) []string {
		return []string{strings.Replace(netpol("a", ""), "namespace", "annotations: {"+annotations+"}, namespace", 1)}
	}
	for name, c := range map[string]struct {
		documents []string
		want      string // the policies, or part of the error
	}{
		"YAML":         {[]string{netpol("a", "")}, "networkpolicy/shop/a"},
		"JSON":         {[]string{jsonPolicy}, "networkpolicy/default/a"},
		"cluster-wide": {[]string{cluster}, "clusternetworkpolicy/base"},
		"several":      {[]string{netpol("a", ""), cluster}, "networkpolicy/shop/a clusternetworkpolicy/base"},
		"a list": {[]string{"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: networking.k8s.io/v1, kind: " +
			"NetworkPolicy, metadata: {name: a}}\n- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, " +
			"metadata: " +
			"{name: b}}"}, "networkpolicy/default/a networkpolicy/default/b"},
		"audit mode": {annotated(`pilaster.io/audit: "true"`), "networkpolicy/shop/a(audit)"},

		"no documents":  {nil, "no document"},
		"invalid YAML":  {[]string{"a: ["}, "document 1: "},
		"not an object": {[]string{netpol("a", ""), "[]"}, "document 2: it is not an object"},
		"another kind": {
			[]string{"apiVersion: v1\nkind: Pod"},
			`document 1: kind "Pod" of apiVersion "v1": write kind NetworkPolicy`,
		},
		"another version": {
			[]string{"apiVersion: policy.networking.k8s.io/v1alpha1\nkind: ClusterNetworkPolicy"},
			"write kind NetworkPolicy of networking.k8s.io/v1",
		},
		"no name":      {[]string{netpol(`""`, "")}, "metadata.name"},
		"invalid name": {[]string{netpol("A/b", "")}, "metadata.name"},
		"invalid namespace": {
			[]string{strings.Replace(netpol("a", ""), "shop", "a/b", 1)}, "metadata.namespace",
		},
		"cluster-wide with a namespace": {[]string{cluster + "  namespace: shop\n"}, "metadata.namespace"},
		"twice": {[]string{netpol("a", ""), netpol("b", ""), netpol("a", "")}, "document 3: " +
			"networkpolicy/shop/a is there twice, first in document 1"},
		"invalid audit value": {annotated(`pilaster.io/audit: "yes"`), "pilaster.io/audit"},
		"a number as a name":  {[]string{netpol("7", "")}, "document 1: metadata.name: a number"},
		"metadata in capitals": {
			[]string{strings.Replace(jsonPolicy, "metadata", "Metadata", 1)}, `unknown field "Metadata"`,
		},
		"too many rules": {
			[]string{netpol("a", "  ingress: ["+strings.Repeat("{},", maxRules)+"{}]\n")}, "1001 rules",
		},
		"too long": {annotated("x: " + strings.Repeat("x", MaxDocument)), "the maximum is 65536"},
		"two documents in one": {
			[]string{netpol("a", "") + "---\n" + netpol("b", "")}, "document 1: the text has 2 documents",
		},
		"empty document": {[]string{netpol("a", ""), "# nothing\n"}, "document 2: it is empty"},
		"end marker":     {[]string{netpol("a", "") + "... \nkind: Pod\n"}, "document 1: its line ... ends it"},
		"nested list": {[]string{"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: " +
			"[{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: a}}]}]"}, "a list in a list"},
		"invalid list item": {[]string{"apiVersion: v1\nkind: List\nitems: [{kind: Pod}]"}, "document 1: item 1: "},
	} {
		t.Run(name, func(t *testing.T) {
			all, err := ReadPolicies(c.documents)
			var words []string
			for _, p := range all {
				audit := ""
				if p.Audit {
					audit = "(audit)"
				}
				words = append(words, store.PolicyName(p)+audit)
				if again, err := ReadPolicies([]string{p.Document}); err != nil || len(again) != 1 ||
					!proto.Equal(again[0], p) {
					t.Errorf("the stored form of %v is read as %v, %v", p, again, err)
				}
			}
			if err != nil {
				if words = []string{err.Error()}; !strings.Contains(err.Error(), "nothing was changed") {
					t.Errorf("got error %v, want one that says that nothing was changed", err)
				}
			}
			if got := strings.Join(words, " "); err == nil && got != c.want || !strings.Contains(got, c.want) {
				t.Errorf("got %.500s, want %s", got, c.want)
			}
		})
	}
}

// TestDocumentsAreCanonical: equal documents have one stored form, without the fields that a Kubernetes cluster adds.
func TestDocumentsAreCanonical(t *testing.T) {
	const want = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"labels":{"a":"b"},"name":"a","namespace":"default"},"spec":{"egress":[{"ports":[{"endPort":90,"port":80}]}]}}`
	for _, text := range []string{
		want,
		"kind: NetworkPolicy\napiVersion: networking.k8s.io/v1\nspec: {egress: [{ports: [{port: 80, endPort: " +
			"90}]}]}\nmetadata: {name: a, labels: {a: b}} # a comment\n",
		strings.NewReplacer(`"name":"a"`, `"name":"a","uid":"u","resourceVersion":"7","generation":1,`+
			`"creationTimestamp":null,"managedFields":[{}],`+
			`"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{}"}`,
			`"spec"`, `"status":{},"spec"`).Replace(want),
	} {
		all, err := ReadPolicies([]string{text})
		if err != nil || len(all) != 1 || all[0].Document != want {
			t.Errorf("%s\nis stored as\n%v, %v; want\n%s", text, all, err, want)
		}
	}
}

// netpol returns a NetworkPolicy in YAML.
func netpol(name, more string) string {
	return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n" +
		"metadata: {name: " + name + ", namespace: shop}\nspec:\n  podSelector: {}\n" + more
}

// TestEncryptedCIDRs: rules match plaintext addresses. A CIDR of encrypted addresses would match other containers than
// its author intends.
func TestEncryptedCIDRs(t *testing.T) {
	private := netip.MustParsePrefix("fc00::/8")
	for block, refused := range map[string]bool{
		`{cidr: "fc22::7/128"}`: true, `{cidr: "fc00::/8"}`: true, `{cidr: "::/0", except: ["fc22::7/128"]}`: true,
		`{cidr: "::/0"}`: false, `{cidr: "fc00::/7"}`: false, `{cidr: "fd70:696c:6100:2::/64"}`: false,
		`{cidr: "10.0.0.0/8"}`: false,
	} {
		for _, rule := range []string{"  ingress: [{from: [{ipBlock: %s}]}]\n", "  egress: [{to: [{ipBlock: %s}]}]\n"} {
			p, err := policy.Parse([]byte(netpol("a", fmt.Sprintf(rule, block))))
			if err != nil {
				t.Fatal(err)
			}
			encrypted := tenant.Tenant{Name: "blue", Addressing: tenant.Encrypted}
			err = refuseEncrypted(encrypted, private, &p[0])
			if (err != nil) != refused || refused && !strings.Contains(err.Error(), "NetworkPolicy shop/a: fc") {
				t.Errorf("%s: got error %v, want one: %v", block, err, refused)
			}
			plaintext := tenant.Tenant{Name: "blue", Addressing: tenant.Clear}
			if err := refuseEncrypted(plaintext, private, &p[0]); err != nil {
				t.Errorf("%s in a tenant with plaintext addresses: got error %v", block, err)
			}
		}
	}
}
