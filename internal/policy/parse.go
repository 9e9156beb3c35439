package policy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	convert "sigs.k8s.io/yaml"
)

// maxWrong is how many faults of a document an error lists.
const maxWrong = 10

// The kinds and versions of documents, and of a list of documents.
const (
	networkPolicyKind = "NetworkPolicy"
	clusterPolicyKind = "ClusterNetworkPolicy"
	networkingV1      = "networking.k8s.io/v1"
	clusterV1alpha2   = "policy.networking.k8s.io/v1alpha2"
)

// Parse reads YAML or JSON documents that are separated by lines "---"; a document may be a List. It rejects a policy
// that nodes could not enforce exactly as written. The error names the document, the policy and the field.
func Parse(text []byte) ([]Policy, error) {
	var policies []Policy
	in := map[string]string{} // the document of each policy
	r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for n := 1; ; {
		where := fmt.Sprintf("document %d", n)
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		text, err := toJSON(where, doc)
		if err != nil {
			return nil, err
		}
		if string(bytes.TrimSpace(text)) == "null" {
			continue // empty, or comments only
		}
		n++
		found, err := parseDocument(where, text)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			name := f.policy.String()
			if before, twice := in[name]; twice {
				return nil, fmt.Errorf("%s: %s is also in %s: leave one of them out", f.where, name, before)
			}
			in[name] = f.where
			policies = append(policies, f.policy)
		}
	}
	if len(policies) == 0 {
		return nil, fmt.Errorf(
			"no policy in it: write documents of kind %s or %s",
			networkPolicyKind,
			clusterPolicyKind,
		)
	}
	return policies, nil
}

// found is a policy with the document that contains it.
type found struct {
	policy Policy
	where  string
}

func toJSON(where string, doc []byte) ([]byte, error) {
	for line := range bytes.Lines(doc) {
		if string(bytes.TrimRight(line, " \t\n")) == "..." {
			return nil, fmt.Errorf(
				"%s: the line ... ends the document, and YAML ignores the text after it: separate documents by ---",
				where,
			)
		}
	}
	if json.Valid(doc) {
		return doc, nil
	}
	text, err := convert.YAMLToJSONStrict(doc)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", where, oneLine(err))
	}
	return text, nil
}

func parseDocument(where string, text []byte) ([]found, error) {
	var h head
	if err := decodeSome(text, &h); err != nil {
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	if strings.HasSuffix(h.Kind, "List") {
		return parseList(where, h, text)
	}
	f, err := parseObject(where, h, text)
	return []found{f}, err
}

// head holds the fields that identify the kind and the name of a document.
type head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

func (h head) is(apiVersion, kind string) bool { return h.APIVersion == apiVersion && h.Kind == kind }

func parseObject(where string, h head, text []byte) (found, error) {
	switch {
	case h.is(networkingV1, networkPolicyKind):
		return one(where, h, text, fromNetworkPolicy)
	case h.is(clusterV1alpha2, clusterPolicyKind):
		return one(where, h, text, fromClusterPolicy)
	}
	return found{}, fmt.Errorf("%s: kind %q of apiVersion %q: write kind %s of %s, kind %s of %s, or a List of these",
		where, h.Kind, h.APIVersion, networkPolicyKind, networkingV1, clusterPolicyKind, clusterV1alpha2)
}

func parseList(where string, h head, text []byte) (all []found, err error) {
	if !h.is("v1", "List") && !h.is(networkingV1, networkPolicyKind+"List") &&
		!h.is(clusterV1alpha2, clusterPolicyKind+"List") {
		return nil, fmt.Errorf("%s: kind %q of apiVersion %q: write a List of v1", where, h.Kind, h.APIVersion)
	}
	var list struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := decode(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", where, h.Kind, err)
	}
	for i, item := range list.Items {
		where := fmt.Sprintf("%s, item %d", where, i+1)
		var h head
		if err := decodeSome(item, &h); err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		f, err := parseObject(where, h, item)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// one reads the policy of a document of type T.
func one[T any](where string, h head, text []byte, from func(*T) (Policy, field.ErrorList)) (found, error) {
	called := fmt.Sprintf("%s: %s %s", where, h.Kind, strings.TrimPrefix(h.Metadata.Namespace+"/"+h.Metadata.Name, "/"))
	object := new(T)
	if err := decode(text, object); err != nil {
		return found{}, fmt.Errorf("%s: %w", called, err)
	}
	policy, wrong := from(object)
	if len(wrong) > 0 {
		return found{}, fmt.Errorf("%s: %w", called, errorOf(wrong))
	}
	return found{policy, where}, nil
}

// decode rejects unknown and duplicate fields.
func decode(text []byte, into any) error {
	strict, err := kjson.UnmarshalStrict(text, into)
	if err == nil {
		if err = errors.Join(strict...); err != nil && namesField.MatchString(err.Error()) {
			strict = append(strict, errors.New("egress to names is not supported; use ipBlock or networks"))
			err = errors.Join(strict...)
		}
	}
	return inWords(err)
}

// namesField matches the error of a field by which other networks select peers outside by DNS names.
var namesField = regexp.MustCompile(`(?i)unknown field "[^"]*\.(domainNames|(to)?fqdns?)"`)

// decodeSome ignores unknown fields.
func decodeSome(text []byte, into any) error {
	return inWords(kjson.UnmarshalCaseSensitivePreserveInts(text, into))
}

// inWords rewrites an error of the decoder without the names of Go types in it.
func inWords(err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		hint := ""
		if wrong.Type.Kind() == reflect.String {
			hint = `: YAML reads it as one because it has no quotes; write it in quotes, as in "true"`
		}
		return fmt.Errorf("%s: a %s is not valid here%s", strings.TrimLeft(wrong.Field, "."), wrong.Value, hint)
	}
	if err != nil {
		return errors.New(oneLine(err))
	}
	return nil
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func errorOf(wrong field.ErrorList) error {
	var texts []string
	for _, e := range wrong {
		texts = append(texts, e.Error())
	}
	if more := len(texts) - maxWrong; more > 0 {
		texts = append(slices.Clip(texts[:maxWrong]), fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(texts, "; "))
}

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
	if len(wrong) > 0 {
		return Policy{}, errorOf(wrong)
	}
	return p, nil
}
