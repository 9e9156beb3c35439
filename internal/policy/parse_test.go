package policy_test

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"pilaster.io/pilaster/internal/policy"
)

func TestParse(t *testing.T) {
	text := `
# a comment alone is no document
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, annotations: {pilaster.io/audit: "true", example.org/x: z}}
spec:
  podSelector: {matchLabels: {app: web}, matchExpressions: [{key: tier, operator: NotIn, values: [a, b]}]}
  ingress:
  - from: [{podSelector: {matchLabels: {app: db}}}, {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}]
    ports: [{port: 80}, {port: http, protocol: UDP}, {port: 1000, endPort: 2000}, {protocol: SCTP}]
--- # and one of another kind
apiVersion: v1
kind: List
metadata: {resourceVersion: "1"}
items:
- apiVersion: policy.networking.k8s.io/v1alpha2
  kind: ClusterNetworkPolicy
  metadata: {name: all}
  spec:
    tier: Baseline
    priority: 0
    subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}}
    egress:
    - name: none
      action: Pass
      to: [{networks: ["fd00::/8"]}, {namespaces: {matchLabels: {team: a}}}]
      protocols: [{udp: {destinationPort: {range: {start: 1, end: 9}}}}]
`
	got, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	app := func(v string) policy.Selector { return policy.Selector{{Key: "app", Values: []string{v}}} }
	want := []policy.Policy{{
		Tier: policy.NetworkPolicy, Namespace: "default", Name: "web", Audit: true, Isolates: [2]bool{true, false},
		Subject: policy.Pods{
			Namespace: "default",
			Labels: append(
				app("web"),
				policy.Requirement{Key: "tier", Operator: policy.NotIn, Values: []string{"a", "b"}},
			),
		},
		Rules: [2][]policy.Rule{{{
			Action: policy.Accept, Pods: []policy.Pods{{Namespace: "default", Labels: app("db")}},
			Blocks: []policy.Block{{Prefix: prefix("10.0.0.0/8"), Except: prefixes("10.1.0.0/16")}},
			Ports: []policy.Port{
				{Protocol: policy.TCP, First: 80, Last: 80},
				{Protocol: policy.UDP, Name: "http"},
				{Protocol: policy.TCP, First: 1000, Last: 2000},
				{Protocol: policy.SCTP, Last: 65535},
			},
		}}},
	}, {
		Tier: policy.Baseline, Name: "all", Subject: policy.Pods{Labels: app("web")},
		Rules: [2][]policy.Rule{nil, {{
			Name: "none", Action: policy.Pass,
			Pods: []policy.Pods{{Namespaces: policy.Selector{{Key: "team", Values: []string{"a"}}}}},
			Blocks: []policy.Block{
				{Prefix: prefix("fd00::/8")},
			}, Ports: []policy.Port{{Protocol: policy.UDP, First: 1, Last: 9}},
		}}},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read\n%+v\nwant\n%+v", got, want)
	}
}

// TestParseRefuses: errors name the place of the fault, and Parse ignores nothing silently.
func TestParseRefuses(t *testing.T) {
	rule := func(r string) string { return np("a", "{podSelector: {}, ingress: ["+r+"]}") }
	egress := func(r string) string { return np("a", "{podSelector: {}, egress: ["+r+"]}") }
	admin := func(rest string) string {
		return cnp("a", "{tier: Admin, priority: 1, subject: {namespaces: {}}, "+rest+"}")
	}
	to := func(peer string) string { return admin("egress: [{action: Deny, to: [" + peer + "]}]") }
	protocol := func(p string) string {
		return admin("ingress: [{action: Deny, from: [{namespaces: {}}], protocols: [" + p + "]}]")
	}
	many := func(n int, what string) string { return strings.TrimSuffix(strings.Repeat(what+",", n), ",") }
	for name, c := range map[string]struct{ text, want string }{
		"nothing":       {"# nothing\n", "no policy in it"},
		"no YAML":       {"a: [", "document 1: "},
		"not an object": {"[1]", "document 1: "},
		"another kind": {"{apiVersion: v1, kind: Pod}",
			`document 1: kind "Pod" of apiVersion "v1": write kind NetworkPolicy of networking.k8s.io/v1`},
		"another version": {"{apiVersion: policy.networking.k8s.io/v1alpha1, kind: AdminNetworkPolicy}",
			"write kind"},
		"another list": {"{apiVersion: v1, kind: PodList, items: []}", "write a List of v1"},
		"a list in a list": {"{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: List, items: []}]}",
			`document 1, item 1: kind "List"`},
		"unknown field of a list": {"{apiVersion: v1, kind: List, item: []}", `List: unknown field "item"`},
		"text after its end":      {np("a", "{}") + "a: b\n...\nb: c\n", "document 2: the line ... ends the document"},
		"a line divides badly":    {np("a", "{}") + "--- !!x\n", "document 2: "},
		"twice": {np("a", "{}") + np("a", "{}"), "document 2: NetworkPolicy shop/a is also in " +
			"document 1"},
		"unknown field": {np("a", "{podSelectors: {}}"),
			`document 1: NetworkPolicy shop/a: unknown field "spec.podSelectors"`},
		"another case": {np("a", "{podselector: {}}"), `unknown field "spec.podselector"`},
		"domain names of a NetworkPolicy": {egress("{to: [{domainNames: [example.org]}]}"),
			`spec.egress[0].to[0].domainNames"; egress to names is not supported; use ipBlock or networks`},
		"a field twice": {np("a", "{podSelector: {}, podSelector: {}}"), "podSelector"},
		"a field twice in JSON": {`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy",` +
			`"metadata":{"name":"a"},"spec":{"podSelector":{},"podSelector":{}}}`, `duplicate field ` +
			`"spec.podSelector"`},
		"a label twice in JSON": {`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy",` +
			`"metadata":{"name":"a"},"spec":{"podSelector":{"matchLabels":{"a":"b","a":"c"}}}}`, `duplicate ` +
			`field "spec.podSelector.matchLabels.a"`},
		"wrong type": {np("a", "{podSelector: 7}"), "spec.podSelector: a number is not valid " +
			"here"},
		"text without quotes": {np("a", "{podSelector: {matchLabels: {app: true}}}"),
			"a bool is not valid here: YAML reads it as one because it has no quotes"},
		"no name":       {np("''", "{podSelector: {}}"), "metadata.name: Required"},
		"bad name":      {np("A_", "{podSelector: {}}"), `metadata.name: Invalid value: "A_"`},
		"bad namespace": {strings.Replace(np("a", "{}"), "shop", "Shop", 1), "metadata.namespace: Invalid"},
		"bad audit": {strings.Replace(np("a", "{}"), "name: a", "name: a, annotations: "+
			"{pilaster.io/audit: 'yes'}", 1), `supported values: "true", "false"`},
		"unknown annotation": {strings.Replace(np("a", "{}"), "name: a", "name: a, annotations: "+
			"{pilaster.io/audits: 'true'}", 1), `supported values: "pilaster.io/audit"`},
		"status of a NetworkPolicy": {strings.Replace(np("a", "{}"), "spec:", "status: {}, spec:", 1),
			`unknown field "status"`},
		"bad policyTypes": {np("a", "{policyTypes: [ingress]}"),
			`spec.policyTypes[0]: Unsupported value: "ingress": supported values: "Ingress", "Egress"`},
		"three policyTypes": {np("a", "{policyTypes: [Ingress, Egress, Egress]}"),
			"spec.policyTypes: Too many: 3"},
		"bad label": {np("a", "{podSelector: {matchLabels: {'a b': c}}}"),
			"spec.podSelector.matchLabels: Invalid"},
		"bad value": {np("a", "{podSelector: {matchLabels: {a: 'b c'}}}"),
			"spec.podSelector.matchLabels[a]: Invalid"},
		"bad operator": {np("a", "{podSelector: {matchExpressions: [{key: a, operator: Is}]}}"),
			"spec.podSelector.matchExpressions[0].operator: Invalid"},
		"In without values": {np("a", "{podSelector: {matchExpressions: [{key: a, operator: In}]}}"),
			"matchExpressions[0].values: Required"},
		"Exists with values": {np("a", "{podSelector: {matchExpressions: [{key: a, operator: Exists, values: "+
			"[b]}]}}"), "matchExpressions[0].values: Forbidden"},
		"a label of one pod": {np("a", "{podSelector: {matchLabels: {pod-template-hash: x}}}"),
			`"pod-template-hash": pods of one workload differ in it`},
		"such a label of a peer": {rule("{from: [{podSelector: {matchLabels: {controller-uid: x}}}]}"),
			`spec.ingress[0].from[0].podSelector: Invalid value: "controller-uid"`},
		"a namespace as pod label": {rule("{from: [{podSelector: {matchLabels: {io.kubernetes.pod.namespace: x}}}]}"),
			"select by namespaceSelector"},
		"no peer": {rule("{from: [{}]}"), "spec.ingress[0].from[0]: Required value: one of " +
			"ipBlock, podSelector or namespaceSelector"},
		"two peers in one": {rule("{from: [{podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}}]}"),
			"spec.ingress[0].from[0]: Forbidden"},
		"bad cidr": {rule("{from: [{ipBlock: {cidr: 10.0.0.0}}]}"),
			"spec.ingress[0].from[0].ipBlock.cidr: Invalid"},
		"cidr with more bits": {rule("{from: [{ipBlock: {cidr: 10.0.0.1/8}}]}"), "ipBlock.cidr: Invalid"},
		"mapped IPv4": {rule("{from: [{ipBlock: {cidr: '::ffff:10.0.0.0/104'}}]}"),
			"ipBlock.cidr: Invalid"},
		"except is not in cidr": {rule("{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 11.0.0.0/16]}}]}"),
			"ipBlock.except[1]: Invalid"},
		"except is all of cidr": {rule("{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}"),
			"ipBlock.except[0]: Invalid"},
		"except of another family": {rule("{from: [{ipBlock: {cidr: 10.0.0.0/8, except: ['fd00::/16']}}]}"),
			"ipBlock.except[0]: Invalid"},
		"port 0": {rule("{ports: [{port: 0}]}"), "spec.ingress[0].ports[0].port: Invalid value: " +
			"0: must be between 1 and 65535"},
		"port 65536": {rule("{ports: [{port: 80}, {port: 65536}]}"),
			"spec.ingress[0].ports[1].port: Invalid"},
		"bad port name": {rule("{ports: [{port: a_b}]}"), "spec.ingress[0].ports[0].port: Invalid"},
		"bad protocol":  {rule("{ports: [{protocol: tcp}]}"), `ports[0].protocol: Unsupported value: "tcp"`},
		"endPort below": {rule("{ports: [{port: 80, endPort: 79}]}"), "ports[0].endPort: Invalid value: 79"},
		"endPort 65536": {rule("{ports: [{port: 80, endPort: 65536}]}"),
			"ports[0].endPort: Invalid value: 65536"},
		"endPort alone":     {rule("{ports: [{endPort: 79}]}"), "ports[0].endPort: Forbidden"},
		"endPort of a name": {rule("{ports: [{port: http, endPort: 79}]}"), "ports[0].endPort: Forbidden"},
		"a name of an address": {egress("{to: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: http}]}"),
			`spec.egress[0].ports[0].port: Forbidden: "http": addresses of an ipBlock have no names`},
		"many faults": {rule("{ports: [" + many(12, "{port: 0}") + "]}"), "and 2 more"},

		"a namespace of a cluster policy": {strings.Replace(cnp("a", "{tier: Admin, priority: 1, subject: "+
			"{namespaces: {}}}"), "name: a", "name: a, namespace: b", 1), "metadata.namespace: Forbidden"},
		"another tier": {cnp("a", "{tier: NetworkPolicy, priority: 1, subject: {namespaces: {}}}"),
			`spec.tier: Unsupported value: "NetworkPolicy": supported values: "Admin", "Baseline"`},
		"no priority": {cnp("a", "{tier: Admin, subject: {namespaces: {}}}"), "spec.priority: Required"},
		"priority 1001": {cnp("a", "{tier: Admin, priority: 1001, subject: {namespaces: {}}}"),
			"spec.priority: Invalid value: 1001: must be 0 to 1000"},
		"priority -1": {cnp("a", "{tier: Admin, priority: -1, subject: {namespaces: {}}}"),
			"spec.priority: Invalid value: -1"},
		"no subject": {cnp("a", "{tier: Admin, priority: 1}"), "spec.subject: Required value: " +
			"one of namespaces, pods"},
		"two subjects": {cnp("a", "{tier: Admin, priority: 1, subject: {namespaces: {}, pods: "+
			"{podSelector: {}}}}"), "spec.subject: Forbidden"},
		"26 rules": {admin("ingress: [" + many(26, "{action: Deny, from: [{namespaces: {}}]}") + "]"),
			"spec.ingress: Too many: 26: must have at most 25 items"},
		"26 rules of egress": {admin("egress: [" + many(26, "{action: Deny, to: [{namespaces: {}}]}") + "]"),
			"spec.egress: Too many: 26"},
		"26 peers": {admin("ingress: [{action: Deny, from: [" + many(26, "{namespaces: {}}") + "]}]"),
			"spec.ingress[0].from: Too many: 26"},
		"no peers": {admin("ingress: [{action: Deny, from: []}]"), "spec.ingress[0].from: Required"},
		"an empty peer": {to("{}"), "spec.egress[0].to[0]: Required value: one of namespaces, " +
			"networks, pods"},
		"two peers": {to("{namespaces: {}, networks: [10.0.0.0/8]}"), "spec.egress[0].to[0]: Forbidden"},
		"nodes": {to("{nodes: {}}"), "spec.egress[0].to[0].nodes: Forbidden: peers that " +
			"are nodes are not supported"},
		"domain names": {to("{domainNames: [example.org]}"), "spec.egress[0].to[0].domainNames: " +
			"Forbidden: egress to names is not supported; use networks"},
		"FQDNs": {to("{fqdns: [example.org]}"), `unknown field "spec.egress[0].to[0].fqdns"; egress to names ` +
			"is not supported; use ipBlock or networks"},
		"no networks": {to("{networks: []}"), "spec.egress[0].to[0].networks: Required"},
		"26 networks": {to("{networks: [" + many(26, "10.0.0.0/8") + "]}"), "networks: Too many: 26"},
		"a network twice": {to("{networks: [10.0.0.0/8, 10.0.0.0/8]}"),
			`networks[1]: Duplicate value: "10.0.0.0/8"`},
		"a bad network": {to("{networks: [10.0.0.0/33]}"), "networks[0]: Invalid"},
		"networks of ingress": {admin("ingress: [{action: Deny, from: [{networks: [10.0.0.0/8]}]}]"),
			`unknown field "spec.ingress[0].from[0].networks"`},
		"another action": {admin("ingress: [{action: Allow, from: [{namespaces: {}}]}]"),
			`spec.ingress[0].action: Unsupported value: "Allow"`},
		"a long name": {admin("ingress: [{name: " + strings.Repeat("n", 101) +
			", action: Deny, from: [{namespaces: {}}]}]"), "spec.ingress[0].name: Too long"},
		"no protocols": {admin("ingress: [{action: Deny, from: [{namespaces: {}}], protocols: []}]"),
			"spec.ingress[0].protocols: Required"},
		"26 protocols":      {protocol(many(26, "{destinationNamedPort: http}")), "protocols: Too many: 26"},
		"an empty protocol": {protocol("{}"), "protocols[0]: Required"},
		"two protocols": {protocol("{tcp: {destinationPort: {number: 1}}, destinationNamedPort: http}"),
			"protocols[0]: Forbidden"},
		"a protocol without port": {protocol("{tcp: {}}"), "protocols[0].tcp.destinationPort: Required"},
		"neither number nor range": {protocol("{udp: {destinationPort: {}}}"),
			"protocols[0].udp.destinationPort: Required"},
		"a range of one": {protocol("{sctp: {destinationPort: {range: {start: 5, end: 5}}}}"),
			"sctp.destinationPort.range.end: Invalid"},
		"a range to 65536": {protocol("{tcp: {destinationPort: {range: {start: 5, end: 65536}}}}"),
			"tcp.destinationPort: Invalid value: 65536"},
		"a bad name of a port": {protocol("{destinationNamedPort: A}"),
			"protocols[0].destinationNamedPort: Invalid"},
		"a name of a network's port": {admin("egress: [{action: Deny, to: [{networks: [10.0.0.0/8]}], " +
			"protocols: [{destinationNamedPort: http}]}]"), "spec.egress[0].protocols[0].destinationNamedPort: " +
			"Forbidden"},
		"a cluster policy's label": {cnp("a", "{tier: Admin, priority: 1, subject: {pods: {podSelector: "+
			"{matchLabels: {pod-template-hash: x}}}}}"), "spec.subject.pods.podSelector: Invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := policy.Parse([]byte(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v\nwant %q, read %+v", err, c.want, got)
			}
		})
	}
}

// TestParseTakesWhatAClusterPrints: Parse accepts the metadata and the status that an API server adds.
func TestParseTakesWhatAClusterPrints(t *testing.T) {
	text := strings.Replace(
		cnp("a", "{tier: Admin, priority: 1, subject: {namespaces: {}}}, status: {conditions: []}"),
		"name: a",
		"name: a, uid: x, resourceVersion: '7', generation: 1, creationTimestamp: '2026-01-01T00:00:00Z', "+
			"managedFields: [{manager: kubectl, operation: Apply}]",
		1,
	)
	if got, err := policy.Parse([]byte(text)); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func prefixes(all ...string) (out []netip.Prefix) {
	for _, s := range all {
		out = append(out, prefix(s))
	}
	return out
}

// TestParseKept: ParseKept returns the same policy as Parse.
func TestParseKept(t *testing.T) {
	network := `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web",` +
		`"namespace":"shop"},"spec":{"podSelector":{"matchLabels":{"app":"web"}},"ingress":[{"ports":[{"port":80}]}]}}`
	cluster := `{"apiVersion":"policy.networking.k8s.io/v1alpha2","kind":"ClusterNetworkPolicy",` +
		`"metadata":{"name":"all"},"spec":{"tier":"Admin","priority":1,"subject":{"namespaces":{}},` +
		`"ingress":[{"action":"Deny","from":[{"namespaces":{}}]}]}}`
	for _, c := range []struct {
		kind, text string
		ok         bool
	}{
		{"NetworkPolicy", network, true}, {"ClusterNetworkPolicy", cluster, true},
		{"ClusterNetworkPolicy", network, false}, {"NetworkPolicy", cluster, false}, {"Firewall", network, false},
		{"NetworkPolicy", network + network, false},
		{"NetworkPolicy", strings.Replace(network, `"spec"`, `"speck"`, 1), false},
		{"NetworkPolicy", strings.Replace(network, `"port":80`, `"port":80,"port":81`, 1), false},
		{"NetworkPolicy", strings.Replace(network, "networking.k8s.io/v1", "networking.k8s.io/v2", 1), false},
		{"NetworkPolicy", "null", false}, {"NetworkPolicy", "", false},
	} {
		is, err := policy.ParseKept(c.kind, []byte(c.text))
		if (err == nil) != c.ok {
			t.Errorf("%s %s: %v", c.kind, c.text, err)
		}
		if want, err := policy.Parse([]byte(c.text)); c.ok &&
			(err != nil || !reflect.DeepEqual([]policy.Policy{is}, want)) {
			t.Errorf("%s is read as %+v, and by Parse as %+v, %v", c.text, is, want, err)
		}
	}
}

// TestKeptMetadata: ParseKept accepts all fields of Kubernetes metadata, except those that the orchestrator removes
// before it stores a document.
func TestKeptMetadata(t *testing.T) {
	taken := strings.Fields(
		"creationTimestamp generation managedFields resourceVersion selfLink uid",
	) // by the orchestrator, before it keeps a document
	values := map[reflect.Kind]string{
		reflect.String:  `"x"`,
		reflect.Map:     `{}`,
		reflect.Slice:   `[]`,
		reflect.Pointer: `null`,
		reflect.Struct:  `null`,
		reflect.Int64:   `1`,
	}
	meta := reflect.TypeFor[metav1.ObjectMeta]()
	for i := range meta.NumField() {
		f := meta.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		metadata := map[string]json.RawMessage{"name": []byte(`"x"`), name: []byte(values[f.Type.Kind()])}
		text, err := json.Marshal(
			map[string]any{
				"apiVersion": "networking.k8s.io/v1",
				"kind":       "NetworkPolicy",
				"metadata":   metadata,
				"spec":       map[string]any{"podSelector": map[string]any{}},
			},
		)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := policy.ParseKept("NetworkPolicy", text); (err == nil) == slices.Contains(taken, name) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
