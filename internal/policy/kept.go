package policy

import (
	"encoding/json"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ParseKept reads one document of a kind, in JSON, as the orchestrator keeps it. It refuses of the policy what Parse
// does, in half the time: every node that hosts the tenant reads it at each change.
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

// kept is an object of Kubernetes with little metadata, which most of the time of reading one goes into.
type kept[S any] struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Annotations map[string]string `json:"annotations"`

		// What else there may be means nothing here.
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
			"it is kind %q of apiVersion %q, and not %s of %s",
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
	if len(wrong) > 0 {
		return Policy{}, errorOf(wrong)
	}
	return p, nil
}
