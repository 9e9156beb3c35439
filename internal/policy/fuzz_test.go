package policy_test

import (
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/fuzzmutate"
	"pilaster.io/pilaster/internal/policy"
)

var documents = []string{
	`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"namespace":"shop","name":"web",` +
		`"annotations":{"pilaster.io/audit":"false"}},"spec":{"podSelector":{"matchLabels":{"app":"web"}},` +
		`"policyTypes":["Ingress","Egress"],
	"ingress":[{"from":[{"podSelector":{"matchExpressions":[{"key":"tier","operator":"In","values":["front",` +
		`"back"]}]}},{"ipBlock":{"cidr":"10.0.0.0/8","except":["10.1.0.0/16"]}}],"ports":[{"port":80,` +
		`"endPort":84},{"protocol":"UDP","port":"http"}]}],
	"egress":[{"to":[{"namespaceSelector":{"matchLabels":{"division":"sales"}}}],"ports":[{"protocol":"TCP",` +
		`"port":443}]}]}}`,
	`{"apiVersion":"policy.networking.k8s.io/v1alpha2","kind":"ClusterNetworkPolicy","metadata":{"name":"all"},` +
		`"spec":{"tier":"Admin","priority":10,"subject":{"namespaces":{}},
	"ingress":[{"name":"first","action":"Deny","from":[{"pods":{"namespaceSelector":{},` +
		`"podSelector":{"matchLabels":{"app":"ops"}}}}],` +
		`"protocols":[{"tcp":{"destinationPort":{"range":{"start":20,"end":25}}}},{"destinationNamedPort":"http"}]}],
	"egress":[{"action":"Pass","to":[{"networks":["10.0.0.0/8","fd00::/8"]}],` +
		`"protocols":[{"udp":{"destinationPort":{"number":53}}}]}]}}`,
}

// FuzzPolicies: every document that Parse accepts follows the rules of the model and compiles, and the tables decide as
// the model does.
func FuzzPolicies(f *testing.F) {
	list := `{"apiVersion":"v1","kind":"List","items":[` + documents[0] + "," + documents[1] + "]}"
	for _, text := range append(documents, list, np("a", "{podSelector: {}}")+cnp("b", "{tier: Admin}")) {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	apps := semanticApps()
	f.Fuzz(func(t *testing.T, text, script []byte) {
		text = fuzzmutate.JSON(text, script, documents...)
		policies, err := policy.Parse(text)
		if err != nil {
			if policies != nil {
				t.Fatalf("refused and read: %v", err)
			}
			return
		}
		for _, p := range policies {
			obeys(t, p)
		}
		tables, err := policy.Compile("acme", policies, apps, appsOf(apps))
		if err != nil {
			t.Fatal(err)
		}
		h := fnv.New64a()
		h.Write(text)
		d := dice{rand.New(rand.NewPCG(h.Sum64(), 0))}
		for range 20 {
			got, p := d.ask(tables, apps)
			if want, by := evaluate(policies, p, false); got.Allowed != want {
				t.Fatalf(
					"%s\n%+v: allowed %v by %v, want %v by %v",
					text,
					p,
					got.Allowed,
					tables.Names[got.Rule],
					want,
					by,
				)
			}
		}
	})
}

func obeys(t *testing.T, p policy.Policy) {
	t.Helper()
	of := p.Tier == policy.NetworkPolicy
	if p.Name == "" || of == (p.Namespace == "") || p.Priority < 0 || p.Priority > 1000 ||
		!of && p.Isolates != [2]bool{} {
		t.Fatalf("%+v", p)
	}
	for _, r := range slices.Concat(p.Rules[in], p.Rules[out]) {
		if r.Action == policy.None || of && r.Action != policy.Accept || r.Everyone == (len(r.Pods)+len(r.Blocks) > 0) {
			t.Fatalf("%+v", r)
		}
		for _, port := range r.Ports {
			all := port.First == 0 && port.Last == 65535
			if port.Name == "" && (port.Protocol == 0 || port.First > port.Last || port.First == 0 && !all) ||
				port.Name != "" && port.First+port.Last != 0 {
				t.Fatalf("%+v", port)
			}
		}
		for _, b := range r.Blocks {
			whole := func(x netip.Prefix) bool { return x.IsValid() && x.Masked() == x && !x.Addr().Is4In6() }
			for _, e := range b.Except {
				if !whole(e) || e.Bits() <= b.Prefix.Bits() || !b.Prefix.Contains(e.Addr()) {
					t.Fatalf("%+v", b)
				}
			}
			if !whole(b.Prefix) {
				t.Fatalf("%+v", b)
			}
		}
	}
}
