// Package specfile reads YAML files that users write. It is strict, and its errors name the line.
package specfile

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Error is an error in a spec. Path is its place in the YAML, such as $.containers[2].node, or $ for the whole file.
type Error struct{ Path, Text string }

func (e *Error) Error() string {
	if e.Path == "$" {
		return e.Text
	}
	return strings.TrimPrefix(e.Path, "$.") + ": " + e.Text
}

// File is a parsed file.
type File struct {
	name string
	tree *ast.File
}

// Parse parses the content of a file into a struct. All fields of the struct must have yaml tags. Errors contain the
// name and the line.
func Parse[T any](name string, b []byte) (spec T, f File, err error) {
	f.name = name
	defer func() {
		// The library panics over some malformed tags and anchors.
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: invalid YAML: %v", name, p)
		}
	}()
	if f.tree, err = parser.ParseBytes(b, 0); err == nil {
		if err := f.once(reflect.TypeFor[T]()); err != nil {
			return spec, f, err
		}
		err = yaml.UnmarshalWithOptions(b, &spec, yaml.Strict())
	}
	var at yaml.Error
	if errors.As(err, &at) && at.GetToken() != nil {
		return spec, f, fmt.Errorf(
			"%s:%d: %s",
			name,
			at.GetToken().Position.Line,
			words(at, f.tree, reflect.TypeFor[T]()),
		)
	}
	if err != nil {
		return spec, f, fmt.Errorf("%s: %w", name, err)
	}
	return spec, f, nil
}

// once checks that the file has one document, and that every value in it has the type of its key. The library reads
// only the first document.
func (f File) once(t reflect.Type) error {
	read := false
	for _, d := range f.tree.Docs {
		if d.Body == nil {
			continue
		}
		if read {
			return fmt.Errorf(
				"%s:%d: a second document begins here: use one file for each",
				f.name,
				d.Body.GetToken().Position.Line,
			)
		}
		read = true
		if where, what := misread("", d.Body, t); where != nil {
			return fmt.Errorf("%s:%d: %s", f.name, where.GetToken().Position.Line, what)
		}
	}
	return nil
}

// Read returns the content of a file. what is the kind of file, for errors.
func Read(what, path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", what, err)
	}
	return b, nil
}

// Wrong adds file and line to an error, if it is an Error with a path.
func (f File) Wrong(err error) error {
	var wrong *Error
	if errors.As(err, &wrong) {
		if line := lineOf(f.tree, wrong.Path); line > 0 {
			return fmt.Errorf("%s:%d: %s", f.name, line, wrong.Text)
		}
	}
	return fmt.Errorf("%s: %w", f.name, err)
}

// words is the text of a library's error, with YAML terms in place of terms of Go.
func words(err yaml.Error, tree *ast.File, t reflect.Type) string {
	var unknown *yaml.UnknownFieldError
	if errors.As(err, &unknown) {
		what := strings.Replace(err.GetMessage(), "unknown field", "unknown key", 1)
		for _, d := range tree.Docs {
			if keys := keysBeside(d.Body, t, err.GetToken().Position.Offset); keys != nil {
				return what + ": the keys here are " + strings.Join(keys, ", ")
			}
		}
		return what
	}
	var wrong *yaml.TypeError
	if !errors.As(err, &wrong) {
		return err.GetMessage()
	}
	what := fmt.Sprintf("%s where %s is expected", shape(wrong.SrcType), shape(wrong.DstType))
	if wrong.StructFieldName != nil {
		_, field, _ := strings.Cut(*wrong.StructFieldName, ".")
		what = strings.ToLower(field) + ": " + what
	}
	return what
}

// keysBeside returns the valid keys of the mapping that has a key at the given offset. The node is of type t. The
// result is nil if no mapping in the node has the key.
func keysBeside(node ast.Node, t reflect.Type, offset int) []string {
	switch node := node.(type) {
	case *ast.SequenceNode:
		for _, v := range node.Values {
			if t.Kind() != reflect.Slice {
				return nil
			}
			if keys := keysBeside(v, t.Elem(), offset); keys != nil {
				return keys
			}
		}
	case *ast.MappingNode:
		if t.Kind() != reflect.Struct {
			return nil
		}
		types := fields(t)
		for _, v := range node.Values {
			if v.Key.GetToken().Position.Offset == offset {
				var keys []string
				for _, f := range structFields(t) {
					keys = append(keys, f.Tag.Get("yaml"))
				}
				return keys
			}
			if inside, ok := types[v.Key.GetToken().Value]; ok {
				if found := keysBeside(v.Value, inside, offset); found != nil {
					return found
				}
			}
		}
	}
	return nil
}

// shape is the YAML name of a type.
func shape(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a mapping"
	}
	return "a single word"
}

// Has reports whether the file has a value at a path, such as $.limits.time.
func (f File) Has(path string) bool {
	p, err := yaml.PathString(path)
	if err != nil {
		return false
	}
	node, err := p.FilterFile(f.tree)
	return err == nil && node != nil
}

// lineOf returns the line of a path. If the path is absent, it is the line of the closest parent; 0 for the whole file.
func lineOf(tree *ast.File, path string) int {
	for path != "$" && path != "" {
		if p, err := yaml.PathString(path); err == nil {
			if node, err := p.FilterFile(tree); err == nil && node.GetToken() != nil {
				return node.GetToken().Position.Line
			}
		}
		path = path[:strings.LastIndexAny(path, ".[")]
	}
	return 0
}
