package tenant

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Labels that distinguish the pods of one workload, or that Kubernetes adds itself, are not part of the identity:
// otherwise each pod would be an app of its own. The lists are Cilium's defaults ("Limiting Identity-Relevant Labels").
// A key with a left-out prefix is excluded, unless it also has a kept prefix.
var (
	keptPrefixes = []string{
		"app.kubernetes.io",
		NamespaceKey, // also the prefix of the namespace's labels
		portPrefix,
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

// An identity has all data about a container that a policy can select by, also data that Kubernetes stores outside of
// the pod's labels.
const (
	// NamespaceKey is the label with the name of a container's namespace.
	NamespaceKey = "io.kubernetes.pod.namespace"
	// DefaultNamespace is the namespace of a container without that label.
	DefaultNamespace = "default"
	// namespaceNameKey is a label that each namespace has: its name.
	namespaceNameKey     = "kubernetes.io/metadata.name"
	namespaceLabelPrefix = NamespaceKey + ".labels."
	portPrefix           = "io.kubernetes.pod.port."
)

// NamespaceLabelKey returns the key, in an identity, of a label of the container's namespace.
func NamespaceLabelKey(key string) string { return namespaceLabelPrefix + key }

// NamedPort returns the label, in an identity, of a named port; its value is like 80-TCP.
func NamedPort(name string, port uint16, protocol string) (key, value string) {
	return portPrefix + name, fmt.Sprintf("%d-%s", port, protocol)
}

// Port is a named port of a container; the protocol is as Kubernetes writes it: TCP, UDP, SCTP.
type Port struct {
	Number   uint16
	Protocol string
}

// Identity holds the labels of an identity by their origin.
type Identity struct {
	Pod             map[string]string // the container's own labels
	Namespace       string
	NamespaceLabels map[string]string // the namespace's labels, that of its name included
	Ports           map[string]Port   // by name
}

// ReadIdentity groups the labels of an identity by their origin. It ignores a malformed port.
func ReadIdentity(labels map[string]string) Identity {
	id := Identity{
		Pod:             map[string]string{},
		Namespace:       DefaultNamespace,
		NamespaceLabels: map[string]string{},
		Ports:           map[string]Port{},
	}
	for k, v := range labels {
		if k == NamespaceKey {
			id.Namespace = v
		} else if key, ok := strings.CutPrefix(k, namespaceLabelPrefix); ok {
			id.NamespaceLabels[key] = v
		} else if name, ok := strings.CutPrefix(k, portPrefix); ok {
			if port, ok := readPort(v); ok {
				id.Ports[name] = port
			}
		} else {
			id.Pod[k] = v
		}
	}
	id.NamespaceLabels[namespaceNameKey] = id.Namespace
	return id
}

// readPort parses what NamedPort has written.
func readPort(value string) (Port, bool) {
	number, protocol, _ := strings.Cut(value, "-")
	n, err := strconv.ParseUint(number, 10, 16)
	return Port{
			uint16(n),
			protocol,
		}, err == nil && n > 0 &&
			(protocol == "TCP" || protocol == "UDP" || protocol == "SCTP")
}

// IsPodLabel reports whether policies may select pods by a key. The keys that an identity uses for namespaces and ports
// are not pod labels.
func IsPodLabel(key string) bool {
	return IsIdentity(key) && !strings.HasPrefix(key, NamespaceKey) && !strings.HasPrefix(key, portPrefix)
}

// IdentityLabels returns the labels that determine a container's app.
func IdentityLabels(labels map[string]string) map[string]string {
	identity := make(map[string]string, len(labels))
	for k, v := range labels {
		if IsIdentity(k) {
			identity[k] = v
		}
	}
	return identity
}

// IsIdentity reports whether labels with this key are part of the identity, so that policies can select by them.
func IsIdentity(key string) bool {
	hasPrefix := func(p string) bool { return strings.HasPrefix(key, p) }
	if slices.ContainsFunc(keptPrefixes, hasPrefix) {
		return true
	}
	domain, _, _ := strings.Cut(key, "/")
	return !slices.ContainsFunc(leftOutPrefixes, hasPrefix) && !strings.HasSuffix(domain, "beta.kubernetes.io")
}

// Canonical writes a label set in canonical form: "app=web,tier=front", sorted by key. Two sets are the same identity
// exactly if their canonical forms are equal.
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

// Limits of a label set. Those for one label are Kubernetes's, plus the longest prefix that an identity adds.
const (
	// of the container's own labels, of its namespace's labels, and of its ports
	maxLabels     = 64
	maxLabelKey   = len(namespaceLabelPrefix) + 253 + 1 + 63 // DNS subdomain, "/", name
	maxLabelValue = 63
)

// CheckLabels refuses labels that have no canonical form or that cannot be transmitted unchanged.
func CheckLabels(labels map[string]string) error {
	count := map[string]int{}
	for k, v := range labels {
		whose := "a container"
		switch {
		case strings.HasPrefix(k, NamespaceKey):
			whose = "a namespace, with its name,"
		case strings.HasPrefix(k, portPrefix):
			whose = "a container's named ports"
		}
		if count[whose]++; count[whose] > maxLabels {
			return fmt.Errorf("the labels of %s are %d at most, and there are more", whose, maxLabels)
		}
		_, isPort := readPort(v)
		switch {
		case k == "" || len(k) > maxLabelKey || strings.IndexFunc(k, notInKey) >= 0:
			return fmt.Errorf("label key %.400q: 1 to %d letters, digits or . _ - / are allowed", k, maxLabelKey)
		case len(v) > maxLabelValue || strings.IndexFunc(v, notInValue) >= 0:
			return fmt.Errorf(
				"label %s: value %.80q: at most %d letters, digits or . _ - are allowed",
				k,
				v,
				maxLabelValue,
			)
		case strings.HasPrefix(k, portPrefix) && !isPort:
			return fmt.Errorf("label %s: value %q names no port: write its number and protocol, as in 80-TCP", k, v)
		}
	}
	return nil
}

func notInValue(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '.' || r == '_' || r == '-')
}
func notInKey(r rune) bool { return r != '/' && notInValue(r) }

// ParseLabels parses what Canonical writes; it trims spaces around keys and values.
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
