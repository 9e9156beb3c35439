package agenttest

import (
	"pilaster.io/pilaster/internal/agent/policies"
)

// Policies of tests: DenyAll denies all ingress, WebFromDB allows connections of app db to app web, and MutedDB denies
// all egress of app db.
const DenyAll = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"deny"},` +
	`"spec":{"podSelector":{},"policyTypes":["Ingress"]}}`

const WebFromDB = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web"},` +
	`"spec":{"podSelector":{"matchLabels":{"app":"web"}},
	"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"db"}}}]}]}}`

const MutedDB = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"db"},` +
	`"spec":{"podSelector":{"matchLabels":{"app":"db"}},"policyTypes":["Egress"]}}`

// Document is a policy of namespace default.
func Document(name, text string) policies.Document {
	return policies.Document{Kind: "NetworkPolicy", Namespace: "default", Name: name, Text: text}
}

// AllPolicies is an update with all policies of a tenant.
func AllPolicies(tenant string, documents ...policies.Document) policies.Update {
	return policies.Update{Tenant: tenant, Whole: true, Documents: documents}
}

// MorePolicies is an update with new or changed policies of a tenant.
func MorePolicies(tenant string, documents ...policies.Document) policies.Update {
	return policies.Update{Tenant: tenant, Documents: documents}
}

// MustApplyPolicies applies an update; the test fails after an error.
func (b *Bed) MustApplyPolicies(n policies.Update) {
	b.T.Helper()
	if err := b.ApplyPolicies(b.T.Context(), n); err != nil {
		b.T.Fatal(err)
	}
}
