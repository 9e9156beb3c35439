package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"pilaster.io/pilaster/internal/datapath"
)

// ReadSpec reads a lab's YAML file. The lab is called like the file where it has no name.
func ReadSpec(path string) (Spec, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Spec{}, fmt.Errorf("read the lab: %w", err)
	}
	return ParseSpec(path, b)
}

// ParseSpec reads YAML; the file's name is the default name and stands in errors, with the line.
func ParseSpec(file string, b []byte) (Spec, error) {
	s, tree, err := decode(b)
	var at yaml.Error
	if errors.As(err, &at) && at.GetToken() != nil {
		return Spec{}, fmt.Errorf("%s:%d: %s", file, at.GetToken().Position.Line, words(at, tree))
	}
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	if s.Name == "" {
		s.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	}
	err = s.Validate()
	if err == nil && s.Device == "" && has(tree, "device") {
		err = &specError{"$.device", fmt.Sprintf("device is empty: say %s, or leave it out", strings.Join(datapath.Choices(), ", "))}
	}
	if err != nil {
		var wrong *specError
		if errors.As(err, &wrong) {
			if line := lineOf(tree, wrong.path); line > 0 {
				return Spec{}, fmt.Errorf("%s:%d: %s", file, line, wrong.text)
			}
		}
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

// words are the library's own, but for those that are about Go.
func words(err yaml.Error, tree *ast.File) string {
	var unknown *yaml.UnknownFieldError
	if errors.As(err, &unknown) {
		what := strings.Replace(err.GetMessage(), "unknown field", "unknown key", 1)
		for _, d := range tree.Docs {
			if keys := keysBeside(d.Body, reflect.TypeFor[Spec](), err.GetToken().Position.Offset); keys != nil {
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

// keysBeside are those that may stand where the key at an offset does, in what is read as a type; nil where the key is not in there.
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
		var keys []string
		types := map[string]reflect.Type{}
		for i := range t.NumField() {
			key := t.Field(i).Tag.Get("yaml")
			keys, types[key] = append(keys, key), t.Field(i).Type
		}
		for _, v := range node.Values {
			if v.Key.GetToken().Position.Offset == offset {
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

// shape is what a type is in YAML.
func shape(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a mapping"
	}
	return "a single word"
}

// has tells whether the file has a key at its top.
func has(tree *ast.File, key string) bool {
	for _, d := range tree.Docs {
		if top, ok := d.Body.(*ast.MappingNode); ok {
			for _, v := range top.Values {
				if v.Key.GetToken().Value == key {
					return true
				}
			}
		}
	}
	return false
}

func decode(b []byte) (s Spec, tree *ast.File, err error) {
	defer func() {
		// The library panics over some malformed tags and anchors.
		if p := recover(); p != nil {
			err = fmt.Errorf("not understood as YAML: %v", p)
		}
	}()
	if tree, err = parser.ParseBytes(b, 0); err == nil {
		err = yaml.UnmarshalWithOptions(b, &s, yaml.Strict())
	}
	return s, tree, err
}

// lineOf finds the line of a path, or of what should contain it where it is left out; 0 for the
// whole file.
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
