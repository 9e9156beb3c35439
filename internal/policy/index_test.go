package policy_test

import (
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// TestUnmatched: of the subject and of peers, exactly the labels that no app has are reported. All namespaces have the
// label with their name.
func TestUnmatched(t *testing.T) {
	labels := policy.LabelsOf(map[address.AppID]map[string]string{
		1: {"app": "web", tenant.NamespaceKey: "shop"},
		2: {"tier": "back", tenant.NamespaceLabelKey("team"): "a", "team": "b"},
	})
	for text, want := range map[string]string{
		`podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchExpressions: [{key: tier, ` +
			`operator: Exists}]}}]}]`: "",
		`podSelector: {matchLabels: {role: db}}, egress: [{to: [{namespaceSelector: {matchExpressions: [{key: ` +
			`env, operator: NotIn, values: [x]}]}}]}]`: `label "role", label of namespaces "env"`,
		`podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ` +
			`other, team: c}}}]}]`: "",
		`podSelector: {matchLabels: {team: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {app: ` +
			`web}}}]}]`: `label of namespaces "app"`,
	} {
		all, err := policy.Parse(
			[]byte(
				"{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p}, spec: {" + text + "}}",
			),
		)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(labels.Unmatched(&all[0]), ", "); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// TestUnmatchedValuesAndPorts: values and named ports that no app has are reported. For a label that no app has, only
// its key is reported.
func TestUnmatchedValuesAndPorts(t *testing.T) {
	labels := policy.LabelsOf(map[address.AppID]map[string]string{
		1: {"app": "web", tenant.NamespaceKey: "shop", "io.kubernetes.pod.port.http": "80-TCP"},
		2: {"app": "db", tenant.NamespaceLabelKey("team"): "a"},
	})
	for text, want := range map[string]string{
		`podSelector: {matchLabels: {app: web}}, ingress: [{ports: [{port: http}]}]`: "; ",
		`podSelector: {matchLabels: {app: wbe, role: x}}, ingress: [{ports: [{port: htpp}, {port: 81}]}]`: `label ` +
			`"app" with value "wbe"; "htpp" of TCP`,
		`podSelector: {}, ingress: [{ports: [{port: http, protocol: UDP}]}], egress: [{to: [{namespaceSelector: ` +
			`{matchLabels: {team: c}}, podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [web, ` +
			`bd]}]}}]}]`: `label "app" with value "bd", label of namespaces "team" with value "c"; "http" of UDP`,
	} {
		all, err := policy.Parse(
			[]byte(
				"{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p}, spec: {" + text + "}}",
			),
		)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Join(labels.UnmatchedValues(&all[0]), ", ") + "; " +
			strings.Join(labels.UnmatchedPorts(&all[0]), ", ")
		if got != want {
			t.Errorf("%s: got %s, want %s", text, got, want)
		}
	}
}
