// Package manifest reads documents in YAML or JSON that describe objects as Kubernetes does: separated by lines "---",
// alone or in a List. It does not know the fields of any kind.
package manifest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	convert "sigs.k8s.io/yaml"
)

// maxWrong is how many faults of a document an error lists.
const maxWrong = 10

// Kind is a kind of documents.
type Kind struct{ APIVersion, Name string }

func (k Kind) String() string { return fmt.Sprintf("kind %s of %s", k.Name, k.APIVersion) }

// Document is an object of one of the expected kinds.
type Document struct {
	Where string // "document 2, item 1"
	Head
	JSON []byte
}

// Head holds the fields that identify the kind and the name of an object.
type Head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

// Is reports whether the object is of a kind.
func (h Head) Is(k Kind) bool { return h.APIVersion == k.APIVersion && h.Kind == k.Name }

// Called says where an object is and what its name is, for errors.
func (d Document) Called() string {
	return fmt.Sprintf("%s: %s %s", d.Where, d.Kind, strings.TrimPrefix(d.Metadata.Namespace+"/"+d.Metadata.Name, "/"))
}

// Read calls visit for each object, in order, until an error. Objects of other kinds are errors. It returns the number
// of objects.
func Read(text []byte, kinds []Kind, visit func(Document) error) (objects int, err error) {
	r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for n := 1; ; {
		where := fmt.Sprintf("document %d", n)
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return objects, fmt.Errorf("%s: %w", where, err)
		}
		text, err := toJSON(where, doc)
		if err != nil {
			return objects, err
		}
		if string(bytes.TrimSpace(text)) == "null" {
			continue // empty, or comments only
		}
		n++
		all, err := expand(where, text, kinds)
		for _, d := range all {
			if err := visit(d); err != nil {
				return objects, err
			}
			objects++
		}
		if err != nil {
			return objects, err
		}
	}
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

// expand returns the object of a document, or those of a list. With an error it returns those before it.
func expand(where string, text []byte, kinds []Kind) (all []Document, err error) {
	var h Head
	if err := decodeSome(text, &h); err != nil {
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	if !strings.HasSuffix(h.Kind, "List") {
		return one(nil, Document{where, h, text}, kinds)
	}
	isList := func(k Kind) bool { return h.Is(Kind{k.APIVersion, k.Name + "List"}) }
	if !h.Is(Kind{"v1", "List"}) && !slices.ContainsFunc(kinds, isList) {
		return nil, fmt.Errorf("%s: kind %q of apiVersion %q: write a List of v1", where, h.Kind, h.APIVersion)
	}
	var list struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := Decode(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", where, h.Kind, err)
	}
	for i, item := range list.Items {
		where := fmt.Sprintf("%s, item %d", where, i+1)
		var h Head
		if err := decodeSome(item, &h); err != nil {
			return all, fmt.Errorf("%s: %w", where, err)
		}
		if all, err = one(all, Document{where, h, item}, kinds); err != nil {
			return all, err
		}
	}
	return all, nil
}

// one appends a document, or refuses it if it is of none of the kinds.
func one(all []Document, d Document, kinds []Kind) ([]Document, error) {
	if slices.ContainsFunc(kinds, d.Is) {
		return append(all, d), nil
	}
	var names []string
	for _, k := range kinds {
		names = append(names, k.String())
	}
	return all, fmt.Errorf("%s: kind %q of apiVersion %q: write %s, or a List of these", d.Where, d.Kind, d.APIVersion,
		strings.Join(names, ", "))
}

// Decode decodes JSON and rejects unknown and duplicate fields, by name.
func Decode(text []byte, into any) error {
	strict, err := kjson.UnmarshalStrict(text, into)
	if err == nil {
		err = errors.Join(strict...)
	}
	return inWords(err)
}

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

// ErrorOf joins the faults of an object; nil if there are none.
func ErrorOf(wrong field.ErrorList) error {
	if len(wrong) == 0 {
		return nil
	}
	var texts []string
	for _, e := range wrong {
		texts = append(texts, e.Error())
	}
	if more := len(texts) - maxWrong; more > 0 {
		texts = append(slices.Clip(texts[:maxWrong]), fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(texts, "; "))
}
