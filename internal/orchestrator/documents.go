package orchestrator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// What a policy may have.
const (
	maxDocument = 64 << 10 // bytes, as it is kept
	maxRules    = 1000
)

// Annotations of a policy.
const (
	auditAnnotation   = "pilaster.io/audit"
	appliedAnnotation = "kubectl.kubernetes.io/last-applied-configuration"
)

// defaultNamespace is where a policy is that names none, as in Kubernetes.
const defaultNamespace = "default"

// kinds are those of policies, by what they call themselves.
var kinds = map[string]struct {
	version    string
	namespaced bool
}{
	"NetworkPolicy":        {"networking.k8s.io/v1", true},
	"ClusterNetworkPolicy": {"policy.networking.k8s.io/v1alpha2", false},
}

// names of namespaces and of policies.
var (
	namespaceForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	policyForm    = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
)

// object is as much of a document as says which it is.
type object struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Ingress []json.RawMessage `json:"ingress"`
		Egress  []json.RawMessage `json:"egress"`
	} `json:"spec"`
	Items []json.RawMessage `json:"items"`
}

// SplitDocuments parts YAML at its lines "---", and leaves out what has comments alone.
func SplitDocuments(text string) (documents []string) {
	var document strings.Builder
	says := false
	end := func() {
		if says {
			documents = append(documents, document.String())
		}
		document.Reset()
		says = false
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "---"); ok && strings.TrimLeft(rest, " \t\r\n") != rest || line == "---" {
			end()
			line = rest
		}
		document.WriteString(line)
		trimmed := strings.TrimSpace(line)
		says = says || trimmed != "" && trimmed[0] != '#'
	}
	end()
	return documents
}

// whole refuses text of which only the beginning would be read.
func whole(text string) error {
	switch n := len(SplitDocuments(text)); {
	case n == 0:
		return errors.New("nothing is in it")
	case n > 1:
		return fmt.Errorf("it is %d documents, and each comes by itself", n)
	}
	for line := range strings.Lines(text) {
		if strings.TrimRight(line, " \t\r\n") == "..." {
			return errors.New("its line ... ends it, and what follows would not be read: divide documents by lines ---")
		}
	}
	return nil
}

// readPolicies reads documents as people write them, which may be lists. An error names the document by its number.
func readPolicies(documents []string) (all []*pilasterv1.Policy, err error) {
	seen := map[policyName]int{}
	for i, text := range documents {
		read, err := readDocument(text)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w; nothing was changed", i+1, err)
		}
		for _, p := range read {
			if first, twice := seen[nameOf(p)]; twice {
				return nil, fmt.Errorf("document %d: %s is there twice, first in document %d; nothing was changed", i+1, store.PolicyName(p), first)
			}
			seen[nameOf(p)] = i + 1
		}
		all = append(all, read...)
	}
	if len(all) == 0 {
		return nil, errors.New("no document has a policy; nothing was changed")
	}
	return all, nil
}

func readDocument(text string) ([]*pilasterv1.Policy, error) {
	if err := whole(text); err != nil {
		return nil, err
	}
	asJSON, err := toJSON(text)
	if err != nil {
		return nil, err
	}
	var o object
	if err := json.Unmarshal(asJSON, &o); err != nil {
		return nil, wrongType(err)
	}
	if o.APIVersion != "v1" || o.Kind != "List" {
		p, err := readPolicy(asJSON, o)
		return []*pilasterv1.Policy{p}, err
	}
	var all []*pilasterv1.Policy
	for i, item := range o.Items {
		var o object
		if err := json.Unmarshal(item, &o); err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, wrongType(err))
		}
		p, err := readPolicy(item, o)
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		all = append(all, p)
	}
	return all, nil
}

// toJSON reads YAML, or JSON, which is YAML too.
func toJSON(text string) (_ []byte, err error) {
	defer func() {
		// The library panics over some malformed tags and anchors.
		if p := recover(); p != nil {
			err = fmt.Errorf("not understood as YAML: %v", p)
		}
	}()
	asJSON, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		return nil, errors.New(yaml.FormatError(err, false, false))
	}
	return asJSON, nil
}

// wrongType says it in the words of who writes documents.
func wrongType(err error) error {
	if at, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && at.Field != "" {
		return fmt.Errorf("%s: it is a %s, and something else is to be there", at.Field, at.Value)
	}
	return errors.New("it is no object with apiVersion, kind, metadata and spec")
}

// readPolicy reads one document.
func readPolicy(asJSON []byte, o object) (*pilasterv1.Policy, error) {
	kind, known := kinds[o.Kind]
	if !known || kind.version != o.APIVersion {
		return nil, fmt.Errorf("apiVersion %.80q, kind %.80q: say networking.k8s.io/v1 and NetworkPolicy, or policy.networking.k8s.io/v1alpha2 and ClusterNetworkPolicy", o.APIVersion, o.Kind)
	}
	p := &pilasterv1.Policy{Kind: o.Kind, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, Rules: uint32(len(o.Spec.Ingress) + len(o.Spec.Egress))}
	switch {
	case !policyForm.MatchString(p.Name):
		return nil, fmt.Errorf("%s: metadata.name %.80q: 1 to 253 lower-case letters, digits, - or ., and at both ends a letter or digit", o.Kind, p.Name)
	case !kind.namespaced && p.Namespace != "":
		return nil, fmt.Errorf("%s %s: metadata.namespace: policies of this kind are of the whole tenant; leave it out", o.Kind, p.Name)
	case kind.namespaced && p.Namespace == "":
		p.Namespace = defaultNamespace
	}
	if kind.namespaced && !namespaceForm.MatchString(p.Namespace) {
		return nil, fmt.Errorf("%s %s: metadata.namespace %.80q: 1 to 63 lower-case letters, digits or -, not - at either end", o.Kind, p.Name, p.Namespace)
	}
	switch audit := o.Metadata.Annotations[auditAnnotation]; audit {
	case "true":
		p.Audit = true
	case "", "false":
	default:
		return nil, fmt.Errorf("%s: annotation %s is %.20q: say \"true\" or \"false\"", store.PolicyName(p), auditAnnotation, audit)
	}
	document, err := canonical(asJSON, p.Namespace)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", store.PolicyName(p), err)
	}
	if p.Document = string(document); len(document) > maxDocument || p.Rules > maxRules {
		return nil, fmt.Errorf("%s: it has %d bytes as JSON and %d rules, and a policy may have %d and %d: make several of it, of which each selects the same", store.PolicyName(p), len(document), p.Rules, maxDocument, maxRules)
	}
	return p, nil
}

// canonical is a document as it is kept: JSON with sorted keys, with its namespace, and without what a cluster of Kubernetes has added to it.
func canonical(asJSON []byte, namespace string) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(asJSON))
	decoder.UseNumber()
	var document map[string]any
	if err := decoder.Decode(&document); err != nil {
		return nil, err
	}
	delete(document, "status")
	metadata, ok := document["metadata"].(map[string]any)
	if !ok {
		return nil, errors.New("metadata: its name belongs there")
	}
	for _, added := range []string{"creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"} {
		delete(metadata, added)
	}
	if annotations, ok := metadata["annotations"].(map[string]any); ok {
		delete(annotations, appliedAnnotation)
		if len(annotations) == 0 {
			delete(metadata, "annotations")
		}
	}
	if namespace != "" {
		metadata["namespace"] = namespace
	}
	return json.Marshal(document)
}
