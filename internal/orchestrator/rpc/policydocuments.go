package rpc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/policy"
)

// Limits of one policy.
const (
	MaxDocument = 64 << 10 // bytes of the stored JSON
	maxRules    = 1000
)

// appliedAnnotation is kubectl's copy of the applied document.
const appliedAnnotation = "kubectl.kubernetes.io/last-applied-configuration"

// SplitDocuments splits YAML at lines "---" and omits documents that have only comments.
func SplitDocuments(text string) (documents []string) {
	var document strings.Builder
	hasContent := false
	end := func() {
		if hasContent {
			documents = append(documents, document.String())
		}
		document.Reset()
		hasContent = false
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "---"); ok && strings.TrimLeft(rest, " \t\r\n") != rest ||
			line == "---" {
			end()
			line = rest
		}
		document.WriteString(line)
		trimmed := strings.TrimSpace(line)
		hasContent = hasContent || trimmed != "" && trimmed[0] != '#'
	}
	end()
	return documents
}

// checkSingle refuses text of which a parser would read only the beginning.
func checkSingle(text string) error {
	switch n := len(SplitDocuments(text)); {
	case n == 0:
		return errors.New("it is empty")
	case n > 1:
		return fmt.Errorf("the text has %d documents; send each separately", n)
	}
	for line := range strings.Lines(text) {
		if strings.TrimRight(line, " \t\r\n") == "..." {
			return errors.New(
				"its line ... ends it, and a parser would ignore the rest: separate documents by lines ---",
			)
		}
	}
	return nil
}

// ReadPolicies reads documents, which may be lists. An error names the document by its number.
func ReadPolicies(documents []string) (all []*pilasterv1.Policy, err error) {
	seen := map[cache.PolicyName]int{}
	for i, text := range documents {
		read, err := readDocument(text)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w; nothing was changed", i+1, err)
		}
		for _, p := range read {
			if first, twice := seen[cache.PolicyNameOf(p)]; twice {
				return nil, fmt.Errorf(
					"document %d: %s is there twice, first in document %d; nothing was changed",
					i+1,
					store.PolicyName(p),
					first,
				)
			}
			seen[cache.PolicyNameOf(p)] = i + 1
		}
		all = append(all, read...)
	}
	if len(all) == 0 {
		return nil, errors.New("no document has a policy; nothing was changed")
	}
	return all, nil
}

func readDocument(text string) ([]*pilasterv1.Policy, error) {
	if err := checkSingle(text); err != nil {
		return nil, err
	}
	asJSON, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	var is struct {
		Kind  string            `json:"kind"`
		Items []json.RawMessage `json:"items"`
	}
	if json.Unmarshal(asJSON, &is) != nil || !strings.HasSuffix(is.Kind, "List") {
		p, err := readPolicy(asJSON)
		return []*pilasterv1.Policy{p}, err
	}
	var all []*pilasterv1.Policy
	for i, item := range is.Items {
		p, err := readPolicy(item)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i+1, err)
		}
		all = append(all, p)
	}
	return all, nil
}

// readPolicy reads one document. The stored form is canonical: JSON with sorted keys and with the namespace, without
// the fields that a Kubernetes cluster adds.
func readPolicy(asJSON []byte) (*pilasterv1.Policy, error) {
	var document map[string]any
	decoder := json.NewDecoder(bytes.NewReader(asJSON))
	decoder.UseNumber()
	if err := decoder.Decode(&document); err != nil {
		return nil, errors.New("it is not an object with apiVersion, kind, metadata and spec")
	}
	if kind, _ := document["kind"].(string); strings.HasSuffix(kind, "List") {
		return nil, errors.New("a list without items, or a list in a list: write its items separately")
	}
	metadata := clean(document)
	text, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	read, err := policy.Parse(text)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "document 1: "))
	}
	is := read[0]
	p := &pilasterv1.Policy{
		Kind:      document["kind"].(string),
		Namespace: is.Namespace,
		Name:      is.Name,
		Audit:     is.Audit,
		Rules:     uint32(len(is.Rules[policy.Ingress]) + len(is.Rules[policy.Egress])),
	}
	if p.Namespace != "" {
		metadata["namespace"] = p.Namespace
	}
	if text, err = json.Marshal(document); err != nil {
		return nil, err
	}
	if p.Document = string(text); len(text) > MaxDocument || p.Rules > maxRules {
		return nil, fmt.Errorf(
			"%s: it has %d bytes as JSON and %d rules, and the maximum is %d and %d: split it into several policies "+
				"with the same selector",
			store.PolicyName(p),
			len(text),
			p.Rules,
			MaxDocument,
			maxRules,
		)
	}
	return p, nil
}

// clean removes the fields that a Kubernetes cluster adds, and returns the metadata.
func clean(document map[string]any) map[string]any {
	delete(document, "status")
	metadata, _ := document["metadata"].(map[string]any)
	added := []string{"creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"}
	for _, added := range added {
		delete(metadata, added)
	}
	if annotations, ok := metadata["annotations"].(map[string]any); ok {
		delete(annotations, appliedAnnotation)
		if len(annotations) == 0 {
			delete(metadata, "annotations")
		}
	}
	return metadata
}
