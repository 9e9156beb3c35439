package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
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
		return Spec{}, fmt.Errorf("%s:%d: %s", file, at.GetToken().Position.Line, strings.Replace(at.GetMessage(), "unknown field", "unknown key", 1))
	}
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	if s.Name == "" {
		s.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	}
	if err := s.Validate(); err != nil {
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
