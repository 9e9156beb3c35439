package tenant

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Labels that tell the pods of one workload apart, or that the machinery of Kubernetes adds, do
// not make an identity: each pod would become an app of its own. The list is that of Cilium's
// defaults ("Limiting Identity-Relevant Labels"): a key is left out by the shortest prefix that
// matches, unless a longer prefix keeps it.
var (
	keptPrefixes = []string{
		"app.kubernetes.io",
		"io.kubernetes.pod.namespace",
	}
	leftOutPrefixes = []string{
		"annotation",
		"apps.kubernetes.io/pod-index",
		"batch.kubernetes.io/controller-uid",
		"batch.kubernetes.io/job-completion-index",
		"controller-revision-hash",
		"controller-uid",
		"etcd_node",
		"io.kubernetes",
		"job-completion-index",
		"k8s.io",
		"kubernetes.io",
		"pod-template-generation",
		"pod-template-hash",
		"statefulset.kubernetes.io/pod-name",
	}
)

// IdentityLabels are the labels that make a container's app.
func IdentityLabels(labels map[string]string) map[string]string {
	identity := make(map[string]string, len(labels))
	for k, v := range labels {
		if isIdentity(k) {
			identity[k] = v
		}
	}
	return identity
}

func isIdentity(key string) bool {
	hasPrefix := func(p string) bool { return strings.HasPrefix(key, p) }
	if slices.ContainsFunc(keptPrefixes, hasPrefix) {
		return true
	}
	domain, _, _ := strings.Cut(key, "/")
	return !slices.ContainsFunc(leftOutPrefixes, hasPrefix) && !strings.HasSuffix(domain, "beta.kubernetes.io")
}

// Canonical writes a label set in one way only: "app=web,tier=front", sorted by key. Two sets
// are the same identity exactly when these are equal.
func Canonical(labels map[string]string) string {
	var b strings.Builder
	for i, k := range slices.Sorted(maps.Keys(labels)) {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(k + "=" + labels[k])
	}
	return b.String()
}

// Limits of what a label set may hold; those of Kubernetes for one label.
const (
	maxLabels     = 64
	maxLabelKey   = 253 + 1 + 63 // DNS subdomain, "/", name
	maxLabelValue = 63
)

// CheckLabels refuses what could not be written in canonical form or passed on unharmed.
func CheckLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return fmt.Errorf("%d labels are more than %d", len(labels), maxLabels)
	}
	for k, v := range labels {
		switch {
		case k == "" || len(k) > maxLabelKey || strings.IndexFunc(k, notInKey) >= 0:
			return fmt.Errorf("label key %.400q: 1 to %d letters, digits or . _ - / are allowed", k, maxLabelKey)
		case len(v) > maxLabelValue || strings.IndexFunc(v, notInValue) >= 0:
			return fmt.Errorf("label %s: value %.80q: at most %d letters, digits or . _ - are allowed", k, v, maxLabelValue)
		}
	}
	return nil
}

func notInValue(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '.' || r == '_' || r == '-')
}
func notInKey(r rune) bool { return r != '/' && notInValue(r) }

// ParseLabels reads what Canonical writes; spaces around keys and values are left out.
func ParseLabels(s string) (map[string]string, error) {
	labels := map[string]string{}
	if strings.TrimSpace(s) == "" {
		return labels, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		k, v, ok := strings.Cut(part, "=")
		k, v = strings.TrimSpace(k), strings.TrimSpace(v)
		if !ok {
			return nil, fmt.Errorf("labels %q: %q is not key=value", s, part)
		}
		if _, twice := labels[k]; twice {
			return nil, fmt.Errorf("labels %q: key %q is given twice", s, k)
		}
		labels[k] = v
	}
	return labels, CheckLabels(labels)
}
