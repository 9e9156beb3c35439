package policy

import (
	"encoding/json"
	"fmt"
	"regexp"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"pilaster.io/pilaster/internal/manifest"
)

// The kinds and versions of documents.
const (
	networkPolicyKind = "NetworkPolicy"
	clusterPolicyKind = "ClusterNetworkPolicy"
	networkingV1      = "networking.k8s.io/v1"
	clusterV1alpha2   = "policy.networking.k8s.io/v1alpha2"
)

var kinds = []manifest.Kind{
	{APIVersion: networkingV1, Name: networkPolicyKind}, {APIVersion: clusterV1alpha2, Name: clusterPolicyKind},
}

// Parse reads YAML or JSON documents that are separated by lines "---"; a document may be a List. It rejects a policy
// that nodes could not enforce exactly as written. The error names the document, the policy and the field.
func Parse(text []byte) ([]Policy, error) {
	var policies []Policy
	in := map[string]string{} // the document of each policy
	n, err := manifest.Read(text, kinds, func(d manifest.Document) error {
		p, err := fromDocument(d)
		if err != nil {
			return err
		}
		name := p.String()
		if before, twice := in[name]; twice {
			return fmt.Errorf("%s: %s is also in %s: leave one of them out", d.Where, name, before)
		}
		in[name] = d.Where
		policies = append(policies, p)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, fmt.Errorf(
			"no policy in it: write documents of kind %s or %s",
			networkPolicyKind,
			clusterPolicyKind,
		)
	}
	return policies, nil
}

func fromDocument(d manifest.Document) (Policy, error) {
	if d.Is(kinds[0]) {
		return one(d, fromNetworkPolicy)
	}
	return one(d, fromClusterPolicy)
}

// one reads the policy of a document of type T.
func one[T any](d manifest.Document, from func(*T) (Policy, field.ErrorList)) (Policy, error) {
	object := new(T)
	if err := decode(d.JSON, object); err != nil {
		return Policy{}, fmt.Errorf("%s: %w", d.Called(), err)
	}
	policy, wrong := from(object)
	if err := manifest.ErrorOf(wrong); err != nil {
		return Policy{}, fmt.Errorf("%s: %w", d.Called(), err)
	}
	return policy, nil
}

// decode rejects unknown and duplicate fields.
func decode(text []byte, into any) error {
	err := manifest.Decode(text, into)
	if err != nil && namesField.MatchString(err.Error()) {
		return fmt.Errorf("%w; egress to names is not supported; use ipBlock or networks", err)
	}
	return err
}

// namesField matches the error of a field by which other networks select peers outside by DNS names.
var namesField = regexp.MustCompile(`(?i)unknown field "[^"]*\.(domainNames|(to)?fqdns?)"`)

// ParseKept reads one JSON document of a kind, as the orchestrator stores it. It rejects the same policies as Parse and
// takes half the time. Its speed matters: at each change every node that hosts the tenant parses all its policies.
func ParseKept(kind string, text []byte) (Policy, error) {
	switch kind {
	case networkPolicyKind:
		return readKept(
			kind,
			networkingV1,
			text,
			func(meta metav1.ObjectMeta, spec networkingv1.NetworkPolicySpec) (Policy, field.ErrorList) {
				return fromNetworkPolicy(&networkingv1.NetworkPolicy{ObjectMeta: meta, Spec: spec})
			},
		)
	case clusterPolicyKind:
		return readKept(
			kind,
			clusterV1alpha2,
			text,
			func(meta metav1.ObjectMeta, spec clusterSpec) (Policy, field.ErrorList) {
				return fromClusterPolicy(&clusterPolicy{ObjectMeta: meta, Spec: spec})
			},
		)
	}
	return Policy{}, fmt.Errorf("kind %q: this build knows %s and %s", kind, networkPolicyKind, clusterPolicyKind)
}

// kept is a Kubernetes object with only the metadata that matters here. Decoding all metadata would take most of the
// time.
type kept[S any] struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Annotations map[string]string `json:"annotations"`

		// The other fields of metadata are accepted and ignored.
		GenerateName               json.RawMessage `json:"generateName"`
		DeletionTimestamp          json.RawMessage `json:"deletionTimestamp"`
		DeletionGracePeriodSeconds json.RawMessage `json:"deletionGracePeriodSeconds"`
		Labels                     json.RawMessage `json:"labels"`
		OwnerReferences            json.RawMessage `json:"ownerReferences"`
		Finalizers                 json.RawMessage `json:"finalizers"`
	} `json:"metadata"`
	Spec S `json:"spec"`
}

func readKept[S any](
	kind, apiVersion string,
	text []byte,
	from func(metav1.ObjectMeta, S) (Policy, field.ErrorList),
) (Policy, error) {
	var k kept[S]
	if err := decode(text, &k); err != nil {
		return Policy{}, err
	}
	if k.Kind != kind || k.APIVersion != apiVersion {
		return Policy{}, fmt.Errorf(
			"kind %q of apiVersion %q in place of %s of %s",
			k.Kind,
			k.APIVersion,
			kind,
			apiVersion,
		)
	}
	p, wrong := from(
		metav1.ObjectMeta{Name: k.Metadata.Name, Namespace: k.Metadata.Namespace, Annotations: k.Metadata.Annotations},
		k.Spec,
	)
	return p, manifest.ErrorOf(wrong)
}
