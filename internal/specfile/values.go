package specfile

import (
	"encoding"
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
)

// misread finds the first value in a node that does not have the type of its key, and describes which values are valid.
// For most of these the library reports neither key nor line, and it truncates 20.5 to 20.
func misread(key string, node ast.Node, t reflect.Type) (where ast.Node, what string) {
	switch node := node.(type) {
	case *ast.SequenceNode:
		for _, v := range node.Values {
			if t.Kind() != reflect.Slice {
				return nil, ""
			}
			if where, what := misread(key, v, t.Elem()); where != nil {
				return where, what
			}
		}
	case *ast.MappingNode:
		types := fields(t)
		for _, v := range node.Values {
			key := v.Key.GetToken().Value
			if t, ok := types[key]; ok {
				if where, what := misread(key, v.Value, t); where != nil {
					return where, what
				}
			}
		}
	case *ast.AnchorNode:
		return misread(key, node.Value, t)
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode, *ast.BoolNode:
		text := node.GetToken().Value
		if instead := notOf(t, text); instead != "" {
			return node, fmt.Sprintf("%s %s: %s", key, text, instead)
		}
	}
	return nil, ""
}

// fields are the types of a struct's keys.
func fields(t reflect.Type) map[string]reflect.Type {
	types := map[string]reflect.Type{}
	for _, f := range structFields(t) {
		types[f.Tag.Get("yaml")] = f.Type
	}
	return types
}

// inline is the tag of a struct whose keys are beside those of the struct that has it.
const inline = ",inline"

// structFields are a struct's fields, with those of inlined structs in their places.
func structFields(t reflect.Type) (all []reflect.StructField) {
	if t.Kind() != reflect.Struct {
		return nil
	}
	for i := range t.NumField() {
		switch f := t.Field(i); f.Tag.Get("yaml") {
		case inline:
			all = append(all, structFields(f.Type)...)
		case "-": // it is no key
		default:
			all = append(all, f)
		}
	}
	return all
}

// notOf describes the valid values if a text is no value of the type, and is empty otherwise.
func notOf(t reflect.Type, text string) string {
	value := reflect.New(t).Interface()
	switch value := value.(type) {
	case *time.Duration:
		number, err := strconv.ParseFloat(text, 64)
		if err == nil && number > 0 {
			return fmt.Sprintf("use a time with its unit, such as %ss", text)
		}
		if _, wrong := time.ParseDuration(text); wrong != nil || err == nil {
			return "use a time with its unit, such as 30s"
		}
	case *netip.Prefix:
		if _, err := netip.ParsePrefix(text); err != nil {
			return "use a range of addresses, such as 10.0.0.0/16 or fd10::/48"
		}
	case encoding.TextUnmarshaler:
		if err := value.UnmarshalText([]byte(text)); err != nil {
			return err.Error()
		}
	default:
		digits := strings.ReplaceAll(text, "_", "")
		if _, err := strconv.ParseInt(digits, 0, 64); err != nil && reflect.Zero(t).CanInt() {
			return "use a whole number"
		}
		if _, err := strconv.ParseUint(digits, 0, 64); err != nil && reflect.Zero(t).CanUint() {
			return "use a whole number, 0 or more"
		}
		if lower := strings.ToLower(text); t.Kind() == reflect.Bool && lower != "true" && lower != "false" {
			return "use true or false"
		}
	}
	return ""
}
