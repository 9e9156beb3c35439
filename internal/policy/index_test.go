package policy_test

import (
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// TestUnmatched: labels that no app has are reported for the subject and for peers, and no
// others. All namespaces have the label with their name.
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
